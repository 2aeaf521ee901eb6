"""From softmax attention to a hybrid, with the teacher beside it: alignment of attention layers, and distillation.

`linrope.models.conversion` makes the hybrid that these tasks start from.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.data.tokenizers.bytes import bytes_of
from linrope.errors import InputError
from linrope.interop.roformer import load_trained
from linrope.losses import IGNORE, bits_per_byte
from linrope.models.conversion import layers_that_differ, new_parameters
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.profiling.flops import step_flops
from linrope.training.checkpoint import require_tokenizer_of_teacher
from linrope.training.data_modules.base import ResumableDataModule
from linrope.training.data_modules.text import TextDataModule
from linrope.training.optimizer import OptimizerConfig
from linrope.training.task import Batch, BatchLoss, TrainingTask
from linrope.training.tasks.language_modeling import LanguageModelingModule


@dataclass(frozen=True)
class TeacherOptions:
    """The softmax model that the hybrid is made from."""

    teacher: str | None = None
    """Its checkpoint file, its folder, or the folder of a Llama, Mistral or Qwen of transformers; it must be set."""


@dataclass(frozen=True)
class AlignmentOptions(TeacherOptions):
    """The teacher, and what is trained."""

    train: Literal["attention", "new"] = "attention"
    """attention: all weights of the layers that differ from the teacher's; new: those alone that the teacher lacks
    (feature maps, forget gates)."""


@dataclass(frozen=True)
class DistillationOptions(TeacherOptions):
    """The teacher, and the loss."""

    cross_entropy: float = 0.0
    """Weight of the cross entropy of the text, which is added to the divergence from the teacher."""

    def __post_init__(self) -> None:
        if not 0 <= self.cross_entropy < float("inf"):
            raise InputError(f"conversion.cross_entropy={self.cross_entropy!r} must be a finite number, at least 0.")


class WithTeacher(TrainingTask):
    """What tasks with a teacher share; `self.conversion` holds the options.

    The teacher is no part of the module: checkpoints do not hold it, and no optimizer trains it. Every device has a
    whole one.
    """

    conversion: TeacherOptions

    @cached_property
    def _loaded_teacher(self) -> LanguageModel:
        if (path := self.conversion.teacher) is None:
            raise InputError("conversion.teacher is missing: name the model that the hybrid was made from.")
        try:
            teacher = load_trained(path, LanguageModelConfig)
        except InputError as error:
            raise InputError(f"conversion.teacher={path!r}: {error}") from error
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            of_teacher, here = getattr(teacher.config, name), getattr(self.model_config, name)
            if of_teacher != here:
                raise InputError(
                    f"conversion.teacher={path!r} has {name}={of_teacher}, and the model has {here}: give the teacher "
                    "that it was made from, or the model.yaml that `linrope convert` wrote as --config."
                )
        return teacher.requires_grad_(False)

    @property
    def teacher(self) -> LanguageModel:
        """The teacher, in evaluation mode, on this module's device. InputError if there is none that fits."""
        return self._loaded_teacher.to(self.device)

    def require_data(self, data: ResumableDataModule) -> None:
        super().require_data(data)
        if data.contiguous:
            raise InputError("data.contiguous=True is for language modeling: set it to false, rows are read alone.")
        source = f"conversion.teacher={self.conversion.teacher!r}"
        require_tokenizer_of_teacher(self.teacher, data.tokenizer, source)


class AttentionAlignmentModule(WithTeacher):
    """Trains each attention layer of a hybrid to the output of its teacher's, from the same input.

    One pass of the teacher gives the inputs and the outputs of all layers. The loss of a layer is its squared error
    divided by the mean square of the teacher's outputs: 1 is that of a layer whose output is 0. All layers but those
    that compute the same as the teacher's are trained, each by itself; the loss is their mean. No other weights change.

    Logs `train_loss` of each optimizer step, and for a whole evaluation `val_loss` and `val_error/layer_N` of each
    layer, counted from 0; for a test the same as `test_…`.

    Args:
        model_config: the hybrid. Its weights are loaded from what `linrope convert` wrote (`run.start_from`).
        optimizer_config: how to train it.
        conversion: the teacher, and which weights are trained.
        seed: decides the random numbers of training.

    Raises:
        InputError: no teacher, one of other sizes or with another tokenizer than the data; when training starts: a
            hybrid without layers to train, one whose other weights are not the teacher's, and as in `TrainingTask`.
    """

    config_class = LanguageModelConfig
    data_class = TextDataModule
    own_sections: ClassVar = {"conversion": AlignmentOptions}

    def __init__(
        self,
        model_config: LanguageModelConfig | LanguageModel,
        optimizer_config: OptimizerConfig | None = None,
        conversion: AlignmentOptions = AlignmentOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(model_config, optimizer_config, seed)
        self.conversion = conversion

    @cached_property
    def layers(self) -> list[int]:
        """The layers that are trained. InputError if there is none."""
        layers = layers_that_differ(self.model, self.teacher)
        names = [name for name, _ in self.model.named_parameters() if name.startswith(_prefixes(layers))]
        if self.conversion.train == "new":
            names = [name for name in new_parameters(self.model, self.teacher) if name in names]
            layers = [layer for layer in layers if any(name.startswith(_prefixes([layer])) for name in names)]
        if not layers:
            raise InputError(
                f"conversion.train={self.conversion.train} leaves nothing to align: the model has no such weights in "
                f"layers that differ from those of the teacher, model.attention={self.model_config.attention}."
            )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in names)
        return layers

    def layer_errors(self, batch: Batch) -> dict[int, tuple[Tensor, Tensor]]:
        """Of each layer that is trained, the mean square of its error and of the teacher's output, scalars."""
        found, ids = {}, batch.get("segment_ids")

        def align(layer: int):
            def hook(attention, inputs, outputs) -> None:
                with torch.set_grad_enabled(with_grad):
                    x, target = inputs[0], outputs[0]
                    error = self.model.blocks[layer].attention(x, None, ids).float() - target.float()
                    found[layer] = error.square().mean(), target.float().square().mean()

            return hook

        with_grad, teacher = torch.is_grad_enabled(), self.teacher
        hooks = [teacher.blocks[layer].attention.register_forward_hook(align(layer)) for layer in self.layers]
        try:
            with torch.no_grad():
                teacher.transform(teacher.embedding(batch["inputs"]), segment_ids=ids)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def batch_loss(self, batch: Batch) -> BatchLoss:
        n = batch["inputs"].numel()
        errors = [error / power for error, power in self.layer_errors(batch).values()]
        return BatchLoss(torch.stack(errors).mean() * n, torch.tensor(n, device=self.device), n)

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        n = batch["inputs"].numel()
        for layer, both in self.layer_errors(batch).items():
            sums[layer] = sums.get(layer, 0) + n * torch.stack(both).cpu().double()

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        errors = {layer: (both[0] / both[1]).item() for layer, both in sums.items()}
        mean = sum(errors.values()) / len(errors)
        return {f"{split}_loss": mean, **{f"{split}_error/layer_{layer}": error for layer, error in errors.items()}}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.layers  # noqa: B018 (decides what is trained, before there is an optimizer)

    def configure_model(self) -> None:
        if self._device_mesh is not None:
            raise InputError(
                "trainer.strategy divides the model among devices, and attention_alignment calls its layers one by "
                "one: set trainer.strategy to ddp."
            )

    def on_train_start(self) -> None:
        super().on_train_start()
        given, changed = dict(self.teacher.named_parameters()), _prefixes(self.layers)
        for name, parameter in self.model.named_parameters():
            if name in given and not name.startswith(changed) and not _equal(parameter, given[name]):
                raise InputError(
                    f"the model's weights are not those of conversion.teacher={self.conversion.teacher!r}, {name} for "
                    "one: start from what `linrope convert` made of it, run.start_from=FOLDER."
                )


def _prefixes(layers: list[int]) -> tuple[str, ...]:
    """How the names of these layers' weights begin."""
    return tuple(f"blocks.{layer}.attention." for layer in layers)


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether a weight is the teacher's, up to the rounding of a lower precision."""
    if ours.shape != theirs.shape:
        return False
    lower = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(ours.detach().to(lower), theirs.to(lower))


class DistillationModule(WithTeacher, LanguageModelingModule):
    """Trains a hybrid to predict what its teacher predicts: the divergence KL(teacher | model) of each next token.

    Batches and metrics of evaluation are those of `LanguageModelingModule`, so that the loss of the text is compared
    with other runs. Logs `train_loss`, what is minimised, `train_divergence`, both in nats per target, and `train_bpb`,
    the bits per byte of the text, of each optimizer step.

    The logits of model and teacher, (B, T, vocab_size), are in memory at once.

    Args:
        model_config, optimizer_config, seed: as in `LanguageModelingModule`.
        conversion: the teacher, and the weight of the cross entropy.
        segment_length: must be None: rows are read whole.

    Raises:
        InputError: no teacher, one of other sizes or with another tokenizer than the data, a segment length; when
            training starts: contiguous batches, and as in `TrainingTask`.
    """

    own_sections: ClassVar = {"conversion": DistillationOptions}

    def __init__(
        self,
        model_config: LanguageModelConfig | LanguageModel,
        optimizer_config: OptimizerConfig | None = None,
        conversion: DistillationOptions = DistillationOptions(),
        segment_length: int | None = None,
        seed: int = 0,
    ) -> None:
        if segment_length is not None:
            raise InputError(f"segment_length={segment_length}: distillation reads whole rows, leave it out.")
        super().__init__(model_config, optimizer_config, seed=seed)
        self.conversion = conversion

    require_slices = TrainingTask.require_slices

    def batch_loss(self, batch: Batch) -> BatchLoss:
        inputs, targets, ids = batch["inputs"], batch["targets"], batch.get("segment_ids")
        with torch.no_grad():
            expected = self.teacher(inputs, segment_ids=ids).float().log_softmax(-1)
        predicted = self.model(inputs, segment_ids=ids).float().log_softmax(-1)
        counted = targets != IGNORE
        divergence = F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)[counted].sum()
        nats = F.nll_loss(predicted.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        sums = {"divergence": divergence.detach(), "nats": nats.detach()}
        sums["bytes"] = bytes_of(targets, self._n_bytes(batch)).sum()
        loss = divergence + self.conversion.cross_entropy * nats
        return BatchLoss(loss, counted.sum(), targets.numel(), sums)

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        n = max(sums["targets"], 1)
        metrics = {"train_loss": sums["loss"] / n, "train_divergence": sums["divergence"] / n}
        return {**metrics, "train_bpb": bits_per_byte(sums["nats"], sums["bytes"])} if sums["bytes"] else metrics

    def step_flops(self, batch: Batch) -> int:
        rows, length = batch["inputs"].shape
        forward = step_flops(self.teacher, rows, length, None) // 3  # of forward and backward
        return super().step_flops(batch) + forward
