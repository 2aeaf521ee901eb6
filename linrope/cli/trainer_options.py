"""Options of Lightning's Trainer whose values the parser refuses at length: what is allowed, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from linrope.cli.config_files import names_and_values
from linrope.cli.own_classes import import_class
from linrope.cli.parser import literals_of, value_in_words, values_given
from linrope.errors import InputError, require_choice, suggest
from linrope.training.callbacks.unsupported import UNSUPPORTED
from linrope.training.precision import AUTO
from linrope.training.sharding import CLASSES, ShardedStrategy

OPTION = "trainer.callbacks"
NOT_OFFERED = {"Callback", "Checkpoint", "Timer", *(callback.__name__ for callback in UNSUPPORTED)}
"""Base classes, callbacks that are refused, and Timer, in whose place there is trainer.max_time."""
LOGGER_PACKAGES = {
    "WandbLogger": ["wandb"], "MLFlowLogger": ["mlflow"], "CometLogger": ["comet_ml"], "NeptuneLogger": ["neptune"],
    "TensorBoardLogger": ["tensorboard", "tensorboardX"],
}  # fmt: skip
"""What Lightning's loggers need, one of each list."""
PRECISIONS = {"fp16": "16-mixed", "float16": "16-mixed", "fp32": "32-true", "float32": "32-true"}
"""Lightning's names of formats that have others elsewhere."""


def require_known_values(args: Sequence[str], precision: Any) -> None:
    """Raise InputError for a value of trainer.precision that its type, `precision`, does not have, for options of a
    strategy that is no class, or for a callback that is unknown, has an unknown option or lacks one."""
    _require_class_of_strategy(args)
    for value in values_given(args, "trainer.precision"):
        if str(value) in PRECISIONS:
            raise InputError(f"trainer.precision={value!r} is unknown: Lightning's name is {PRECISIONS[value]!r}.")
        if value is not None:
            require_choice("trainer.precision", str(value), dict.fromkeys(map(str, [AUTO, *literals_of(precision)])))
    for name, options in _given_callbacks(args):
        _require_options(_callback(name), options)


def _require_class_of_strategy(args: Sequence[str]) -> None:
    """Raise InputError for options of a strategy that is given by its registered name: those of a class are known."""
    given = next(reversed([*values_given(args, "trainer.strategy")]), "auto")
    options = [name for name, _ in names_and_values(args) if name.startswith("--trainer.strategy.")]
    classes = {"auto": CLASSES["ddp"], **CLASSES}
    if options and isinstance(given, str) and given in classes:
        is_of_sharded = options[0].rpartition(".")[2] in inspect.signature(ShardedStrategy).parameters
        one = ShardedStrategy.__name__ if is_of_sharded else classes[given]
        raise InputError(
            f"{options[0]} needs the class of the strategy, not trainer.strategy={given}: give --trainer.strategy "
            f"{one} before it."
        )


def require_gpu(accelerator: Any) -> None:
    """Raise InputError for an accelerator that this machine does not have."""
    needed = {"gpu": (CUDAAccelerator, MPSAccelerator), "cuda": (CUDAAccelerator,), "mps": (MPSAccelerator,)}
    choices = needed.get(accelerator, ()) if isinstance(accelerator, str) else ()
    if choices and not any(one.is_available() for one in choices):
        raise InputError(
            f"trainer.accelerator={accelerator!r}: PyTorch finds no such device on this machine (`linrope info` lists "
            "what there is): set trainer.accelerator=cpu, or auto."
        )


def require_duration(max_time: Any) -> None:
    """Raise InputError for a `trainer.max_time` that is no time."""
    try:
        Timer(max_time)
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise InputError(
            f"trainer.max_time={max_time!r} is no time: give DD:HH:MM:SS, 00:08:30:00 for eight and a half hours."
        ) from error


def require_packages_of_loggers(given: Any) -> None:
    """Raise InputError for a logger of `trainer.logger`, as it was parsed, whose package is missing."""
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, Namespace):
            continue  # of linrope's own names `linrope fit` alone makes loggers
        name = one.class_path.rpartition(".")[2]
        packages = LOGGER_PACKAGES.get(name, [])
        if packages and not any(map(find_spec, packages)):
            raise InputError(f"trainer.logger={name} needs a package: pip install {packages[0].replace('_', '-')}.")


def _given_callbacks(args: Sequence[str]) -> list[tuple[str, set[str]]]:
    """The classes of the callbacks, and the names of the options that each is given: on the command line they follow
    it."""
    found: list[tuple[str, set[str]]] = []
    for name, value in names_and_values(args):
        for given in value_in_words(name, value, OPTION):
            for one in given if isinstance(given, list) else [given]:
                if isinstance(one, dict) and "class_path" in one:
                    found.append((str(one["class_path"]), set(one.get("init_args") or {})))
                elif isinstance(one, str):
                    found.append((one, set()))
        if found and name.startswith(f"--{OPTION}."):
            option = name.removeprefix(f"--{OPTION}.").removeprefix("init_args.").partition(".")[0]
            if option not in ("class_path", "init_args", "dict_kwargs"):
                found[-1][1].add(option)
    return found


def _callback(name: str) -> type[Callback]:
    """The class of that name or path. InputError if there is none."""
    known = {one.__name__: one for one in _subclasses(Callback)}
    one = import_class(OPTION, name) if "." in name else known.get(name)
    if isinstance(one, type) and issubclass(one, Callback):
        return one
    offered = [choice for choice in callbacks.__all__ if choice not in NOT_OFFERED]
    raise InputError(
        f"{OPTION}={name!r} is no callback: choose one of {', '.join(offered)}, or give MODULE.CLASS of your own, with "
        f"--import FILE.py.{suggest(name, {*known, *offered})}"
    )


def _subclasses(base: type) -> Iterator[type]:
    for one in base.__subclasses__():
        yield one
        yield from _subclasses(one)


def _require_options(one: type[Callback], given: set[str]) -> None:
    """Raise InputError for an option that a callback does not have, or one that it lacks."""
    parameters = list(inspect.signature(one.__init__).parameters.values())[1:]
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for name in sorted(given - set(names)):
        raise InputError(
            f"{OPTION}: {one.__name__} has no option {name!r}: choose one of {', '.join(names)}.{suggest(name, names)}"
        )
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in given:
            raise InputError(
                f"{OPTION}: {one.__name__} needs {parameter.name}: give --{OPTION}.{parameter.name} after it, or "
                "init_args in YAML."
            )
