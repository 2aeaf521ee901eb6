"""`SequenceGroup`: the devices that share one sequence, and the differentiable collectives between them.

The loss is the sum of what the ranks compute, each from its own slice. A collective's backward adds the gradients of
all ranks, so every rank has to call `backward`, also one whose slice has no target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from linrope.errors import InputError


class SequenceGroup:
    """The ranks of a process group, in the order of their slices of the sequence.

    Args:
        group: a process group, a `DeviceMesh` of one dimension (`mesh["sequence"]`), or None for all processes.

    Attributes:
        rank, size: this process's place in the group, and the number of processes.

    Raises:
        InputError: torch.distributed is not initialised, a mesh of several dimensions, or a process outside the group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError("torch.distributed is not initialised: start with torchrun and call init_process_group.")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                names = group.mesh_dim_names
                raise InputError(f"group is a mesh of {group.ndim} dimensions {names}: pass one of them, mesh[NAME].")
            group = group.get_group()
        self.process_group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise InputError("this process is no member of the group: call on its members only.")

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.rank == self.size - 1

    def all_gather(self, x: Tensor) -> Tensor:
        """x (...) of every rank, of one shape, as (size, ...) on each."""
        return self.start_all_gather(x)()

    def start_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """`all_gather` in two steps: it starts here, and a call of what is returned, once, waits for the result.

        What is computed between the two runs at the same time as the gather. In the backward the reduce-scatter of the
        gradients starts where the forward waited, and is waited for where the forward started: what was computed
        between the two has its backward meanwhile.
        """
        gather = _Gather(self)
        x = _StartGather.apply(x, gather)
        return lambda: _WaitForGather.apply(x, gather)

    def tokens_before(self, x: Tensor, n: int, lengths: tuple[int, ...]) -> Tensor:
        """The n tokens before this rank's slice, or all if there are fewer.

        Each rank sends only to those in whose reach its last tokens are: the next one, and further ones where slices
        are shorter than n.

        Args:
            x: (B, T, F), this rank's slice, or its last min(n, T) tokens.
            n: number of tokens.
            lengths: T of each rank.

        Returns:
            (B, m, F), m = min(n, the tokens before the slice).
        """
        starts = [sum(lengths[:rank]) for rank in range(self.size + 1)]

        def reach(source: int, target: int) -> range:
            """The tokens of the row that one rank sends to another."""
            return range(max(starts[source], starts[target] - n), min(starts[source + 1], starts[target]))

        first = starts[self.rank + 1] - x.shape[1]
        tokens = rearrange(x, "b t f -> t b f")
        sent = [reach(self.rank, target) for target in range(self.size)]
        received = [len(reach(source, self.rank)) for source in range(self.size)]
        parts = [tokens[one.start - first : one.stop - first] for one in sent if len(one)]
        buffer = torch.cat(parts) if parts else tokens[:0]
        arrived = _Exchange.apply(buffer, [len(one) for one in sent], received, self)
        return rearrange(arrived, "t b f -> b t f")

    def from_last(self, x: Tensor, n: int) -> Tensor:
        """The last rank's x (n,), on each rank. The others' x is not read: it has the dtype, and joins the graph."""
        return _FromLast.apply(x, n, self)

    def object_from_last(self, value: Any) -> Any:
        """The last rank's value, on each rank: plain values, which are pickled. The host waits."""
        values = [value]
        dist.broadcast_object_list(values, group=self.process_group, group_src=self.size - 1)
        return values[0]


def require_group(group: Any) -> None:
    """Raise InputError for a process group or a mesh in place of a `SequenceGroup`."""
    if not isinstance(group, SequenceGroup):
        raise InputError(f"group is a {type(group).__name__}: pass SequenceGroup(group).")


class _Gather:
    """The collective under way between the two functions of an all-gather, and what it reads and writes."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None
        self.buffers: tuple[Tensor, ...] = ()

    def wait(self) -> Tensor:
        """The tensor that the collective has written."""
        self.work.wait()
        written = self.buffers[0]
        self.work, self.buffers = None, ()
        return written


class _StartGather(torch.autograd.Function):
    """x as it is. The graph leads from `_WaitForGather` through it to x."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: _Gather) -> Tensor:
        ctx.gather, sent = gather, x.contiguous()
        gathered = x.new_empty(gather.group.size, *x.shape)
        gather.buffers = gathered, sent
        gather.work = dist.all_gather(list(gathered), sent, group=gather.group.process_group, async_op=True)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gather.wait(), None


class _WaitForGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gather: _Gather) -> Tensor:
        ctx.gather = gather
        return gather.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        gather, sent = ctx.gather, grad.contiguous()
        summed = grad.new_zeros(grad.shape[1:])  # finite also before it is written: detect_anomaly looks at it
        gather.buffers = summed, sent
        gather.work = dist.reduce_scatter(summed, list(sent), group=gather.group.process_group, async_op=True)
        return summed, None  # not read before the backward of `_StartGather`, which waits


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` of consecutive entries: `sent[r]` of them to rank r, `received[r]` from it."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], group: SequenceGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: SequenceGroup) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group.process_group)
    return arrived


class _FromLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, n: int, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        sent = x.clone() if group.is_last else x.new_empty(n)
        dist.broadcast(sent, group=group.process_group, group_src=group.size - 1)
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        group, summed = ctx.group, grad.clone(memory_format=torch.contiguous_format)
        dist.reduce(summed, group=group.process_group, group_dst=group.size - 1)
        return summed if group.is_last else grad.new_zeros(ctx.shape), None, None
