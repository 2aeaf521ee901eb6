"""Sequence parallelism: each rank holds a slice of the tokens of every row, and computes what one device would.

All that linear attention needs of the ranks before is their merged `State`, of a fixed size. Each layer has one
all-gather of states in the forward and one reduce-scatter of their gradients in the backward, whatever the length
(LASP-2, arXiv 2502.07563, gathers states too). It is under way while a layer computes its queries and its output gate,
and in the backward their gradients. In packed rows that see their later tokens too, the gather has two states of each
rank, of its first and of its last document.

Short convolutions and windows of softmax attention take their last few tokens from the rank before. Softmax attention
without a window is refused: PyTorch's `context_parallel`, a prototype, has no CPU kernel, and it deals tokens to ranks
in another order.

Loss and gradients are those of the whole rows: the loss is the sum over the ranks, and gradients of weights and of
initial states are sums over the ranks of what each rank's `backward` leaves in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from linrope.distributed.group import SequenceGroup
from linrope.distributed.slices import SequenceSlice
from linrope.errors import InputError
from linrope.layers.state import ModelState, token_positions
from linrope.losses import check_targets
from linrope.models.base import Model
from linrope.models.encoder import EncoderModel
from linrope.models.heads import MaskedLM
from linrope.models.language_model import LanguageModel
from linrope.ops.call import autocast_inputs, without_autocast
from linrope.ops.linear_attention import linear_attention
from linrope.ops.open_documents import OpenEnds, attend_with_open_ends, summarize_first_document
from linrope.ops.state import State
from linrope.ops.summarize import summarize
from linrope.positions.base import require_within
from linrope.rotary import RotaryEmbedding
from linrope.segmented import require_fixed_state


def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None = None,
    *,
    group: SequenceGroup,
    log_decay: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    normalize: str = "plain",
    causal: bool = True,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
    where: SequenceSlice | None = None,
) -> Tensor | tuple[Tensor, State]:
    """`linear_attention` of rows whose tokens several ranks hold, in the order of their ranks.

    Every rank calls it with its own slice, and calls `backward`. Gradients are those of the sum of all ranks' losses:
    those of q, k, v and log_decay are whole; those of θ, of a feature map's weights and of the initial state are this
    rank's part, to be summed over the group.

    Args:
        q, k, v: this rank's slice, as in `linear_attention`; T may differ between the ranks.
        rope: as there. Positions continue from slice to slice.
        group: the ranks.
        log_decay, key_mask, segment_ids: this rank's slice. The same run of equal numbers may go on in the next slice.
        feature_map, normalize, causal, eps, backend: as in `linear_attention`, the same on every rank.
        state: the state before the row's first token, the same on every rank.
        return_state: also return the state after this slice; the last rank's is that of the row, see
            `SequenceGroup.from_last`. Without causality each rank's has all keys, in packed rows those of the
            slice's last document.
        where: the result of `SequenceSlice.of` for these rows and this state, to reuse it; None computes it.

    Returns:
        o: (B, H, T, E), this rank's slice, or (o, State).

    Raises:
        InputError: as `linear_attention`; on every rank, slices that do not fit together, or one without tokens.
    """
    if where is None:
        where = SequenceSlice.of(group, (k.shape[0], k.shape[2]), k.device, segment_ids, state)
    q, k, v = autocast_inputs(q, k, v)
    shared = {"feature_map": feature_map, "normalize": normalize, "key_mask": key_mask, "segment_ids": segment_ids}
    with without_autocast(q):
        own, first = summarize(k, v, rope, log_decay=log_decay, **shared), None
        if not causal and segment_ids is not None:
            first = summarize_first_document(k, v, rope, **shared)
        before = where.start_merge(own, rope, state, causal, first)()
        options = {"log_decay": log_decay, "causal": causal, "eps": eps, "backend": backend, **shared}
        if isinstance(before, OpenEnds):
            o, final = attend_with_open_ends(q, k, v, rope, **options, ends=before)
            return (o, final) if return_state else o
        return linear_attention(q, k, v, rope, **options, state=before, return_state=return_state)


def sequence_parallel_masked_loss(
    model: MaskedLM,
    tokens: Tensor,
    targets: Tensor,
    *,
    group: SequenceGroup,
    key_mask: Tensor | None = None,
    token_types: Tensor | None = None,
) -> Tensor:
    """The loss of the masked tokens in this rank's slice of each row, given all tokens of the row.

    Gradients, and what every rank has to do, are as in `sequence_parallel_loss`.

    Args:
        model: with `attention: linear`; the same weights on every rank.
        tokens: (B, T) integers, this rank's slice; T may differ between the ranks.
        targets: (B, T) tokens, or IGNORE (-100) where nothing is asked.
        group: the ranks.
        key_mask, token_types: this rank's slice, see `RoFormerEncoder`.

    Returns:
        The summed cross entropies of the slice's targets, in nats.

    Raises:
        InputError: on every rank, softmax attention, arguments of one that do not fit, slices that do not fit together,
            more tokens than learned positions.
    """
    where = slice_of_encoder(model, tokens, targets, group=group, key_mask=key_mask, token_types=token_types)
    return model(tokens, key_mask, token_types, targets, state=where.states_before(model.config.n_layers))


def slice_of_encoder(
    model: EncoderModel,
    tokens: Tensor,
    targets: Tensor,
    *,
    group: SequenceGroup,
    key_mask: Tensor | None = None,
    token_types: Tensor | None = None,
) -> SequenceSlice:
    """Where this rank's slice of an encoder's rows stands: `states_before` gives the encoder the other ranks' tokens.

    The arguments are those of `sequence_parallel_masked_loss`, whose errors it raises.
    """
    if model.config.attention != "linear":
        raise InputError(
            f"sequence parallelism needs linear attention, but model.attention is {model.config.attention!r}, which "
            "sees all keys, and no rank holds them. Set model.attention to 'linear', or do not split the rows."
        )
    problem = refused(model, partial(model.body.check, tokens, key_mask, token_types), tokens, targets)
    shape = (1, 1) if problem is not None else tuple(tokens.shape)
    where = SequenceSlice.of(group, shape, next(model.parameters()).device, problem=problem)
    _require_positions(model, where, tokens)
    return where


def refused(model: Model, check: Callable[[], None], tokens: Tensor, targets: Tensor) -> InputError | None:
    """The error of a check of this rank's arguments, which the other ranks must be told before it is raised."""
    try:
        check()
        check_targets(targets, tokens, model.config.vocab_size)
    except InputError as error:
        return error
    return None


def _require_positions(model: Model, where: SequenceSlice, tokens: Tensor, segment_ids: Tensor | None = None) -> None:
    """Raise InputError, on every rank, if a document has more tokens than the model has learned positions."""
    config = model.config.positions
    if config.name != "learned":
        return
    positions, _ = token_positions(tokens, where.state_before(), segment_ids)
    last = torch.tensor([where.start_of(where.group.size) - 1])
    if positions is not None:  # a rank knows the documents of its own slice only
        last = where.group.all_gather(positions.max())
    require_within(last, config.length, config.name)


def sequence_parallel_loss(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    *,
    group: SequenceGroup,
    segment_ids: Tensor | None = None,
    state: ModelState | None = None,
    previous_ids: Tensor | None = None,
    reduction: Literal["sum", "none"] = "sum",
) -> tuple[Tensor, ModelState]:
    """The loss of this rank's slice of the tokens, given all tokens before it, and the state after the slice.

        loss, _ = sequence_parallel_loss(model, tokens, targets, group=SequenceGroup())
        (loss / n_targets).backward()  # n_targets: of all ranks
        for weight in model.parameters():
            torch.distributed.all_reduce(weight.grad)

    Gradients of weights are this rank's part: their sum over the group is that of the whole rows. Every rank has to
    call `backward`, also one without targets. Dropout draws masks of its own on each rank.

    Args:
        model: every layer linear, or softmax with a window; the same weights on every rank.
        tokens: (B, T) integers, this rank's slice; T may differ between the ranks.
        targets: (B, T) tokens, or IGNORE (-100) for none. The last one is the first token of the next slice.
        group: the ranks.
        segment_ids: (B, T) integers, this slice's documents in packed rows.
        state: the state before the row's first token, the same on every rank.
        previous_ids: the documents that the state belongs to, see `SequenceSlice.of`; None: the first of these tokens.
        reduction: "sum", or "none" for the loss of each target, (B, T).

    Returns:
        The loss in nats, float32, and the state after this slice, which on the last rank is that of the row:
        `state_of_last` gives it to all.

    Raises:
        InputError: on every rank, a softmax layer without a window, tokens or targets of one that do not fit, slices
            that do not fit together, more tokens than learned positions.
    """
    require_fixed_state(model, "sequence parallelism")
    problem = refused(model, partial(model.check, tokens, state, segment_ids), tokens, targets)
    device, first = next(model.parameters()).device, None if state is None or problem is not None else state[0]
    shape = (1, 1) if problem is not None else tuple(tokens.shape)
    where = SequenceSlice.of(group, shape, device, segment_ids, first, previous_ids, problem)
    _require_positions(model, where, tokens, segment_ids)
    before = where.states_before(len(model.blocks), state)
    options = {"segment_ids": segment_ids, "return_state": True, "targets": targets, "reduction": reduction}
    return model(tokens, before, **options)  # a sharded model has to be called as a whole
