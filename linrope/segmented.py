"""Exact gradients of sequences that do not fit in memory.

Only the model's state, small and of fixed size, passes from one segment to the next. The forward keeps these states and
nothing else. The backward goes from the last segment to the first, computes each again with autograd, and passes the
gradient of its initial state to the segment before:

    forward     s_1 = f(s_0, x_1),  s_2 = f(s_1, x_2),  …               no graph; the s_i are kept
    backward    (∂s_{i-1}, ∂w) += the vector-Jacobian product of (s_i, loss_i) with (∂s_i, 1)        i = n … 1

The gradient is that of the whole sequence. It costs one more forward pass. Memory grows with the length by the tokens
and one state a segment: 70 kB for a linear layer of width 128 with 4 heads, a window's keys and values for softmax.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.layers.state import ModelState, tensors_of
from linrope.models.language_model import LanguageModel
from linrope.ops.torch_kernel.memory import give_back
from linrope.utils.gradients import GradientSums, trained_elsewhere
from linrope.utils.options import require_whole

SEGMENTS_BETWEEN = 8
"""Freed memory goes back to the system after this many segments: it is as slow as writing the memory again."""
Loss = Callable[[Tensor, Tensor], Tensor]
Read = Callable[
    [Tensor, Tensor, "Tensor | None", "Tensor | None", "ModelState | None"], "tuple[Tensor, ModelState | None]"
]


def segmented_loss(
    model: LanguageModel,
    inputs: Tensor,
    targets: Tensor,
    segment_length: int,
    *,
    loss: Loss | None = None,
    segment_ids: Tensor | None = None,
    state: ModelState | None = None,
    truncated: bool = False,
) -> tuple[Tensor, ModelState]:
    """The loss of a sequence, read in segments: `backward()` on it gives the gradients of the whole.

        total, _ = segmented_loss(model, tokens[:, :-1], tokens[:, 1:], 8192)
        (total / targets.numel()).backward()

    Only the model's parameters get gradients; other trained tensors, of a loss of your own or of hooks, get none, with
    a warning. Dropout draws the same masks in both passes; they differ from those of one call on the whole sequence.

    Args:
        model: every layer linear, or softmax with a window.
        inputs: (B, T) tokens.
        targets: (B, T) or (B, T, ...), the second argument of `loss`.
        segment_length: tokens of a segment, at least 1; the last may be shorter.
        loss: `loss(logits, targets)` is the scalar loss of one segment; None for the summed cross entropy, for which
            logits are not kept. The loss of the sequence is the sum over its segments, so divide by the number of
            tokens afterwards.
        segment_ids: (B, T) integers, the documents of packed rows, as the model takes them. A document that begins with
            the first token here needs a `state` without a past in its row: `state.reset_rows`.
        state: the state before the first token; it gets no gradient.
        truncated: truncated backpropagation through time: states pass between segments, gradients do not. Not with
            trained frequencies.

    Returns:
        The loss, a scalar to call `backward` on, and the state after the last token, without gradient.

    Raises:
        InputError: a segment length below 1, no tokens, shapes that do not fit, a softmax layer whose window is missing
            (its state would grow with the length) or longer than a segment, or a `loss` that gives no scalar tensor.
    """
    require_segments(model, segment_length)
    for name, tokens in (("inputs", inputs), ("targets", targets)):
        if not isinstance(tokens, Tensor):
            raise InputError(f"{name} is a {type(tokens).__name__}: pass a tensor.")
    if inputs.ndim != 2 or inputs.shape[1] == 0 or targets.shape[:2] != inputs.shape:
        raise InputError(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: pass (B, T) with T ≥ 1, and one target "
            "for each token."
        )
    model.check(inputs, state, segment_ids)  # before the first segment, not when its turn comes
    if truncated:
        require_fixed_frequencies(model, "truncated=True")

    def read(inputs, targets, segment_ids, previous_ids, state):
        if state is not None and previous_ids is not None:
            state = state.reset_rows(segment_ids[:, 0] != previous_ids)
        if loss is None:
            return model(inputs, state, segment_ids=segment_ids, return_state=True, targets=targets)
        logits, state = model(inputs, state, segment_ids=segment_ids, return_state=True)
        value = loss(logits, targets)
        if not (isinstance(value, Tensor) and value.ndim == 0):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(f"loss(logits, targets) is {found}: return the loss of the segment as a scalar tensor.")
        return value, state

    options = {"segment_ids": segment_ids, "state": state, "truncated": truncated}
    return loss_of_segments(read, model, inputs, targets, segment_length, **options)


def loss_of_segments(
    read: Read,
    model: LanguageModel,
    inputs: Tensor,
    targets: Tensor,
    segment_length: int,
    *,
    segment_ids: Tensor | None,
    state: ModelState | None,
    truncated: bool = False,
) -> tuple[Tensor, ModelState]:
    """`segmented_loss` with any way to read a segment; the other arguments are as there, and have been checked.

    `read(inputs, targets, segment_ids, previous_ids, state)` returns the loss of a segment and the state after it.
    `previous_ids` (B,) are the documents of the tokens before it, None at the start and in rows that are not packed;
    where they differ from the first of `segment_ids`, the state has to be reset.
    """
    segments = _Segments(read, model, inputs, targets, segment_ids, segment_length)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (torch.is_grad_enabled() and parameters):
        total, states, _ = segments.forward(state, keep=False)
        return total, states[-1]
    kept: dict[str, Any] = {"state": state, "truncated": truncated}
    if not hasattr(parameters[0], "full_tensor"):
        total = _SegmentedLoss.apply(segments, kept, *parameters)
    else:  # shards, which get their gradients from FSDP; the backward needs something to start from
        require_float32_sums(parameters, segment_length)
        total = _SegmentedLoss.apply(segments, kept, inputs.new_zeros((), dtype=torch.float32, requires_grad=True))
    return total, kept["final"]


def require_segments(model: LanguageModel, segment_length: int) -> None:
    """Raise InputError unless the model can read sequences in segments of that length with a state of fixed size."""
    require_whole("segment_length", segment_length)
    require_fixed_state(model, f"segment_length={segment_length}")
    window = model.config.window
    if "softmax" in model.config.attention_types and segment_length < window:
        raise InputError(
            f"segment_length={segment_length} is less than model.window={window}, whose keys and values the state "
            f"keeps: set it to {window} or more."
        )


def require_fixed_state(model: LanguageModel, option: str) -> None:
    """Raise InputError if the model's state grows with the length; the message names the option that needs this.
    InputError too for what is no language model."""
    if not hasattr(getattr(model, "config", None), "attention_types"):
        raise InputError(
            f"model is a {type(model).__name__}: pass a LanguageModel. DistributedDataParallel wraps a module whose "
            "forward computes this loss."
        )
    for layer, kind in enumerate(model.config.attention_types):
        if kind == "softmax" and model.config.window is None:
            raise InputError(
                f"{option} needs a state of fixed size, but layer {layer} is softmax attention without a window, which "
                "keeps all keys and values. Set model.window, make the layer linear, or remove the option."
            )


def require_float32_sums(parameters: Sequence[Tensor], segment_length: int) -> None:
    """Raise InputError for shards of less than float32, in whose dtype FSDP sums the gradients of all segments."""
    dtype = min((parameter.dtype for parameter in parameters), key=lambda one: one.itemsize)
    if dtype.itemsize < 4:
        raise InputError(
            f"segment_length={segment_length} with a sharded model of {dtype} would sum the gradients of all segments "
            "in that precision: set trainer.precision to bf16-mixed or 32-true."
        )


def require_carried_state(model: LanguageModel, option: str) -> None:
    """Raise InputError unless states can pass from batch to batch without their graph: they need a fixed size and
    frequencies that are not trained."""
    require_fixed_state(model, option)
    require_fixed_frequencies(model, option)


def require_fixed_frequencies(model: LanguageModel, option: str) -> None:
    """Raise InputError if frequencies are trained; the message names the option that detaches states.

    A detached state holds keys rotated by earlier frequencies. Its part of ∂θ is proportional to the position, as if
    the whole past were rotated anew, which is no useful gradient.
    """
    rope = model.config.rope
    if rope is not None and rope.trainable:
        raise InputError(
            f"{option} detaches the state, but trained frequencies (rope.trainable=True) need its gradient: without it "
            "their own is meaningless and grows with the position. Remove one of the two."
        )


@dataclasses.dataclass(frozen=True)
class _Segments:
    """A sequence in segments, and the loss of each."""

    read: Read
    model: LanguageModel
    inputs: Tensor
    targets: Tensor
    segment_ids: Tensor | None
    length: int

    def slices(self) -> Iterator[slice]:
        return (slice(start, start + self.length) for start in range(0, self.inputs.shape[1], self.length))

    def run(self, segment: slice, state: ModelState | None) -> tuple[Tensor, ModelState]:
        """The loss of one segment, and the state after it."""
        ids = None if self.segment_ids is None else self.segment_ids[:, segment]
        inputs, targets = self.inputs[:, segment], self.targets[:, segment]
        previous = None if ids is None or segment.start == 0 else self.segment_ids[:, segment.start - 1]
        return self.read(inputs, targets, ids, previous, state)

    def free_after(self, number: int) -> None:
        if number % SEGMENTS_BETWEEN == SEGMENTS_BETWEEN - 1 and self.inputs.device.type == "cpu":
            give_back()

    @torch.no_grad()
    def forward(self, state: ModelState | None, keep: bool) -> tuple[Tensor, list[ModelState | None], list]:
        """The loss, the states (before each segment, with `keep`, and after the last), and the random states."""
        total, states, random_states = 0.0, [], []
        for number, segment in enumerate(self.slices()):
            self.free_after(number)
            if keep:
                states.append(state)
                of_gpu = torch.cuda.get_rng_state(self.inputs.device) if self.inputs.is_cuda else None
                random_states.append((torch.get_rng_state(), of_gpu))
            value, state = self.run(segment, state)
            total = total + value
        return total, [*states, state], random_states


class _SegmentedLoss(torch.autograd.Function):
    """One autograd node from the parameters to the loss, so that accumulation, clipping and all-reduce work."""

    @staticmethod
    def forward(ctx, segments: _Segments, kept: dict[str, Any], *parameters: Tensor) -> Tensor:
        total, states, random_states = segments.forward(kept["state"], keep=True)
        kept["final"] = states.pop()
        ctx.segments, ctx.states, ctx.random_states, ctx.truncated = segments, states, random_states, kept["truncated"]
        ctx.parameters = parameters
        ctx.save_for_backward(*parameters)  # so that PyTorch refuses a backward after a change of the weights
        device = segments.inputs.device.type
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for a second derivative, which segmented_loss does not have: compute the loss "
                "without segments."
            )
        segments, parameters, _ = ctx.segments, ctx.parameters, ctx.saved_tensors  # raises if weights have changed
        device = segments.inputs.device
        model, is_sharded = segments.model, hasattr(segments.model, "set_requires_gradient_sync")
        # allocated first, since small tensors between large ones would keep the allocator from returning those
        sums = GradientSums(parameters)
        grad_state: list[Tensor | None] = []
        enabled, dtype = ctx.autocast
        steps = list(zip(segments.slices(), ctx.states, ctx.random_states, strict=True))
        for number, (segment, state, random_state) in enumerate(reversed(steps)):
            autocast = torch.autocast(device.type, dtype, enabled)
            with torch.enable_grad(), autocast, _same_random_numbers(random_state, device):
                before = None if state is None else state.detach(not ctx.truncated)
                value, after = segments.run(segment, before)
            past = [] if ctx.truncated else tensors_of(before)
            outputs, gradients = [], []
            for tensor, gradient in zip([value, *tensors_of(after)], [grad.to(value.dtype), *grad_state]):
                if gradient is not None and tensor.requires_grad:  # a loss of one's own may be a constant here
                    outputs.append(tensor)
                    gradients.append(gradient)
            if is_sharded:  # the model computes with other tensors, gathered for each block; the last adds over ranks
                model.set_requires_gradient_sync(number == len(steps) - 1)
                torch.autograd.backward(outputs, gradients)
                grad_state = [tensor.grad for tensor in past]
            else:
                if number == 0 and (other := trained_elsewhere(outputs, [*parameters, *past])) is not None:
                    warnings.warn(
                        f"segmented_loss has gradients for the model's parameters alone, and a tensor of shape "
                        f"{tuple(other.shape)} with requires_grad=True gets none: make it a parameter of the model.",
                        stacklevel=2,
                    )
                found = torch.autograd.grad(outputs, [*parameters, *past], gradients, allow_unused=True)
                sums.add(found[: len(parameters)])
                grad_state = list(found[len(parameters) :])
                del found
            del value, after, before, past, outputs
            segments.free_after(number)
        return None, None, *(sums.rounded() if not is_sharded else [None])


@contextmanager
def _same_random_numbers(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those drawn after `state`; afterwards the generators are as before."""
    with torch.random.fork_rng([] if state[1] is None else [device]):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield
