"""What all models share: a configuration as plain values, a tokenizer, and folders that hold both."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.layers.initialisation import reset
from linrope.layers.linear import Linear
from linrope.models.saving import SavedModel, read_model, write_folder
from linrope.positions.table import require_without_weights, rope_beside
from linrope.utils.options import check_keys, class_path_of, loaded_subclass
from linrope.utils.values import extremes

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 lacks it

AnyModel = TypeVar("AnyModel", bound="Model")
WITHOUT_WEIGHTS = ("model.window", "model.dropout", "model.gate_normalizer")
"""Options that may differ from those of a model whose weights are taken."""
THETA = ("model.rope.base", "model.rope.scaling")
"""Options of θ, which may differ too unless θ is trained."""


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

    def require_positive(self, *names: str, **otherwise: str) -> None:
        """Raise InputError for an option of these names that is a number below 1; `otherwise` adds to its message."""
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1{otherwise.get(name, '')}.")

    def require_dropout_and_eps(self) -> None:
        """Raise InputError unless `dropout` is a probability below 1 and `norm_eps` a finite number, at least 0."""
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout={self.dropout} must be at least 0 and below 1.")
        if not 0 <= self.norm_eps < math.inf:
            raise InputError(f"norm_eps={self.norm_eps} must be a finite number, at least 0.")

    def settle_positions(self, linear: Iterable[str]) -> None:
        """Set `rope` to None where `positions` names another encoding.

        Raises:
            InputError: options of `rope` beside another encoding, or one that `linear`, the types of attention that are
                not softmax, cannot have.
        """
        for attention in linear:
            require_without_weights(self.positions, attention)
        object.__setattr__(self, "rope", rope_beside(self.positions, self.rope))

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
        elif cls is ModelConfig:
            cls = cls.unnamed
        check_keys(values, cls)
        return cls(**{name: _nested(cls, name, value) for name, value in values.items()})


def flat_options(config: ModelConfig) -> dict[str, Any]:
    """A model's options, with nested ones, by their names in a run's configuration."""

    def flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    return dict(flat(config.to_dict(), "model."))


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], places: tuple[str, str] = ("in the checkpoint", "here")
) -> dict[str, str]:
    """Where the options of a checkpoint, or of what stands in the first of the `places`, are not those here: by name,
    in words."""
    return {
        name: f"{name}: {then.get(name)!r} {places[0]}, {now.get(name)!r} {places[1]}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    }


def is_among(name: str, options: Iterable[str]) -> bool:
    """Whether an option is one of these, or nested in one."""
    return any(name == one or name.startswith(f"{one}.") for one in options)


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

    forward_methods: ClassVar[tuple[str, ...]] = ()
    """Methods beside `forward` that use weights; no other is called from outside where a model is divided among
    devices. A module of `blocks_to_shard` may have them too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, self.config_class):
            name, options = type(self).__name__, self.config_class.__name__
            raise InputError(f"{name} takes a {options}, not {reprlib.repr(config)}: pass {options}(...).")
        self.config = config
        # saved with the model:
        self.tokenizer: dict[str, str] | None = None  # serialized, see `linrope.data.tokenizers`
        self.labels: list[str] | None = None  # names of what a head tells apart, by their numbers

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def blocks_to_shard(self) -> list[nn.Module]:
        """Modules whose weights are gathered for their own forward and backward pass alone, where a model is divided
        among devices: its blocks. A module within another one comes before it. All other weights are gathered for the
        whole pass."""
        return []

    @property
    def matrices_of_blocks(self) -> set[nn.Parameter]:
        """The trained weights of the linear layers in `blocks_to_shard`: not embeddings, output layer or filters."""
        layers = [layer for block in self.blocks_to_shard for layer in block.modules() if isinstance(layer, nn.Linear)]
        return {layer.weight for layer in layers if layer.weight.requires_grad}

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write `config.json`, `model.pt`, `SHA256SUMS` and, if the model has one, `tokenizer.json` into a directory.

        The directory is made if it is missing. A model in it, an exported one too, is replaced once the new one is on
        the disk; if that is interrupted, `from_pretrained` refuses what is there.

        Raises:
            InputError: weights of other names or shapes than those of the configuration's model, or untied ones that
                it ties, which could not be read again; a directory that is a file.
        """
        weights = self.state_dict()
        self._require_readable(weights)
        if Path(directory).is_file():
            raise InputError(f"directory={str(directory)!r} is a file: choose a folder.")
        write_folder(Path(directory), SavedModel(self.config.to_dict(), weights, self.tokenizer, self.labels))

    def _require_readable(self, weights: dict[str, Tensor]) -> None:
        """Raise InputError unless a new model of this configuration can take these weights."""
        for name, weight in weights.items():
            if hasattr(weight, "full_tensor"):  # a DTensor, whose module takes long to import
                raise InputError(
                    f"{name} is divided among devices: gather the weights first, with get_model_state_dict of "
                    "torch.distributed.checkpoint.state_dict and full_state_dict=True, into a model of one device."
                )
            if isinstance(weight, Tensor) and weight.is_meta:
                raise InputError(f"{name} is on the device meta, without values: load the model's weights first.")
        built = self._weights_when_built(weights)
        if differing := sorted(weights.keys() ^ built.keys()):
            raise InputError(
                f"the model has been changed in {', '.join(differing[:5])}{' …' * (len(differing) > 5)}, so that "
                "from_pretrained could not read it: remove parametrizations and merge adapters first, or save its "
                "state_dict() with torch.save."
            )
        for name, weight in weights.items():
            if isinstance(weight, Tensor) and weight.shape != built[name].shape:
                raise InputError(
                    f"{name} is {tuple(weight.shape)}, and {tuple(built[name].shape)} by the model's configuration, so "
                    "that from_pretrained could not read it: correct the configuration; for another vocabulary set "
                    "model.config = dataclasses.replace(model.config, vocab_size=...)."
                )
        for name, of in self.tied.items():
            if {name, of} <= weights.keys() and _differ(weights[name], weights[of]):
                raise InputError(
                    f"{name} is not {of}, which it is by the model's configuration, so that from_pretrained would read "
                    "another model: set model.config = dataclasses.replace(model.config, tie_embeddings=False)."
                )

    def _weights_when_built(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a new model of this configuration, without values; `weights` if it cannot be built without
        them, as one of the user's own may need."""
        try:
            with torch.device("meta"), torch.random.fork_rng([]):
                return self.config.build().state_dict()
        except RuntimeError:
            return weights

    @classmethod
    def from_pretrained(cls: type[AnyModel], path: str | os.PathLike, verify: bool = True) -> AnyModel:
        """The model in a folder of `save_pretrained` or `linrope export`, or in a checkpoint of `linrope fit`.

        The model is on the CPU, in the dtypes of its saved weights, in evaluation mode. Only tensors and plain values
        are unpickled.

        Args:
            path: the folder or the checkpoint file.
            verify: compare the files of a folder with its `SHA256SUMS`, if it has some.

        Raises:
            InputError: no such file, not a linrope model of this class, or files that are not those of their checksums.
        """
        model = load_model(path, cls.config_class, verify)
        if not isinstance(model, cls):  # encoders with other heads have one class of configurations
            found = type(model).__name__
            raise InputError(f"{str(path)!r} holds a {found}, not a {cls.__name__}: call {found}.from_pretrained.")
        return model

    def start_from(self, path: str | os.PathLike) -> list[str]:
        """`take` the weights of the trained model in a folder of linrope or a checkpoint."""
        return self.take(load_model(path, self.config_class), repr(str(path)))

    def take(self, source: Model, name: str) -> list[str]:
        """Copy the weights and the tokenizer of a trained model; what differs from it, in words.

        A model that takes weights of others than its own options overrides it. InputError, naming the source by `name`,
        for a model that differs in an option that decides the weights.
        """
        rope = getattr(self.config, "rope", None)
        may_differ = WITHOUT_WEIGHTS + (() if rope is None or rope.trainable else THETA)
        differing = differences(flat_options(source.config), flat_options(self.config))
        if decisive := [text for option, text in differing.items() if not is_among(option, may_differ)]:
            raise InputError(
                f"{name} holds a model that differs in more than {', '.join(may_differ)}; make these equal:\n  "
                + "\n  ".join(decisive)
            )
        self.load_state_dict(source.state_dict())
        self.tokenizer = source.tokenizer
        return list(differing.values())

    def load_weights(self, weights: dict[str, Tensor], path: str | os.PathLike) -> None:
        """Take the weights of a file, and their dtypes. InputError, naming `path`, if they do not fit."""
        if isinstance(weights, dict):
            weights = {**{name: weights[of] for name, of in self.tied.items() if of in weights}, **weights}
            self._take_dtypes(weights)
        try:
            self.load_state_dict(weights)
        except (InputError, RuntimeError, TypeError) as error:
            raise InputError(f"checkpoint {str(path)!r}: weights do not fit its configuration: {error}") from error

    def _take_dtypes(self, weights: dict[str, Tensor]) -> None:
        """Take the dtypes of these weights, and for what has none here that of the first parameter."""
        floating = {name: x for name, x in weights.items() if isinstance(x, Tensor) and x.is_floating_point()}
        first = floating.get(next(name for name, _ in self.named_parameters()))
        if first is None:
            return
        self.to(first.dtype)
        for name, tensor in self.state_dict(keep_vars=True).items():
            if name in floating and floating[name].dtype != first.dtype:
                tensor.data = tensor.to(floating[name].dtype)


class ModelWithOutput(Model):
    """A model with an `embedding` of tokens and an `output` layer, of one weight where `config.tie_embeddings` says so.

    A subclass makes both, calls `initialise`, which it defines, and then `tie`.
    """

    embedding: nn.Embedding
    output: nn.Module

    def initialise(self) -> None:
        """Draw the weights whose start is not that of their layers."""
        raise NotImplementedError

    def tie(self) -> None:
        """Make the two weights one. They stay one when the model is moved or loaded, also by `to_empty` and
        `assign=True`, which make two tensors of it; two that are made of them later stay two."""
        if self.config.tie_embeddings:
            self._tie()
        self.register_load_state_dict_pre_hook(ModelWithOutput._before_load)
        self.register_load_state_dict_post_hook(ModelWithOutput._after_load)

    def reset_parameters(self) -> None:
        """Initialise the model anew, after `to_empty` for example: with the same seed, as its constructor does.

        with torch.device("meta"):
            model = LanguageModel(config)  # takes no memory
        model.to_empty(device="cuda").reset_parameters()
        """
        if is_tied := self._is_tied:  # drawn apart, as in the constructor
            self.output.weight = nn.Parameter(torch.empty_like(self.embedding.weight))
        for module in self.children():
            reset(module)
        self.initialise()
        if is_tied:
            self._tie()

    @property
    def tied(self) -> dict[str, str]:
        return {"output.weight": "embedding.weight"} if self.config.tie_embeddings else {}

    @property
    def _is_tied(self) -> bool:
        """Whether the two weights are one now: not with a parametrization, pruning or an adapter of one of them."""
        weight = getattr(self.embedding, "weight", None)
        is_plain = isinstance(weight, nn.Parameter) and isinstance(self.output, Linear)
        return self.config.tie_embeddings and is_plain and self.output.weight is weight

    def _tie(self) -> None:
        self.output.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to` and `to_empty` call."""
        is_tied = self._is_tied
        super()._apply(fn, recurse)
        if is_tied:
            self._tie()
        return self

    def _before_load(self, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        """Note whether the weights are one. InputError if they are, and two different ones are to be loaded."""
        self._was_tied = self._is_tied
        one, other = (weights.get(f"{prefix}{name}") for name in ("output.weight", "embedding.weight"))
        if self._was_tied and isinstance(one, Tensor) and isinstance(other, Tensor) and _differ(one, other):
            raise InputError(
                "output.weight is not embedding.weight, which it is in this model: build the model with "
                "tie_embeddings=False, or give it an output.weight of its own before loading."
            )

    def _after_load(self, *unused: Any) -> None:
        if self._was_tied:
            self._tie()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two weights differ; of divided ones, the parts of this device. False for weights without values."""
    one, other = (x.to_local() if hasattr(x, "to_local") else x for x in (one, other))
    if not {type(one), type(other)} <= {Tensor, nn.Parameter} or one.is_meta or other.is_meta:  # fake ones are others
        return False
    same_memory = one.dtype == other.dtype and one.data_ptr() == other.data_ptr()
    return not same_memory and (one.dtype != other.dtype or not torch.equal(one.cpu(), other.cpu()))


def load_model(path: str | os.PathLike, config_class: type[ModelConfig], verify: bool = True) -> Model:
    """The model of a configuration of that class, in a folder or a checkpoint: see `Model.from_pretrained`."""
    saved = read_model(Path(path), verify)
    model = config_in(saved.config, config_class, path).build()
    model.load_weights(saved.weights, path)
    model.tokenizer, model.labels = saved.tokenizer, saved.labels
    return model.eval()


def check_tokens(name: str, tokens: Tensor, size_name: str, size: int, model: nn.Module, hint: str = "") -> None:
    """Raise InputError unless `tokens` are int64 or int32 of shape (B, T) in [0, size), which the model can look up;
    `hint` is for other types.

    On a GPU the embedding asserts the range, and a compiled graph does not check it.
    """
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name} is a {type(tokens).__name__}: pass int64 of shape (B, T){hint}.")
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name} is {tuple(tokens.shape)} {tokens.dtype}: pass int64 of shape (B, T).")
    if tokens.is_meta and not (weight := next(model.parameters())).is_meta:  # PyTorch returns unwritten memory
        raise InputError(f"{name} on the device meta, without values, for a model on {weight.device}: use one device.")
    if tokens.device.type == "cpu" and (ends := extremes(tokens)) is not None:
        lowest, highest = ends
        if lowest < 0 or highest >= size:
            lie = "lie" if name.endswith("s") else "lies"
            raise InputError(f"{name} {lie} in [{lowest}, {highest}], {size_name} is {size}: pass 0 … {size - 1}.")
