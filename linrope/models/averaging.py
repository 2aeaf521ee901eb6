"""The mean of the weights of several trained models of one configuration, checkpoints of one run for example."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.models.base import Model, ModelConfig, load_model


def average_weights(paths: Sequence[str | os.PathLike]) -> dict[str, Tensor]:
    """The mean of each weight over the models at `paths`, by name, on the CPU, in the dtype of the models.

    The sums are float64. What is no floating-point number must be the same in all models.

    Args:
        paths: checkpoints of `linrope fit`, or folders of `save_pretrained` or `linrope export`.

    Raises:
        InputError: no path, no model at a path, or models that differ in configuration, tokenizer, labels, dtype, or in
            what is no floating-point number.
    """
    return average_models(paths).state_dict()


def average_models(paths: Sequence[str | os.PathLike]) -> Model:
    """The model with `average_weights`, in evaluation mode; arguments and errors are those."""
    if isinstance(paths, str | os.PathLike) or not paths:
        raise InputError(f"paths={paths!r} must be a list of at least one checkpoint.")
    first = load_model(paths[0], ModelConfig)
    own = first.state_dict()
    sums = {name: weight.double() for name, weight in own.items() if weight.is_floating_point()}
    for path in paths[1:]:
        model = load_model(path, ModelConfig)
        _require_same(paths[0], first, path, model)
        weights = model.state_dict()
        for name, total in sums.items():
            total += weights[name]
    means = {name: (total / len(paths)).to(own[name].dtype) for name, total in sums.items()}
    first.load_state_dict({**own, **means})
    return first


def _require_same(path: str | os.PathLike, model: Model, other_path: str | os.PathLike, other: Model) -> None:
    """Raise InputError, naming what differs, unless a mean of the two models is one of the same model."""
    if differing := _what_differs(model, other):
        raise InputError(
            f"{str(path)!r} and {str(other_path)!r} differ, so their weights have no meaningful mean; give checkpoints "
            "of one run:\n  " + "\n  ".join(differing)
        )


def _what_differs(model: Model, other: Model) -> list[str]:
    if type(model) is not type(other):
        return [f"{type(model).__name__} and {type(other).__name__}"]
    here, there = model.config.to_dict(), other.config.to_dict()
    if options := [f"model.{name}: {here[name]} and {there[name]}" for name in here if here[name] != there[name]]:
        return options
    found = ["their tokenizers"] if model.tokenizer != other.tokenizer else []
    found += [f"their labels: {model.labels} and {other.labels}"] if model.labels != other.labels else []
    others = other.state_dict()
    for name, weight in model.state_dict().items():
        if weight.dtype != others[name].dtype:
            found.append(f"{name}: {weight.dtype} and {others[name].dtype}")
        elif not weight.is_floating_point() and not torch.equal(weight, others[name]):
            found.append(f"{name}, which cannot be averaged")
    return found
