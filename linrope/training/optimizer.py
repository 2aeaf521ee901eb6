"""AdamW and Muon, their parameter groups, and the learning rate schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from linrope.errors import InputError
from linrope.models.base import Model
from linrope.training.precision import has_bfloat16
from linrope.utils.options import check_types, class_path_of

Name = Literal["adamw", "muon"]
Schedule = Literal["cosine", "inverse_sqrt", "linear"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with linear warm-up, a decay by `schedule`, and clipping by the gradient norm.

    An optimizer of your own has a subclass of this one, a frozen dataclass with the options that it adds, whose `make`
    makes it; the schedule and the clipping are the same.
    """

    name: Name = "adamw"
    """adamw, or muon: Muon for the matrices of the blocks (their updates are orthogonalised, and as large as AdamW's),
    AdamW for all other weights."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the gradient's first and second moments."""
    weight_decay: float = 0.1
    """Weight decay of matrices, embeddings and convolution filters; vectors, norms and biases have none."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0 to its peak."""
    final_lr_fraction: float = 0.1
    """The learning rate that the schedule reaches after the last step, as a fraction of the peak; inverse_sqrt ignores
    it."""
    clip_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 disables clipping."""
    schedule: Schedule = "cosine"
    """The learning rate after the warm-up: cosine or linear to `final_lr_fraction` after the last step, or
    inverse_sqrt, proportional to 1/√step."""

    def __post_init__(self) -> None:
        own = {field.name: getattr(self, field.name) for field in fields(OptimizerConfig)}  # not those of a subclass
        check_types(own, OptimizerConfig, section="optimizer.")
        at_least_zero = {"lr": self.lr, "weight_decay": self.weight_decay, "clip_norm": self.clip_norm}
        for name, value in {**at_least_zero, "warmup_steps": self.warmup_steps}.items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"optimizer.{name}={value!r} must be 0 or more.")
        if not 0 <= self.final_lr_fraction <= 1:
            raise InputError(f"optimizer.final_lr_fraction={self.final_lr_fraction!r} must lie between 0 and 1.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas={self.betas!r} must be two numbers from 0 to below 1.")

    @property
    def own_class(self) -> str | None:
        """The class path of a subclass, whose `make` decides which optimizer it is; None for this class."""
        return None if type(self) is OptimizerConfig else class_path_of(type(self))

    def require_trainer(self, trainer: Trainer) -> None:
        """Raise InputError for options of the Trainer that leave open or repeat what is decided here."""
        if trainer.max_steps < 1:
            raise InputError(
                f"trainer.max_steps={trainer.max_steps} must be set to 1 or more: it is the number of optimizer steps, "
                "and the learning rate follows it."
            )
        if trainer.gradient_clip_val:
            raise InputError(
                f"trainer.gradient_clip_val={trainer.gradient_clip_val} would clip beside optimizer.clip_norm="
                f"{self.clip_norm}: remove it and set optimizer.clip_norm."
            )
        if trainer.gradient_clip_algorithm == "value":
            raise InputError(
                "trainer.gradient_clip_algorithm='value' is not there: optimizer.clip_norm clips by the norm of all "
                "gradients. Remove it."
            )

    def require_optimized(self, task: LightningModule, optimizer: Optimizer) -> None:
        """Raise InputError if a parameter of the task has a gradient and is none of the optimizer's; not for a task
        with its own `configure_optimizers`."""
        if task.makes_optimizer:
            return
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        found = [name for name, p in task.named_parameters() if p.grad is not None and p not in optimized]
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise InputError(
                f"{', '.join(found[:5])}{more} of {type(task).__name__} would not be trained; parameters of its model "
                "are: make them part of the model, freeze them with requires_grad_(False), or define "
                "configure_optimizers."
            )

    def optimizer_of(self, model: Model, fused: bool | None) -> Optimizer:
        """The optimizer of a model: `make` with its parameter groups. InputError if `make` changes their number."""
        groups = parameter_groups(model, self.weight_decay, self.name)
        optimizer = self.make(groups, fused)
        if len(optimizer.param_groups) != len(groups):
            name = type(self).__name__
            raise InputError(f"{name}.make changed the number of parameter groups: give the optimizer those it got.")
        return optimizer

    def make(self, groups: list[dict[str, Any]], fused: bool | None) -> Optimizer:
        """The optimizer of the parameter groups, whose `weight_decay` is set: two, or three with muon (see
        `parameter_groups`). `fused`: AdamW's option, which suits the device."""
        make = MuonWithAdamW if self.name == "muon" else AdamW
        return make(groups, lr=self.lr, betas=self.betas, fused=fused)


def fused_on(device_type: str) -> bool | None:
    """AdamW's option `fused`: one pass over all weights on a CPU, PyTorch's choice elsewhere."""
    return True if device_type == "cpu" else None


class MuonWithAdamW(Optimizer):
    """PyTorch's Muon for the first parameter group and its AdamW for the others, as one optimizer.

    An update of Muon is scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so that one learning rate and
    one weight decay serve both. It is orthogonalised in bfloat16 where the matrices' device has instructions for its
    products, and in float32 elsewhere.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], fused: bool | None = None
    ) -> None:
        matrices, *others = groups
        self._muon = Muon([matrices], lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(others, lr=lr, betas=betas, fused=fused)
        device = self._muon.param_groups[0]["params"][0].device.type
        self._orthogonalise_in = nullcontext if has_bfloat16(device) else _Float32ForBfloat16
        super().__init__(self._muon.param_groups + self._adamw.param_groups, {})
        self._share()

    def _share(self) -> None:
        """Give both parts this optimizer's groups and states: what is set or loaded here holds for them."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        parts = ("_muon", "_adamw", "_orthogonalise_in")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in parts}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:  # the model's own computations keep their dtypes
            with torch.enable_grad():
                loss = closure()
        with self._orthogonalise_in():
            self._muon.step()
        self._adamw.step()
        return loss


class _Float32ForBfloat16(TorchFunctionMode):
    """`Tensor.bfloat16()` and `Tensor.to` with bfloat16 give a copy in float32.

    PyTorch's Muon orthogonalises in bfloat16 and has no option for another dtype. A processor without instructions for
    bfloat16 takes 10 to 40 times as long for such products as for float32.
    """

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        to_bfloat16 = function is torch.Tensor.to and any(x is torch.bfloat16 for x in (*args[1:], *kwargs.values()))
        if to_bfloat16 or function is torch.Tensor.bfloat16:  # from PyTorch 2.15 on, and before
            return args[0].to(torch.float32, copy=True)
        return function(*args, **kwargs)


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    max_steps: int,
    final_fraction: float,
    tokens_at: Callable[[int], int] = lambda step: step,
    schedule: Schedule = "cosine",
) -> float:
    """The factor of the peak learning rate for the step after `step` finished ones.

    It rises linearly to 1 at step `warmup_steps`. Then, by `schedule`, it follows half a cosine ("cosine") or a line
    ("linear") to `final_fraction` at `max_steps`, or it is √(warmup / seen) ("inverse_sqrt", arXiv 1706.03762, section
    5.3; without warm-up as after a warm-up of one step). All count tokens: `tokens_at(step)` is their number after
    `step` steps. By default all steps are equal.
    """
    seen, warm, total = tokens_at(step), tokens_at(warmup_steps), tokens_at(max_steps)
    if step < warmup_steps:
        return tokens_at(step + 1) / warm
    if schedule == "inverse_sqrt":
        warm = warm or tokens_at(1)
        return math.sqrt(warm / max(seen, warm))
    progress = min(1.0, (seen - warm) / max(1, total - warm))
    remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final_fraction + (1 - final_fraction) * remaining


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the options of each parameter group, without the learning rate, which follows the schedule."""
    others = ("params", "lr", "initial_lr")
    return [{name: copy.deepcopy(value) for name, value in group.items() if name not in others} for group in groups]


def changed_options(groups: Iterable[Mapping[str, Any]], made: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the options that an optimizer has changed since its groups had those of `made`: a count of its steps,
    for example."""
    changed = {
        name
        for group, options in zip(groups, made)
        for name, value in options.items()
        if not torch.as_tensor(group.get(name) == value).all()  # some are tensors
    }
    return sorted(changed)


def parameter_groups(model: Model, weight_decay: float, name: Name = "adamw") -> list[dict[str, Any]]:
    """The groups of optimizer `name`: parameters of two or more dimensions decay; all others and the frequencies, which
    come last, do not. For muon the weights of the blocks' linear layers are a group before these."""
    of_muon = model.matrices_of_blocks if name == "muon" else set()
    if name == "muon" and not of_muon:
        raise InputError(
            f"optimizer.name=muon trains the linear layers of a model's blocks, and {type(model).__name__} has none in "
            "`blocks_to_shard` that is trained: set adamw."
        )
    matrices, decayed, kept = [], [], []
    for path, parameter in model.named_parameters():
        if parameter in of_muon:
            matrices.append(parameter)
        elif parameter.requires_grad:
            decays = parameter.ndim >= 2 and not path.endswith("rope.theta")  # two-dimensional with one row per head
            (decayed if decays else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [{"params": matrices, "weight_decay": weight_decay}, *groups] if name == "muon" else groups
