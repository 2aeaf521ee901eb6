"""The exchange of states is under way while a layer computes what does not need the other ranks' tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from linrope import CosineAttention, LinearAttention
from linrope.distributed.group import SequenceGroup
from linrope.distributed.slices import SequenceSlice
from tests.distributed.ranks import run_on_ranks

LAYERS = {
    "plain": partial(LinearAttention, output_gate=True),
    "conv, forget gate": partial(LinearAttention, output_gate=True, short_conv=3, forget_gate=True, bias=True),
    "sees all": partial(LinearAttention, output_gate=True, causal=False),
    "cosine": partial(CosineAttention, output_gate=True),
}


class Waited:
    """A collective under way, which notes when it is waited for."""

    def __init__(self, work: dist.Work, note: Callable[[str], None]) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        self.note("wait")
        self.work.wait()


def noted(layer: nn.Module, length: int) -> tuple[list[str], list[str]]:
    """What happens in the forward and in the backward of a slice, in order."""
    events: list[str] = []
    products = {48: "queries, keys, values", 32: "keys, values", 16: "queries"}

    def started(real: Callable, *args, **options) -> dist.Work:
        if not options.get("async_op"):
            return real(*args, **options)
        events.append("start")
        return Waited(real(*args, **options), events.append)

    x = torch.randn(1, length, 16, requires_grad=True)
    where = SequenceSlice.of(SequenceGroup(), x.shape[:2], x.device)
    for module, name in ((layer.qkv, None), (layer.gate, "gate")):

        def note(module, args, output, name=name):
            if output.shape[1] == length:  # not the few tokens of a convolution's tail
                name = name or products[output.shape[-1]]
                events.append(name)
                output.register_hook(lambda grad: events.append(name))

        module.register_forward_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter"):
            patch.setattr(dist, name, partial(started, getattr(dist, name)))
        y = layer(x, where.state_before())
        forward = [*events]
        events.clear()
        y.sum().backward()
    return forward, events


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    functions = {
        f"{name}, {wrapped}": partial(_noted, make, wrapped)
        for name, make in LAYERS.items()
        for wrapped in (False, True)
    }
    return run_on_ranks(2, tmp_path_factory.mktemp("ranks"), functions)


def _noted(make: Callable[..., nn.Module], wrapped: bool) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    layer = make(16, 2)
    if wrapped:
        layer.qkv = Adapter(layer.qkv)
    return noted(layer, 7 + dist.get_rank())


class Adapter(nn.Module):
    """Stands around a linear layer as those of fine-tuning do."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("name", LAYERS)
def test_queries_and_gate_are_computed_while_states_are_exchanged(ranks, name):
    for one in ranks:
        forward, backward = one[f"{name}, False"]
        assert forward == ["keys, values", "start", "queries", "gate", "wait"]
        assert backward == ["start", "gate", "queries", "wait", "keys, values"]


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_is_called_once(ranks, name):
    for one in ranks:
        forward, backward = one[f"{name}, True"]
        assert forward == ["queries, keys, values", "start", "gate", "wait"]
        assert backward == ["start", "gate", "wait", "queries, keys, values"]
