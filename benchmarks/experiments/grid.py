"""Grids of training runs: a YAML file with the options that all runs share, the variants, and the seeds.

    title: Where the rotation stands
    tokens: 1_000_000               # of each run; or minutes: 10, at the variant's speed
    seeds: [0, 1, 2]
    reference: numerator            # the others are compared with it
    model: {d_model: 128, short_conv: 4}                    # the sections of `linrope fit`
    data: {context: 512, batch_size: 4}
    optimizer: {lr: 1.0e-2, warmup_steps: 50}
    variants:
      numerator: {}
      none: {model.rope: null}      # the options that differ, by path

Everything is checked before anything runs, also the last variant.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from linrope import LanguageModel, LanguageModelConfig
from linrope.data.batches.curriculum import CurriculumStage, TrainingPlan
from linrope.data.corpus.opening import OpenedText, open_text
from linrope.data.corpus.sequences import Corpus
from linrope.data.tokenizers.bytes import VOCAB_SIZE, ByteTokenizer
from linrope.errors import InputError, require_choice, suggest
from linrope.segmented import require_carried_state
from linrope.training import MQARDataModule, OptimizerConfig, TextDataModule
from linrope.utils.options import check_keys, check_types

SECTIONS = ("model", "data", "optimizer")
DATA_MODULES = {"text": TextDataModule, "mqar": MQARDataModule}
"""By task."""
BLOCK, EIGHTHS = 256, 8
"""Losses are kept by blocks of BLOCK tokens of the text, and by EIGHTHS parts of a row."""
HELD_OUT = (0.95, 0.05, 0.0)
"""The `data.fractions` of the shipped grids. (Three fifths of the default's validation text are one file of prose.)"""
SPEED_TOKENS = 8192
"""Tokens of a step whose time is measured, at most; for long rows one row is enough."""
TOLERANCE = 0.02
"""Models have equal size if their numbers of parameters differ by this share at most."""


@dataclass(frozen=True)
class Evaluation:
    """What is measured of a trained model beside its validation."""

    contexts: list[int] = field(default_factory=list)
    """Lengths of rows in which the same text is evaluated; each row starts from an empty state."""
    tokens: int = 262_144
    """Tokens of this text, from the start of the validation split."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"evaluate.tokens={self.tokens} must be 1 or more.")
        for context in self.contexts:
            if context < 1 or self.tokens % context or context % EIGHTHS:
                raise InputError(
                    f"evaluate.contexts: {context} must be a multiple of {EIGHTHS} that divides "
                    f"evaluate.tokens={self.tokens}."
                )
            if context > BLOCK and context % BLOCK:
                raise InputError(f"evaluate.contexts: {context} is above {BLOCK} and must be a multiple of it.")


@dataclass(frozen=True)
class Grid:
    """A grid as in its file; `variants` maps names to the options that differ."""

    title: str
    variants: dict[str, Any]
    reference: str
    seeds: list[int]
    more_seeds: dict[str, list[int]] = field(default_factory=dict)
    """Further seeds of some variants, for small differences."""
    catch_up: dict[str, str] = field(default_factory=dict)
    """By variant another one: after which share of its tokens the first reaches what the other has at its end."""
    tokens: int | None = None
    minutes: float | None = None
    task: str = "text"
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    evaluate: Evaluation = field(default_factory=Evaluation)
    validations: int = 8
    """Validations during a run, for the curves."""
    validation_tokens: int = 163_840
    """Tokens of the validation split that are read at the end; a quarter of them for the curves."""
    precision: str = "32-true"
    """`trainer.precision` of the runs and of the steps whose speed is measured."""
    match_parameters: bool = True
    """Change the width of the variants' MLPs so that all models have the reference's number of parameters."""

    def __post_init__(self) -> None:
        require_choice("task", self.task, DATA_MODULES)
        if not self.variants or not isinstance(self.variants, dict):
            raise InputError("variants: the grid has none; name at least one.")
        for name in self.variants:
            if not (isinstance(name, str) and re.fullmatch(r"[\w.+-]{1,100}", name)):
                raise InputError(
                    f"variants: {name!r} names files too: use up to 100 letters, digits and . + - _, and put quotes "
                    "around what YAML takes for a number or a date."
                )
        require_choice("precision", self.precision, ("32-true", "bf16-mixed"))
        require_choice("reference", self.reference, self.variants)
        for name in self.more_seeds:
            require_choice("more_seeds", name, self.variants)
        for name in (*self.catch_up, *self.catch_up.values()):
            require_choice("catch_up", name, self.variants)
        for seeds in (self.seeds, *(self.seeds + more for more in self.more_seeds.values())):
            if any(not 0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) != len(seeds):
                raise InputError(f"seeds={seeds} must be different whole numbers from 0, below 2^32.")
        if len(self.seeds) < 2:
            raise InputError(f"seeds={self.seeds}: an interval needs two seeds or more.")
        if (self.tokens is None) == (self.minutes is None):
            raise InputError(f"tokens={self.tokens} and minutes={self.minutes}: give one of them, the length of a run.")
        for name in ("tokens", "minutes", "validations", "validation_tokens"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InputError(f"{name}={value} must be a finite number above 0.")

    @property
    def measured(self) -> dict[str, Any]:
        """The grid's options that decide its results, beside the settings of each variant."""
        names = ("title", "tokens", "minutes", "validations", "validation_tokens", "precision")
        options = {name: getattr(self, name) for name in names if name != "precision" or self.bfloat16}
        return {**options, "evaluate": asdict(self.evaluate)}

    @property
    def bfloat16(self) -> bool:
        """Whether models are trained under autocast to bfloat16."""
        return self.precision == "bf16-mixed"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Every (variant, seed), seed by seed, so that an interrupted grid has complete seeds. Further seeds come
        last."""
        more = sorted((seed, variant) for variant, seeds in self.more_seeds.items() for seed in seeds)
        runs = [(variant, seed) for seed in self.seeds for variant in self.variants]
        return runs + [(variant, seed) for seed, variant in more]


@dataclass(frozen=True)
class Settings:
    """The options that decide one variant's runs, beside the seed and the number of steps."""

    task: str
    model: dict[str, Any]
    data: dict[str, Any]
    optimizer: dict[str, Any]

    @property
    def model_config(self) -> LanguageModelConfig:
        return LanguageModelConfig.from_dict(self.model)

    @property
    def n_parameters(self) -> int:
        return self.empty_model().n_parameters

    def empty_model(self) -> LanguageModel:
        """The model without memory for its parameters."""
        with torch.device("meta"):
            return LanguageModel(self.model_config)

    @property
    def curriculum(self) -> list[dict[str, Any]] | None:
        return self.data.get("curriculum")

    @property
    def plan(self) -> TrainingPlan:
        """The rows of each step; without a curriculum there is a single stage."""
        if self.task == "text":
            return TextDataModule(**self.data).plan_for(batches_per_step=1)
        return TrainingPlan([CurriculumStage(1, self.option("tokens_per_batch"), batch_size=1)])

    def option(self, name: str) -> Any:
        """An option of the data: the given value, or the default."""
        parameters = inspect.signature(DATA_MODULES[self.task]).parameters
        return self.data.get(name, parameters[name].default)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest training row."""
        if self.task == "mqar":
            return max(length for length, _, _ in self.option("stages"))
        return max(stage.seq_len for stage in self.plan.stages)

    @property
    def timed_rows(self) -> int:
        """Rows of the training step whose time is measured."""
        return max(1, min(self.plan.tokens_at(1), SPEED_TOKENS) // self.longest_row)

    @property
    def fingerprint(self) -> str:
        return hash_of(asdict(self))

    def speed_key(self, device: str, bfloat16: bool = False) -> str:
        """A hash of what decides the time of a training step: the model, the rows, the optimizer, the type of the
        device and bfloat16."""
        optimizer = self.optimizer.get("name", "adamw")
        others = ([optimizer] if optimizer != "adamw" else []) + (["bf16-mixed"] if bfloat16 else [])
        return hash_of([self.task, self.model, self.timed_rows, self.longest_row, device, *others])


def hash_of(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def hash_of_files(path: Path) -> str:
    """Of the names and contents of a file, or of all files in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.relative_to(path)} {file.stat().st_size}".encode())
        with open(file, "rb") as content:
            while part := content.read(2**20):
                digest.update(part)
    return digest.hexdigest()


def read_grid(path: Path) -> Grid:
    """The grid in a YAML file.

    Raises:
        InputError: no such file, no valid YAML, an unknown option, or options that exclude each other.
    """
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        shipped = sorted(file.stem for file in (Path(__file__).parents[1] / "grids").glob("*.yaml"))
        raise InputError(
            f"--grid {path}: cannot be read ({error.strerror}). benchmarks/grids has {', '.join(shipped)}."
        ) from error
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # an impossible date, not UTF-8, …
        raise InputError(f"--grid {path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"--grid {path} must be a set of options, as benchmarks/experiments/grid.py describes.")
    values = {name: value for name, value in values.items() if value is not None}  # `model:` with nothing after it
    check_keys(values, Grid)
    check_types(values, Grid)
    return Grid(**{**values, "evaluate": Evaluation(**values.get("evaluate", {}))})


class _Loader(yaml.SafeLoader):
    """Raises an error for a name that stands twice; YAML would keep the last, and lose a variant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def settings_of(grid: Grid, read_text: bool = True) -> dict[str, Settings]:
    """The settings of every variant, checked, with models of equal size; for runs to come, also against the text.

    Raises:
        InputError: an unknown or impossible option; the message names the variant.
    """
    settings = {}
    for name, changes in grid.variants.items():
        try:
            settings[name] = _variant(grid, {} if changes is None else changes, read_text)
        # the others: values too large for PyTorch or a float, and unforeseen errors
        except (InputError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise InputError(f"variant {name!r}: {str(error).splitlines()[0]}") from error
    longest = longest_context(settings.values())
    for name, own in settings.items():
        if longest is not None and longest % own.option("context"):
            raise InputError(
                f"variant {name!r}: data.context={own.option('context')} does not divide the grid's longest, "
                f"{longest}, so the two could not be judged on the same text."
            )
    if not grid.match_parameters:
        return settings
    size = settings[grid.reference].n_parameters
    return {name: _matched(name, own, size) for name, own in settings.items()}


def _variant(grid: Grid, changes: dict[str, Any], read_text: bool) -> Settings:
    if not isinstance(changes, dict):
        raise InputError(f"{changes!r} is no set of options: write what differs as {{model.rope: null}}, or {{}}.")
    sections = {name: deepcopy(getattr(grid, name)) for name in SECTIONS}
    for path, value in changes.items():
        _set(sections, path, value)
    settings = Settings(grid.task, **sections)
    data_module = DATA_MODULES[grid.task]
    for section, config in {"data": data_module, "optimizer": OptimizerConfig}.items():
        known = inspect.signature(config).parameters
        for name in sections[section]:
            if name not in known:
                raise InputError(f"{name!r} is no option of {section}.{suggest(name, known)}")
        check_types(sections[section], config, f"{section}.")
    if "seed" in settings.data:
        raise InputError(f"data.seed={settings.data['seed']}: a run's data follow from its seed; give them in `seeds`.")
    for name in ("val_path", "test_path"):
        if settings.data.get(name) is not None:
            raise InputError(f"data.{name} is not for grids, which cut the validation text from data.path: remove it.")
    OptimizerConfig(**settings.optimizer)
    check_types(settings.model, LanguageModelConfig, "model.")
    settings.model_config  # noqa: B018  it raises an error that names unknown options
    data = data_module(**settings.data)
    if grid.tokens is not None and grid.tokens < (tokens := settings.plan.tokens_at(1)):
        raise InputError(f"tokens={grid.tokens} is less than one step has, {tokens}.")
    if settings.curriculum is not None:
        _check_curriculum(grid, settings)
    if grid.task == "text":
        if read_text:
            _check_text(grid, settings)
    else:
        data.require_vocabulary(settings.model_config.vocab_size)
        if contexts := grid.evaluate.contexts:
            raise InputError(f"evaluate.contexts={contexts} are rows of text: remove them from recall tasks.")
    model = settings.empty_model()  # layers check more than the configuration
    if settings.data.get("contiguous"):
        require_carried_state(model, "data.contiguous=True")
    return settings


def longest_context(settings: Iterable[Settings]) -> int | None:
    """The longest `data.context` of variants that read text. All are validated on windows of this length, cut into
    their own rows."""
    return max((own.option("context") for own in settings if own.task == "text"), default=None)


def _check_curriculum(grid: Grid, settings: Settings) -> None:
    """Raise InputError if the grid gives minutes, or too few tokens for all stages."""
    if grid.tokens is None:
        raise InputError(
            "data.curriculum has steps of different speeds, so the tokens of a run with a given time are unknown: give "
            "the grid tokens instead of minutes, or remove the curriculum."
        )
    planned, steps = settings.plan.n_steps, n_steps(grid, settings)
    if steps < planned:
        raise InputError(
            f"data.curriculum takes {planned:,} steps, tokens={grid.tokens} in {grid.validations} parts of "
            f"equal length {steps:,}: lower the stages' tokens (the last stage goes on to the end)."
        )


def _check_text(grid: Grid, settings: Settings) -> None:
    """Raise InputError unless the model reads bytes and the text is long enough."""
    if (vocab_size := settings.model_config.vocab_size) < VOCAB_SIZE:
        raise InputError(f"model.vocab_size={vocab_size} must be {VOCAB_SIZE} or more, for bytes.")
    if not isinstance(opened(settings).tokenizer, ByteTokenizer):
        raise InputError(
            f"data.path={settings.option('path')!r} holds tokens that are not bytes, and a grid measures bits per byte "
            "of text: give text files."
        )
    trained_on, available = (len(opened(settings).corpora[split]) for split in ("train", "val"))
    needs = {
        "data.context": settings.option("context"),
        "validation_tokens": grid.validation_tokens,
        "evaluate.tokens": grid.evaluate.tokens if grid.evaluate.contexts else 0,
    }
    for name, needed in needs.items():
        if available <= needed:
            raise InputError(f"{name}={needed} must be less than the {available} tokens for validation.")
    if trained_on <= settings.longest_row:
        name = "context" if settings.curriculum is None else "curriculum"
        lengths = f"rows of {settings.longest_row} tokens, and the text to train on {trained_on}"
        raise InputError(f"data.{name} has {lengths}: shorten the rows.")


_open_text = cache(open_text)


def held_out() -> Corpus:
    """The validation text of the grids in benchmarks/grids that read text."""
    return _open_text(None, HELD_OUT).corpora["val"]


def opened(settings: Settings) -> OpenedText:
    """The text of a variant that reads text."""
    path, *options = map(settings.option, ("path", "tokenizer", "token_dtype", "split"))
    return _open_text(path, tuple(settings.option("fractions")), *options)


def _set(sections: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a dotted path such as model.rope.base."""
    *parents, last = str(path).split(".")
    if not parents or parents[0] not in sections:
        raise InputError(f"{path!r} must begin with one of {', '.join(f'{name}.' for name in sections)}")
    for name in parents:
        if not isinstance(sections.get(name), dict):
            sections[name] = {}
        sections = sections[name]
    sections[last] = value


def _matched(name: str, settings: Settings, size: int) -> Settings:
    """The settings with the width of the MLPs at which the model has nearly `size` parameters."""
    own = settings.n_parameters
    if abs(own - size) <= TOLERANCE / 4 * size:
        return settings  # small differences, such as a temperature, do not need odd widths
    width = settings.model_config.mlp_width

    def at(new_width: int) -> Settings:
        return replace(settings, model={**settings.model, "d_ff": new_width})

    per_unit = at(width + 1).n_parameters - own
    matched = at(max(1, width + round((size - own) / per_unit)))
    if abs(matched.n_parameters - size) > TOLERANCE * size:
        raise InputError(
            f"variant {name!r} has {own:,} parameters, the reference {size:,}: no width of the MLPs makes them equal. "
            "Change its size, or set match_parameters: false."
        )
    return matched


def n_steps(grid: Grid, settings: Settings, tokens_per_second: float | None = None) -> int:
    """Optimizer steps of a run, by its tokens, or by its minutes at that speed. They are a multiple of the validations,
    so that the last validation is at the end."""
    tokens = grid.tokens if grid.tokens is not None else grid.minutes * 60 * tokens_per_second
    steps = max(1, settings.plan.steps_within(tokens))
    return steps - steps % grid.validations if steps >= grid.validations else steps
