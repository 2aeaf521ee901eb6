"""What all models share: a configuration as plain values, a tokenizer, and folders that hold both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from torch import Tensor, nn

from linrope.errors import InputError
from linrope.models.saving import read_model, write_folder
from linrope.utils.options import check_keys, class_path_of, loaded_subclass

AnyModel = TypeVar("AnyModel", bound="Model")


@dataclass(frozen=True)
class ModelConfig:
    """Base of the configurations of models: a frozen dataclass of plain values, whose `build` makes the model."""

    unnamed: ClassVar[type | None] = None
    """The class whose values in files name no class; all others have a `class_path`."""

    def build(self) -> Model:
        """A new model of these options."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain scalars, lists and dicts, for JSON and checkpoints; `class_path` names the class."""
        own = {} if type(self) is self.unnamed else {"class_path": class_path_of(type(self))}
        # JSON makes tuples to lists, and `item` makes numbers of NumPy to those of Python
        return {**own, **json.loads(json.dumps(asdict(self), default=lambda number: number.item()))}

    def least_weight_bytes(self) -> int:
        """Bytes of the largest weights in float32, from the options alone: a bound from below."""
        return 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`.

        Raises:
            InputError: an unknown key (the message has the nearest known one), a value of the wrong type, or a
                `class_path` whose class is not imported (nothing is imported that a file names) or of another model.
        """
        if isinstance(values, dict) and "class_path" in values:
            cls, values = loaded_subclass(cls, values["class_path"]), dict(values)
            del values["class_path"]
        check_keys(values, cls)
        return cls(**{name: _nested(cls, name, value) for name, value in values.items()})


def config_in(values: Any, config_class: type[ModelConfig], path: str | os.PathLike) -> ModelConfig:
    """The configuration that a file holds. InputError, naming `path`, if it is none of that class."""
    try:
        return config_class.from_dict(values)
    except InputError as error:
        raise InputError(f"checkpoint {str(path)!r}: {error}") from error


def _nested(config: type, name: str, value: Any) -> Any:
    """A dictionary as the dataclass that the field `name` has; another value as it is."""
    hint = get_type_hints(config)[name]
    nested = next(filter(is_dataclass, (hint, *get_args(hint))), None)
    if nested is None or not isinstance(value, dict):
        return value
    if hasattr(nested, "from_dict"):
        return nested.from_dict(value)
    check_keys(value, nested, f"{name}.")
    return nested(**value)


class Model(nn.Module):
    """Base of the models. A subclass sets `config_class`, and `config` before its weights are made."""

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    tied: ClassVar[Mapping[str, str]] = {}
    """Names of weights that are others too, with the names of those: files may hold such a tensor once."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: dict[str, str] | None = None  # serialized, see `linrope.data.tokenizers`; saved with the model

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write `config.json`, `model.pt`, `SHA256SUMS` and, if the model has one, `tokenizer.json` into a directory.

        The directory is made if it is missing. A model in it is replaced once the new one is on the disk; if that is
        interrupted, `from_pretrained` refuses what is there.

        Raises:
            InputError: a directory of `linrope export`, whose weights would stay in a file of another name.
        """
        write_folder(Path(directory), self.config.to_dict(), self.state_dict(), self.tokenizer)

    @classmethod
    def from_pretrained(cls: type[AnyModel], path: str | os.PathLike, verify: bool = True) -> AnyModel:
        """The model in a folder of `save_pretrained` or `linrope export`, or in a checkpoint of `linrope fit`.

        The model is on the CPU, in the dtype of its saved weights, in evaluation mode. Only tensors and plain values
        are unpickled.

        Args:
            path: the folder or the checkpoint file.
            verify: compare the files of a folder with its `SHA256SUMS`, if it has some.

        Raises:
            InputError: no such file, not a linrope model of this class, or files that are not those of their checksums.
        """
        return load_model(path, cls.config_class, verify)

    def start_from(self, path: str | os.PathLike) -> list[str]:
        """Copy the weights of the trained model in a folder or checkpoint; what differs from it, in words.

        A model that takes weights of others than its own class overrides it. InputError for no model, or another one.
        """
        source = load_model(path, type(self.config))
        if source.config != self.config:
            raise InputError(f"{str(path)!r} holds {source.config}, and this model is {self.config}: make them equal.")
        self.load_state_dict(source.state_dict())
        self.tokenizer = source.tokenizer
        return []

    def load_weights(self, weights: dict[str, Tensor], path: str | os.PathLike) -> None:
        """Take the weights of a file, and their dtype. InputError, naming `path`, if they do not fit."""
        if isinstance(weights, dict):
            floats = (x for x in weights.values() if isinstance(x, Tensor) and x.is_floating_point())
            if (first := next(floats, None)) is not None:
                self.to(first.dtype)
            weights = {**{name: weights[of] for name, of in self.tied.items() if of in weights}, **weights}
        try:
            self.load_state_dict(weights)
        except (RuntimeError, TypeError) as error:
            raise InputError(f"checkpoint {str(path)!r}: weights do not fit its configuration: {error}") from error


def load_model(path: str | os.PathLike, config_class: type[ModelConfig], verify: bool = True) -> Model:
    """The model of a configuration of that class, in a folder or a checkpoint: see `Model.from_pretrained`."""
    config, weights, tokenizer = read_model(Path(path), verify)
    model = config_in(config, config_class, path).build()
    model.load_weights(weights, path)
    model.tokenizer = tokenizer
    return model.eval()
