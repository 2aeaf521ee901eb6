"""The tasks that `linrope fit` trains: a table of names, or a class of your own (`task: my_module.MyTask`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from linrope.cli.checkpoint import LANGUAGE_MODELING
from linrope.cli.config_files import CONFIG, names_and_values
from linrope.cli.own_classes import import_class
from linrope.cli.parser import options_in
from linrope.errors import InputError, suggest
from linrope.training.task import TrainingTask
from linrope.training.tasks.classification import ClassificationModule
from linrope.training.tasks.conversion import AttentionAlignmentModule, DistillationModule
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.training.tasks.masked_lm import MaskedLMModule
from linrope.training.tasks.multiple_choice import MultipleChoiceModule
from linrope.training.tasks.question_answering import QuestionAnsweringModule
from linrope.training.tasks.token_classification import TokenClassificationModule
from linrope.training.tasks.translation import TranslationModule
from linrope.utils.options import class_path_of

TASKS: dict[str, type[TrainingTask]] = {
    LANGUAGE_MODELING: LanguageModelingModule,
    "masked_lm": MaskedLMModule,
    "classification": ClassificationModule,
    "multiple_choice": MultipleChoiceModule,
    "question_answering": QuestionAnsweringModule,
    "token_classification": TokenClassificationModule,
    "translation": TranslationModule,
    "attention_alignment": AttentionAlignmentModule,
    "distillation": DistillationModule,
}
"""The LightningModule of each task; its `config_class` and `data_class` are the sections model and data."""


def task_of(args: Sequence[str]) -> type[TrainingTask]:
    """The task that a command line names, in --task or in its --config files; the last one counts.

    Raises:
        InputError: no such task, or a class that is no `TrainingTask` with `config_class` and `data_class`.
    """
    return _task_class([LANGUAGE_MODELING, *_named(args)][-1])


def _named(args: Sequence[str]) -> Iterator[Any]:
    for option, value in names_and_values(args):
        if option in CONFIG and "task" in (options := options_in(value)):
            yield options["task"]
        elif option == "--task":
            yield value


def _task_class(name: Any) -> type[TrainingTask]:
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    if "." not in str(name):
        raise InputError(
            f"task={name!r} is unknown: choose one of {', '.join(TASKS)}, or the MODULE.CLASS of a task of your own."
            f"{suggest(str(name), TASKS)}"
        )
    task = import_class("task", name)
    if not (isinstance(task, type) and issubclass(task, TrainingTask) and hasattr(task, "data_class")):
        raise InputError(
            f"task={name!r} must be a subclass of {class_path_of(TrainingTask)} that sets config_class and data_class."
        )
    return task


def name_of_task(class_path: str) -> str:
    """The name of a task in the table, by its class; the class itself for others."""
    return next((name for name, task in TASKS.items() if class_path_of(task) == class_path), class_path)
