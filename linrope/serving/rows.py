"""The decoding states of several texts in one batch, which are stepped together whatever their lengths.

A model's state has one position for all rows, and the texts of a batch have positions of their own. Rotations depend on
differences of positions only, so the past of a text may stand anywhere: its keys are rotated from the position that
the text has come to, to the one of the batch. A layer that sees positions themselves is told where each text begins
(`document_start`). Caches of softmax layers have different lengths: shorter ones get invisible keys before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.layers.attention import Attention
from linrope.layers.state import AttentionState, ModelState, map_state
from linrope.models.language_model import LanguageModel
from linrope.ops.softmax import KeyValueCache
from linrope.ops.state import State, rotate_keys
from linrope.rotary import RotaryEmbedding, rotate, unit_rotations


class Rows:
    """The texts that a model decodes at present.

    Attributes:
        lengths: number of tokens read, of each row.
        position: where the batch stands: that of its first text, which grows by one with each step.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.lengths: list[int] = []
        self.position = 0
        self._state: ModelState | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @torch.inference_mode()
    def replace(self, kept: Sequence[int], added: Sequence[ModelState] = ()) -> None:
        """Keep these rows, in this order, and add others after them: states of one row, with all that it has read."""
        before = self._state
        if kept and list(kept) != list(range(len(self))):
            before = before.select_rows(list(kept))
        self.lengths = [*(self.lengths[row] for row in kept), *(state[0].past.length for state in added)]
        self._state = None
        if not self.lengths:
            return
        if not kept:
            self.position = self.lengths[0]
        starts, layers = [self.position - length for length in self.lengths], []
        for layer, block in enumerate(self.model.blocks):
            parts = [before[layer]] if kept else []
            if added:
                new = _join([state[layer] for state in added], self.position)
                parts.append(_moved(new, block.attention.past_rope, starts[len(kept) :]))
            joined = _join(parts, self.position)
            layers.append(_with_starts(joined, starts, self._sees_positions(layer, block.attention)))
        self._state = ModelState(layers)

    @torch.inference_mode()
    def state_of(self, row: int) -> ModelState:
        """The state of one row alone, as if it had been read alone."""
        length = self.lengths[row]
        shifts = [length - self.position]
        layers = []
        for block, part in zip(self.model.blocks, self._state):
            part = map_state(lambda _, x: x[row : row + 1].clone(), replace(part, document_start=None))
            part = _at(_trimmed(part), length)
            layers.append(_moved(part, block.attention.past_rope, shifts))
        return ModelState(layers)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token in each row: logits (B, vocab_size) of the next ones."""
        device = self.model.embedding.weight.device
        new = torch.tensor(tokens, device=device)[:, None]
        logits, self._state = self.model(new, self._state, None, return_state=True, logits_to_keep=1)
        self.lengths = [length + 1 for length in self.lengths]
        self.position += 1
        return logits[:, -1]

    def _sees_positions(self, layer: int, attention: Attention) -> bool:
        return attention.sees_positions or (layer == 0 and self.model.positions is not None)


def bytes_of(state: ModelState) -> int:
    """Bytes of a state's tensors."""
    sizes = []
    map_state(lambda _, x: sizes.append(x.nbytes) or x, state)
    return sum(sizes)


def _join(parts: Sequence[AttentionState], position: int) -> AttentionState:
    """The rows of these states one after another, in a batch that stands at `position`."""
    tails = [part.conv_tail for part in parts]
    tail = None if tails[0] is None else torch.cat(tails)
    pasts = [part.past for part in parts]
    if isinstance(pasts[0], State):
        tensors = {name: torch.cat([past.tensors[name] for past in pasts]) for name in pasts[0].tensors}
        return AttentionState(State(length=position, **tensors), tail)
    longest = max(past.k.shape[2] for past in pasts)
    k, v = (torch.cat([_padded(getattr(past, name), longest) for past in pasts]) for name in ("k", "v"))
    visible = torch.cat([F.pad(past.mask, (longest - past.k.shape[2], 0)) for past in pasts])
    return _trimmed(AttentionState(KeyValueCache(k, v, visible, position), tail))


def _padded(x: Tensor, length: int) -> Tensor:
    """Keys or values (B, H, S, D) with 0 before them, (B, H, length, D)."""
    return F.pad(x, (0, 0, length - x.shape[2], 0))


def _trimmed(part: AttentionState) -> AttentionState:
    """The state without the first keys that no row sees; with no mask where each row sees all."""
    past = part.past
    if isinstance(past, State) or past.visible is None:
        return part
    hidden = int((~past.visible.any(dim=0)).sum())  # they come first in each row
    k, v, visible = past.k[:, :, hidden:].contiguous(), past.v[:, :, hidden:].contiguous(), past.visible[:, hidden:]
    return replace(part, past=KeyValueCache(k, v, None if visible.all() else visible, past.length))


def _at(part: AttentionState, position: int) -> AttentionState:
    """The state, as one that stands at `position`."""
    return replace(part, past=replace(part.past, length=position))


def _moved(part: AttentionState, rope: RotaryEmbedding | None, shifts: Iterable[int]) -> AttentionState:
    """The state with the tokens of each row so many positions later: its rotated keys are rotated on."""
    shifts = torch.tensor(list(shifts))
    if rope is None or not shifts.any():
        return part
    past = part.past
    device = past.kv.device if isinstance(past, State) else past.k.device
    rotation = unit_rotations(shifts.to(device)[:, None, None], rope.frequencies(device))  # (B, 1 or H, 1, R/2)
    if isinstance(past, State):
        changed = {"kv": rotate_keys(past.kv, rotation, rope.interleaved)}
        if past.k_rotated_sum is not None:
            rotated = rotate_keys(past.k_rotated_sum[..., None], rotation, rope.interleaved)
            changed["k_rotated_sum"] = rotated[..., 0].contiguous()
        return replace(part, past=replace(past, **{name: x.contiguous() for name, x in changed.items()}))
    working = torch.promote_types(past.k.dtype, torch.float32)
    k = rotate(past.k.to(working), rotation, rope.interleaved).to(past.k.dtype)
    return replace(part, past=replace(past, k=k))


def _with_starts(part: AttentionState, starts: Sequence[int], sees_positions: bool) -> AttentionState:
    """The state with the positions at which the texts begin, where a layer or an embedding sees positions."""
    if not sees_positions:
        return part
    device = part.past.kv.device if isinstance(part.past, State) else part.past.k.device
    return replace(part, document_start=torch.tensor(starts, device=device))
