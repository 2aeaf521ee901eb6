"""What a hybrid costs layer by layer: the loss of a teacher with one of its attention layers replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from linrope.data.tokenizers.bytes import bytes_of
from linrope.losses import IGNORE, bits_per_byte
from linrope.models.language_model import LanguageModel
from linrope.utils.terminal import new_table


@dataclass(frozen=True)
class ReplacementCosts:
    """Losses of the same text, in `unit`."""

    unit: str
    """"bits per byte", or "nats per token" where the bytes of tokens are unknown."""
    teacher: float
    replaced: dict[int, float]
    """The loss with one layer replaced, by its number from 0."""

    @property
    def costs(self) -> dict[int, float]:
        """By how much the loss grows, by layer."""
        return {layer: loss - self.teacher for layer, loss in self.replaced.items()}

    def costliest(self, n: int) -> list[int]:
        """The n layers whose replacement costs most, in order of their numbers."""
        return sorted(sorted(self.costs, key=self.costs.__getitem__, reverse=True)[:n])


@torch.no_grad()
def replacement_costs(
    teacher: LanguageModel,
    model: LanguageModel,
    batches: Sequence[Mapping[str, Tensor]],
    tick: Callable[[], None] = lambda: None,
) -> ReplacementCosts:
    """The loss of a text with each attention layer of `teacher` replaced alone by that of `model`.

    Args:
        teacher, model: models with as many layers of the same width, on one device; `model` may be aligned with the
            teacher, or just converted. Both stay as they are.
        batches: of a text, with the keys that `LanguageModelingModule` names.
        tick: called after the text was read with the teacher, and with each replaced layer.
    """

    def read() -> tuple[float, float]:
        nats, units = 0.0, 0.0
        for batch in batches:
            targets = batch["targets"]
            losses = teacher(batch["inputs"], segment_ids=batch.get("segment_ids"), targets=targets)
            nats, units = nats + losses.item(), units + _units(batch, in_bytes)
        tick()
        return nats, units

    in_bytes = sum(_units(batch, True) for batch in batches) > 0

    def loss() -> float:
        nats, units = read()
        return bits_per_byte(nats, units) if in_bytes else nats / max(units, 1)

    of_teacher = loss()
    replaced = {layer: loss() for layer in _replaced_in_turn(teacher, model)}
    return ReplacementCosts("bits per byte" if in_bytes else "nats per token", of_teacher, replaced)


def _units(batch: Mapping[str, Tensor], in_bytes: bool) -> int:
    """The bytes of a batch's targets, or their number."""
    targets = batch["targets"]
    return (bytes_of(targets, batch.get("n_bytes")) if in_bytes else targets != IGNORE).sum().item()


def _replaced_in_turn(teacher: LanguageModel, model: LanguageModel) -> Iterator[int]:
    """Each layer's number, while `teacher` has that layer's attention from `model`."""
    for layer, (block, other) in enumerate(zip(teacher.blocks, model.blocks, strict=True)):
        own = block.attention
        block.attention = other.attention
        try:
            yield layer
        finally:
            block.attention = own


def table_of(costs: ReplacementCosts, kept: Iterable[int], title: str) -> Table:
    """The costs by layer, and which layers stay softmax."""
    kept = set(kept)
    table = new_table(title, costs.unit, "cost", text=("layer", "becomes"))
    table.add_row("", "teacher", f"{costs.teacher:.4f}", "")
    for layer, loss in costs.replaced.items():
        cost = f"{costs.costs[layer]:+.4f}" if math.isfinite(loss) else "not finite"
        table.add_row(str(layer), "softmax" if layer in kept else "linear", f"{loss:.4f}", cost)
    return table
