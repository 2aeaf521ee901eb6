"""`SequenceSlice`: where this rank's tokens stand in the row, and what layers take from the ranks before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from linrope.distributed.group import SequenceGroup, require_group
from linrope.errors import InputError
from linrope.layers.state import AttentionState, ModelState, RemotePast
from linrope.ops.documents import check_segment_ids, number_documents
from linrope.ops.open_documents import OpenEnds
from linrope.ops.softmax import extend_cache
from linrope.ops.state import State, rotate_keys
from linrope.rotary import RotaryEmbedding, unit_rotations


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of the tokens of each row.

    Attributes:
        group: the ranks that hold the rows.
        lengths: the number of tokens of each rank.
        offset: the position of the row's first token, which is the length of an initial state.
        opens: (size, B) booleans, whether the first token of each rank's slice begins a document; None if no row is
            packed. The first rank's does if the initial state belongs to another document.
        is_split: (size, B) booleans, whether a document begins inside each rank's slice; None if no row is packed.
        document_start: (B,) int64, the position at which the document of this slice's first token begins; None if all
            begin at 0.
    """

    group: SequenceGroup
    lengths: tuple[int, ...]
    offset: int = 0
    opens: Tensor | None = None
    is_split: Tensor | None = None
    document_start: Tensor | None = None

    @classmethod
    def of(
        cls,
        group: SequenceGroup,
        shape: tuple[int, int],
        device: torch.device,
        segment_ids: Tensor | None = None,
        state: AttentionState | State | None = None,
        previous_ids: Tensor | None = None,
        problem: InputError | None = None,
    ) -> SequenceSlice:
        """Where a slice of these rows stands. One gather of a few integers, two in packed rows, and the host waits.

        Args:
            group: the ranks that hold the rows.
            shape: (B, T) of this rank's slice. Slices may differ in T; each has a token at least.
            device: where the slice is.
            segment_ids: (B, T) integers of this slice's tokens in packed rows, as layers take them. A run of equal
                numbers may go on in the next rank's slice.
            state: the state before the row's first token, the same on every rank.
            previous_ids: (B,) integers, on the last rank the documents that `state` belongs to, on the others any. A
                row whose first id differs begins a document. None: all rows continue the state.
            problem: what this rank's arguments were refused for, raised here once the other ranks know; None for
                nothing.

        Raises:
            InputError: on every rank, if the slices of one do not fit: no token, another number of rows,
                segment_ids on some ranks only or of another shape, states of different lengths, a `problem`.
        """
        require_group(group)
        past = getattr(state, "past", state)
        if segment_ids is not None and problem is None:
            try:
                check_segment_ids(segment_ids, *shape, device)
            except InputError as error:  # the others would wait for this rank
                problem = error
        offset = 0 if past is None else past.length
        header = [*shape, segment_ids is not None, offset, problem is not None]
        headers = group.all_gather(torch.tensor(header, device=device, dtype=torch.int64)).tolist()
        if problem is not None:
            raise problem
        _check_headers(headers)
        one = cls(group, tuple(length for _, length, *_ in headers), offset)
        return one._with_documents(segment_ids, previous_ids, getattr(state, "document_start", None))

    def _with_documents(
        self, segment_ids: Tensor | None, previous_ids: Tensor | None, document_start: Tensor | None
    ) -> SequenceSlice:
        """The slice with its documents, from the row's `document_start` before the first rank."""
        if segment_ids is None:
            return replace(self, document_start=document_start)
        ids = segment_ids.to(torch.int64)
        documents = number_documents(ids)
        place = torch.arange(ids.shape[1], device=ids.device)
        first_of_last = torch.where(documents == documents[:, -1:], place, ids.shape[1]).amin(dim=1)
        inside = torch.where(documents[:, -1] > 0, first_of_last, -1)  # of the last boundary; -1 for none
        of_rank = [ids[:, 0], ids[:, -1], inside] + ([] if previous_ids is None else [previous_ids.to(torch.int64)])
        first, last, inside, *previous = self.group.all_gather(torch.stack(of_rank)).unbind(dim=1)
        opens = first != torch.cat((previous[0][-1:] if previous else first[:1], last[:-1]))
        rank = self.group.rank
        starts = torch.tensor([self.start_of(one) for one in range(self.group.size)], device=ids.device)[:, None]
        at_start = torch.where(opens, starts, 0)[: rank + 1]
        within = torch.where(inside >= 0, starts + inside, 0)[:rank]
        begun = torch.cat((at_start, within)).amax(dim=0)
        begun = begun if document_start is None else torch.maximum(begun, document_start)
        return replace(self, opens=opens, is_split=inside >= 0, document_start=begun)

    def start_of(self, rank: int) -> int:
        """The position of the first token of a rank's slice."""
        return self.offset + sum(self.lengths[:rank])

    @property
    def start(self) -> int:
        """The position of this slice's first token."""
        return self.start_of(self.group.rank)

    def state_before(self, state: AttentionState | None = None) -> AttentionState:
        """What to call an attention layer with in place of its state before this slice.

        The layer takes the past from the ranks before in exchange for what its own tokens leave. The state that it
        returns is that after this slice: the last rank's is that of the row.

            where = SequenceSlice.of(group, x.shape[:2], x.device, segment_ids)
            y = layer(x, where.state_before(), segment_ids)

        A key_mask is given to the layer on every rank or on none, and `segment_ids` are those of this slice.

        Args:
            state: the layer's state before the row's first token, the same on every rank.
        """
        return AttentionState(_SlicePast(self, state), document_start=self.document_start)

    def states_before(self, n_layers: int, state: ModelState | None = None) -> ModelState:
        """`state_before` for each layer of a model; `state` is the model's state before the row's first token."""
        return ModelState(self.state_before(None if state is None else state[layer]) for layer in range(n_layers))

    def is_open(self, n: int) -> Tensor | None:
        """(B, n) booleans: whether each of the n tokens before this slice belongs to its first token's document; None
        if all do."""
        if self.document_start is None:
            return None
        positions = torch.arange(self.start - n, self.start, device=self.document_start.device)
        # an initial state that is continued knows itself what of it is open
        continued = self.document_start <= self.offset
        if self.opens is not None:
            continued = continued & ~self.opens[0]
        began = self.document_start.masked_fill(continued, self.start - n)
        return positions >= began[:, None]

    def start_merge(
        self, own: State, rope: RotaryEmbedding | None, initial: State | None, causal: bool, first: State | None = None
    ) -> Callable[[], State | OpenEnds]:
        """The state before this slice, in exchange for the state `own` of the slice's own tokens.

        The exchange starts here, and a call of what is returned waits for it: one all-gather, whose size does not
        depend on the number of tokens. With r_j the tokens before rank j's slice and G_j its total log decay, on rank i

            kv = Σ_{j<i} e^{G_{j+1} + … + G_{i-1}} R_{r_j} kv_j

        and the other sums alike: `merge` of all at once. Every state is rotated once. Without causality the sum runs
        over all other ranks. In packed rows it runs over those ranks that hold tokens of this slice's first document,
        and over those that hold tokens of its last one: `first` is the state of the first, `own` of the last.
        """
        if causal or self.opens is None:
            gathered = self.group.start_all_gather(_packed(own))
            return lambda: self._merged(gathered(), own, rope, initial, causal)
        of_both = torch.cat((_packed(first), _packed(own)), dim=2)
        gathered = self.group.start_all_gather(of_both)
        return lambda: self._open_ends(*gathered().chunk(2, dim=3), own, rope, initial)

    def _open_ends(
        self, first: Tensor, last: Tensor, own: State, rope: RotaryEmbedding | None, initial: State | None
    ) -> OpenEnds:
        """The states of the other ranks' tokens, from the packed states (size, B, H, F) of all ranks' documents."""
        rank, ranks = self.group.rank, [*range(self.group.size)]
        continues, is_whole = ~self.opens, ~self.is_split  # (size, B): a slice's first document, one document alone
        none = torch.zeros_like(continues[0])
        reached, before = continues[rank], [none] * self.group.size
        for other in reversed(ranks[:rank]):
            before[other] = reached
            reached = reached & is_whole[other] & continues[other]
        since_initial = reached  # whether the first document continues the initial state
        reached, after = ~none, [none] * self.group.size
        for other in ranks[rank + 1 :]:
            reached = reached & continues[other]
            after[other] = reached
            reached = reached & is_whole[other]
        earlier = self._sums(last, own, rope, torch.stack(before))
        later = self._sums(first, own, rope, torch.stack(after))
        if initial is not None:
            past, counted = initial.tensors, since_initial.to(own.kv.dtype)
            earlier = {name: x + _over(counted, x) * past[name] for name, x in earlier.items()}
        whole = is_whole[rank].to(own.kv.dtype)
        of_first = {name: x + _over(whole, x) * later[name] for name, x in earlier.items()}
        of_last = {name: x + _over(whole, x) * earlier[name] for name, x in later.items()}
        return OpenEnds(State(**of_first, length=self.start), State(**of_last, length=self.start))

    def _sums(self, packed: Tensor, own: State, rope: RotaryEmbedding | None, counted: Tensor) -> dict[str, Tensor]:
        """The sum of the states of those ranks that are counted, (size, B) booleans, without the log decay."""
        sums = self._rotated(packed, own, rope, [*range(self.group.size)])
        del sums["log_decay"]
        return {name: (_over(counted.to(x.dtype), x) * x).sum(dim=0) for name, x in sums.items()}

    def _rotated(self, packed: Tensor, own: State, rope: RotaryEmbedding | None, ranks: list[int]) -> dict[str, Tensor]:
        """The tensors (N, B, H, ...) of these ranks' packed states, rotated by the positions of their slices."""
        sums = _unpacked(packed, own)
        rotation, interleaved = self._rotations(ranks, rope, own.kv.device)
        sums["kv"] = rotate_keys(sums["kv"], rotation, interleaved)
        if "k_rotated_sum" in sums:
            sums["k_rotated_sum"] = rotate_keys(sums["k_rotated_sum"][..., None], rotation, interleaved)[..., 0]
        return sums

    def _merged(
        self, gathered: Tensor, own: State, rope: RotaryEmbedding | None, initial: State | None, causal: bool
    ) -> State:
        """The state before this slice, from the packed states (size, B, H, F) of all ranks."""
        rank = self.group.rank
        others = [*range(rank)] if causal else [one for one in range(self.group.size) if one != rank]
        # of the first rank none, but a part of the graph: every rank takes part in the backward
        gathered = gathered[:rank] if causal else torch.cat((gathered[:rank], gathered[rank + 1 :]))
        sums = self._rotated(gathered, own, rope, others)
        decays = sums.pop("log_decay")
        following = self._decays(decays) if causal else own.kv.new_zeros(len(others) + 1, 1, 1)
        weights = following[1:].flip(0).cumsum(0).flip(0).exp().to(own.kv.dtype)
        merged = {name: (_over(weights, x) * x).sum(dim=0) for name, x in sums.items()}
        total = following.sum(dim=0).to(own.kv.dtype).expand_as(own.log_decay)
        if initial is not None:
            past = initial.tensors
            merged = {name: x + _over(total.exp(), x) * past[name] for name, x in merged.items()}
            total = total + initial.log_decay
        return State(**merged, length=self.start, log_decay=total)

    def _decays(self, log_decay: Tensor) -> Tensor:
        """(i + 1, B, H) float64: G of the ranks before, -inf where a slice begins a document, and 0 or -inf for the
        first token of this slice; from the ranks' (i, B, H)."""
        decays = F.pad(log_decay.to(torch.float64), (0, 0, 0, 0, 0, 1))
        if self.opens is not None:
            decays = decays.masked_fill(self.opens[: self.group.rank + 1, :, None], -math.inf)
        return decays

    def _rotations(
        self, ranks: list[int], rope: RotaryEmbedding | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """R of the first position of each rank's slice, (len(ranks), 1, H or 1, 1, R/2); and the rope's pairing."""
        if rope is None:
            return None, True
        positions = torch.tensor([self.start_of(one) for one in ranks], dtype=torch.int64, device=device)
        rotation = unit_rotations(positions, rope.frequencies(device))
        by_head = rotation if rotation.ndim == 3 else rotation[None]
        return rearrange(by_head, "h n r -> n 1 h 1 r"), rope.interleaved


def _packed(state: State) -> Tensor:
    """The state's tensors as one, (B, H, F)."""
    return torch.cat([x.reshape(*x.shape[:2], -1) for x in state.tensors.values()], dim=2)


def _unpacked(packed: Tensor, like: State) -> dict[str, Tensor]:
    """The tensors (N, B, H, ...) of N packed states of the same shapes as another, by name."""
    shapes = {name: x.shape[2:] for name, x in like.tensors.items()}
    parts = packed.split([shape.numel() for shape in shapes.values()], dim=-1)
    return {name: part.reshape(*part.shape[:-1], *shape) for (name, shape), part in zip(shapes.items(), parts)}


def _over(factor: Tensor, x: Tensor) -> Tensor:
    """A factor of the first dimensions of x, with ones for the others."""
    return factor.reshape(*factor.shape, *[1] * (x.ndim - factor.ndim))


def _check_headers(headers: list[list[int]]) -> None:
    """Raise InputError, the same on every rank, unless the slices are of the same rows."""
    if any(refused for *_, refused in headers):
        ranks = [rank for rank, (*_, refused) in enumerate(headers) if refused]
        raise InputError(f"rank {ranks[0]} refuses its slice: its own error says why.")
    rows, lengths, packed, offsets, _ = zip(*headers)
    if min(lengths) < 1:
        raise InputError(
            f"the ranks' slices have {list(lengths)} tokens: each needs one at least. Use a group of fewer ranks, or "
            "longer rows."
        )
    for name, values, fix in (
        ("rows", rows, "give every rank its slice of the same rows"),
        ("a length before the first token", offsets, "give every rank the same initial state"),
        ("segment_ids (1) or none (0)", packed, "give them to every rank or to none"),
    ):
        if len(set(values)) > 1:
            raise InputError(f"the ranks differ in {name}, {list(values)}: {fix}.")


@dataclass(frozen=True)
class _SlicePast(RemotePast):
    """The past of a layer before this slice."""

    where: SequenceSlice
    initial: AttentionState | None

    @property
    def length(self) -> int:
        return self.where.start

    def start_exchange(self, own, rope, causal, first=None):
        initial = None if self.initial is None else self.initial.past
        return self.where.start_merge(own, rope, initial, causal, first)

    def exchange_cache(self, k, v, key_mask, window):
        flat = [rearrange(x, "b h t d -> b t (h d)") for x in (k, v)]
        if key_mask is not None:
            flat.append(key_mask[..., None].to(k.dtype))
        arrived = self._tokens_before(torch.cat(flat, dim=-1), window - 1)
        heads, (k, v, *mask) = k.shape[1], arrived.split([x.shape[-1] for x in flat], dim=-1)
        k, v = (rearrange(x, "b t (h d) -> b h t d", h=heads) for x in (k, v))
        key_mask = mask[0][..., 0] > 0.5 if mask else None
        initial = None if self.initial is None else self.initial.past
        cache = extend_cache(k, v, window=window, key_mask=key_mask, cache=initial)
        visible, is_open = cache.visible, self.where.is_open(cache.k.shape[2])
        if is_open is not None:
            visible = is_open if visible is None else visible & is_open
        return replace(cache, visible=visible, length=self.length)

    def exchange_tail(self, last_inputs, n):
        tail = self._tokens_before(last_inputs, n)
        missing = n - tail.shape[1]
        if self.initial is None or self.initial.conv_tail is None:
            tail = F.pad(tail, (0, 0, missing, 0))
        else:
            tail = torch.cat((self.initial.conv_tail[:, n - missing :].to(tail.dtype), tail), dim=1)
        is_open = self.where.is_open(n)
        return tail if is_open is None else tail * is_open[..., None]

    def _tokens_before(self, x: Tensor, n: int) -> Tensor:
        """The n tokens before this slice (or fewer), (B, m, F), whatever their document; x is (B, T, F), or its last n
        tokens."""
        return self.where.group.tokens_before(x, n, self.where.lengths)
