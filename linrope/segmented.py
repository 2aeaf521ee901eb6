"""Exact gradients of sequences that do not fit in memory.

All that crosses from one segment of a sequence to the next is the model's state, which is small and of fixed size. So
the forward keeps the states between segments and nothing else; the backward goes through the segments from the last
to the first, computes each again with autograd, and hands the gradient of the state before it to the segment before:

    forward     s_1 = f(s_0, x_1),  s_2 = f(s_1, x_2),  …               no graph; the s_i are kept
    backward    (∂s_{i-1}, ∂w) += the vector-Jacobian product of (s_i, loss_i) with (∂s_i, 1)        i = n … 1

The gradient is that of the whole sequence, for one more forward in time, in memory that does not depend on the length
but for the tokens and one state for each segment: of linear layers 70 kB for 128 wide ones with 4 heads, of softmax
layers the keys and values of a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.layers.state import ModelState, detach, state_before, tensors_of
from linrope.losses import summed_cross_entropy
from linrope.models.language_model import LanguageModel
from linrope.ops.torch_kernel.memory import give_back

SEGMENTS_BETWEEN = 8


Loss = Callable[[Tensor, Tensor], Tensor]


def segmented_loss(
    model: LanguageModel,
    inputs: Tensor,
    targets: Tensor,
    segment_length: int,
    *,
    loss: Loss = summed_cross_entropy,
    segment_ids: Tensor | None = None,
    state: ModelState | None = None,
    truncated: bool = False,
) -> tuple[Tensor, ModelState]:
    """The loss of a sequence, read in segments: `backward()` on it gives the gradients of the whole.

        total, _ = segmented_loss(model, tokens[:, :-1], tokens[:, 1:], 8192)
        (total / targets.numel()).backward()

    Only parameters get gradients. Dropout draws the same masks in both passes; they differ from those of one call on
    the whole sequence.

    Args:
        model: every layer linear, or softmax with a window.
        inputs: (B, T) tokens.
        targets: (B, T), or (B, T, ...): what `loss` takes beside the logits of those tokens.
        segment_length: tokens of a segment, at least 1; the last may be shorter.
        loss: `loss(logits, targets)` of one segment is a scalar, and that of a sequence the sum over its segments (so
            divide by a number of tokens afterwards).
        segment_ids: (B, T) integers, documents of packed rows, as the model takes them.
        state: what came before, without gradient.
        truncated: cut the gradient between segments (truncated backpropagation through time): the states go on, each
            segment's loss reaches its own tokens only. Not with trained frequencies.

    Returns:
        The loss, a scalar to call `backward` on, and the state after the last token, without gradient.

    Raises:
        InputError: a segment length below 1, no tokens, shapes that do not fit, a softmax layer without a window (its
            past is all keys, which is what segments are to spare) or with one longer than a segment.
    """
    _check(model, inputs, targets, segment_length, segment_ids, state)
    if truncated:
        require_fixed_frequencies(model, "truncated=True")
    pieces = _Pieces(model, loss, inputs, targets, segment_ids, segment_length)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (torch.is_grad_enabled() and parameters):
        total, states, _ = pieces.forward(state, keep=False)
        return total, states[-1]
    kept: dict[str, Any] = {"state": state, "truncated": truncated}
    total = _SegmentedLoss.apply(pieces, kept, *parameters)
    return total, kept["final"]


def _check(model: LanguageModel, inputs: Tensor, targets: Tensor, segment_length: int, segment_ids, state) -> None:
    require_segments(model, segment_length)
    if inputs.ndim != 2 or inputs.shape[1] == 0 or targets.shape[:2] != inputs.shape:
        raise InputError(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: pass (B, T) with T ≥ 1, and one target "
            "for each token."
        )
    model.check(inputs, state, segment_ids)  # now, and not when the segment with the mistake comes


def require_segments(model: LanguageModel, segment_length: int) -> None:
    """Raise InputError unless sequences can be read in segments of that length, the model's state not growing."""
    if not (isinstance(segment_length, int) and segment_length >= 1):
        raise InputError(f"segment_length={segment_length!r} must be a whole number of tokens, at least 1.")
    require_fixed_state(model, f"segment_length={segment_length}")
    window = model.config.window
    if "softmax" in model.config.attention_types and segment_length < window:
        raise InputError(
            f"segment_length={segment_length} is less than model.window={window}, whose keys and values each segment "
            f"has to keep: set it to {window} or more."
        )


def require_fixed_state(model: LanguageModel, option: str) -> None:
    """Raise InputError, naming the option that asks for it, unless the model's state does not grow with the length."""
    for layer, kind in enumerate(model.config.attention_types):
        if kind == "softmax" and model.config.window is None:
            raise InputError(
                f"{option} was given to a model whose layer {layer} is softmax attention without a window: its past is "
                "all keys and values, so memory would grow all the same. Set model.window, make the layer linear, or "
                "leave the option out."
            )


def require_carried_state(model: LanguageModel, option: str) -> None:
    """Raise InputError, naming the option that carries states, cut from their graph, from batch to batch, unless the
    model has such: of a fixed size, and of frequencies that are not trained."""
    require_fixed_state(model, option)
    require_fixed_frequencies(model, option)


def require_fixed_frequencies(model: LanguageModel, option: str) -> None:
    """Raise InputError, naming the option that cuts states from their graph, where frequencies are trained.

    A state that is cut holds keys turned by the frequencies of before. Its part in ∂θ is as large as its position, and
    says how the whole past would turn, which is not what training is to change.
    """
    rope = model.config.rope
    if rope is not None and rope.trainable:
        raise InputError(
            f"{option} cuts the gradient of the state, through which trained frequencies (rope.trainable=True) would "
            "get a meaningless one, as large as the position: leave one of the two out."
        )


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """A sequence and what is to be computed on each of its segments."""

    model: LanguageModel
    loss: Loss
    inputs: Tensor
    targets: Tensor
    segment_ids: Tensor | None
    length: int

    def slices(self) -> Iterator[slice]:
        for start in range(0, self.inputs.shape[1], self.length):
            yield slice(start, min(start + self.length, self.inputs.shape[1]))

    def run(self, piece: slice, state: ModelState | None) -> tuple[Tensor, ModelState]:
        """The loss of one segment, and the state after it."""
        ids = None if self.segment_ids is None else self.segment_ids[:, piece]
        state = state_before(piece.start, self.segment_ids, state)
        logits, state = self.model(self.inputs[:, piece], state, segment_ids=ids, return_state=True)
        return self.loss(logits, self.targets[:, piece]), state

    def give_back_at(self, number: int) -> None:
        """After every few segments: it costs as much as writing the memory that the next one needs anew."""
        if number % SEGMENTS_BETWEEN == SEGMENTS_BETWEEN - 1 and self.inputs.device.type == "cpu":
            give_back()

    @torch.no_grad()
    def forward(self, state: ModelState | None, keep: bool) -> tuple[Tensor, list[ModelState | None], list]:
        """The whole loss; the state before each segment (with `keep`) and after the last; the random states."""
        total, states, draws = 0.0, [], []
        for number, piece in enumerate(self.slices()):
            self.give_back_at(number)
            if keep:
                states.append(state)
                draws.append(_random_state(self.inputs.device))
            value, state = self.run(piece, state)
            total = total + value
        return total, [*states, state], draws


class _SegmentedLoss(torch.autograd.Function):
    """One node of autograd: parameters in, the loss out. So a step of any trainer, with accumulation, clipping, scaled
    losses and one all-reduce over devices, is what it was."""

    @staticmethod
    def forward(ctx, pieces: _Pieces, kept: dict[str, Any], *parameters: Tensor) -> Tensor:
        total, states, draws = pieces.forward(kept["state"], keep=True)
        kept["final"] = states.pop()
        ctx.pieces, ctx.states, ctx.draws, ctx.truncated = pieces, states, draws, kept["truncated"]
        ctx.parameters = parameters
        device = pieces.inputs.device.type
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for a second derivative, which segmented_loss does not have: take the loss of "
                "the model at once."
            )
        pieces, parameters = ctx.pieces, ctx.parameters
        device = pieces.inputs.device
        # summed in float32 at least (there may be hundreds of segments), in memory that is there from the start: small
        # tensors made between large ones would keep the allocator from giving those back
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        used = [False] * len(parameters)
        grad_state: list[Tensor | None] = []
        enabled, dtype = ctx.autocast
        steps = list(zip(pieces.slices(), ctx.states, ctx.draws, strict=True))
        for number, (piece, state, draw) in enumerate(reversed(steps)):
            with torch.enable_grad(), torch.autocast(device.type, dtype, enabled), _drawing_again(draw, device):
                before = detach(state, not ctx.truncated)
                value, after = pieces.run(piece, before)
            sources = [*parameters, *([] if ctx.truncated else tensors_of(before))]
            outputs, gradients = [value], [grad.to(value.dtype)]
            for tensor, gradient in zip(tensors_of(after), grad_state):
                if gradient is not None and tensor.requires_grad:
                    outputs.append(tensor)
                    gradients.append(gradient)
            found = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
            for i, gradient in enumerate(found[: len(parameters)]):
                if gradient is not None:
                    used[i] = True
                    sums[i] += gradient
            grad_state = list(found[len(parameters) :])
            del value, after, before, outputs, found
            pieces.give_back_at(number)
        rounded = (total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))
        return None, None, *(total if has else None for total, has in zip(rounded, used, strict=True))


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


class _drawing_again:
    """Inside, random numbers are those that were drawn from a given state on; after it, the draw goes on as before."""

    def __init__(self, draw: tuple[Tensor, Tensor | None], device: torch.device):
        self.draw, self.device = draw, device

    def __enter__(self) -> None:
        self.now = _random_state(self.device)
        self._set(self.draw)

    def __exit__(self, *error: object) -> None:
        self._set(self.now)

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)
