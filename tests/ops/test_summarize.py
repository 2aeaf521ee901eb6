"""`summarize`: the final state of the definition, without queries and outputs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linrope import RotaryEmbedding, linear_attention, summarize
from linrope.ops import summarize as module
from tests.ops.cases import CAUSAL, Case, assert_agree, named, run

CASES = [case for case in CAUSAL if case.past is None]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 tokens: several, and a ragged end, at lengths that the definition can afford."""
    monkeypatch.setattr(module, "BLOCK", 64)


def state_only(q, k, v, rope, *, causal=True, eps=0.0, return_state, backend, **options):
    return q.sum() * 0, summarize(k, v, rope, **options)


def defined(q, k, v, rope, **options):
    return q.sum() * 0, linear_attention(q, k, v, rope, **options)[1]


@pytest.mark.parametrize("case", named(CASES))
def test_it_is_the_final_state_of_the_definition(case: Case):
    """Every option and ragged length; the state, and the gradients through it."""
    assert_agree(run(case, state_only), run(case, defined), 1e-10)


def test_float32_at_many_tokens(monkeypatch):
    """Sums of bfloat16 inputs are float32, and the angles of late tokens are exact."""
    monkeypatch.undo()
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 1, 50_000, 8, generator=draw).bfloat16().unbind()
    state, exact = summarize(k, v, RotaryEmbedding(8)), summarize(k.double(), v.double(), RotaryEmbedding(8))
    assert state.kv.dtype == torch.float32
    for found, expected in ((state.kv, exact.kv), (state.k_sum, exact.k_sum)):
        assert (found - expected).norm() / expected.norm() < 2e-6


def test_masked_nans_and_no_tokens():
    k, v = torch.randn(2, 1, 2, 70, 4).unbind()
    mask = torch.arange(70)[None] != 5
    expected = summarize(k, v, key_mask=mask)
    k[:, :, 5] = torch.nan
    assert torch.equal(summarize(k, v, key_mask=mask).kv, expected.kv)
    nothing = summarize(k[:, :, :0], v[:, :, :0], RotaryEmbedding(4), segment_ids=torch.zeros(1, 0, dtype=torch.int64))
    assert nothing.length == 0
    assert (nothing.kv == 0).all()


class _Written(TorchDispatchMode):
    """Counts the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.n += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_the_backward_is_linear_in_the_length():
    """The gradient of a slice of a tensor is as long as the tensor: one for each block would be quadratic."""

    def written(length: int) -> int:
        k, v = (torch.ones(1, 1, length, 4, requires_grad=True) for _ in range(2))
        kv = summarize(k, v, key_mask=torch.ones(1, length, dtype=torch.bool), log_decay=-k[..., 0].abs()).kv
        with _Written() as mode:
            kv.sum().backward()
        return mode.n

    assert written(64 * 64) < 17 * written(4 * 64)
