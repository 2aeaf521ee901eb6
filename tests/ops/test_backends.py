"""Every form of the operator agrees with the definition, outputs and gradients, in float64.

The tolerance of 1e-10 is what the sums of a few hundred float64 terms leave (1e-13), with room for the cancellation
in gradients and for angles at position 10⁹.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint

from linrope import RotaryEmbedding, State, linear_attention, merge
from linrope.ops.backends import BACKENDS, _together
from linrope.ops.call import NORMALIZE
from linrope.ops.cpu_kernel.library import why_none
from linrope.ops.torch_kernel import plan
from linrope.ops.torch_kernel.memory import Pool
from tests.conftest import covering
from tests.ops.cases import (
    CASES,
    CAUSAL,
    COVERING,
    assert_agree,
    by_name,
    in_pieces,
    make,
    named,
    on_tokens,
    run,
    smaller,
)

TOLERANCE = 1e-10
KERNELS = ["chunked", "triton", pytest.param("cpu", marks=pytest.mark.skipif(why_none() is not None, reason="none"))]
OF_FLOAT64 = [name for name in BACKENDS if name != "cpu"]  # test_cpu_kernel.py has its tests


@pytest.fixture(autouse=True)
def several_blocks_and_nan_in_what_is_not_written(monkeypatch):
    """Let blocks of two chunks, and a ragged end, appear at lengths the definition can afford; and an entry of
    `torch.empty` that is never written be NaN."""
    monkeypatch.setattr(plan, "MAX_BLOCK", 128)
    Pool.of_thread.__dict__.clear()  # workspace is kept from call to call
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", named(CASES))
def test_chunked_agrees_with_the_definition(case):
    assert_agree(run(case, backend="chunked"), run(case), TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"normalize": "rotary"}], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_a_loss_on_the_state_alone_divides_nothing(backend, options):
    """With ε = 0 a query that sees no key is 0 / 0; the definition's gradients are finite all the same."""
    torch.manual_seed(0)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 70, 8, dtype=dtype))
    key_mask = torch.zeros(1, 70, dtype=torch.bool)
    key_mask[:, 3:] = options.get("causal", True)

    def gradients(backend):
        call = {"eps": 0.0, "key_mask": key_mask, "return_state": True, **options}
        _, state = linear_attention(q, k, v, RotaryEmbedding(8), backend=backend, **call)
        loss = state.kv.square().sum() + state.k_sum.sum()
        return torch.autograd.grad(loss, (k, v), materialize_grads=True)

    expected, found = gradients("reference"), gradients(backend)
    assert all(x.isfinite().all() for x in expected)
    torch.testing.assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-3} if backend == "cpu" else {}))


@pytest.mark.parametrize("backend", KERNELS)
def test_tensors_that_begin_at_an_odd_float(backend):
    torch.manual_seed(0)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    q, k, v = torch.randn(3 * 1120 + 1, dtype=dtype)[1:].view(3, 1, 2, 70, 8)
    rope = RotaryEmbedding(8)
    o = linear_attention(q, k, v, rope, backend=backend)
    torch.testing.assert_close(o, linear_attention(q, k, v, rope, backend="reference"))


@pytest.mark.parametrize("case", named(CASES, COVERING))
def test_triton_agrees_with_the_definition(case):
    case = smaller(case)
    assert_agree(run(case, backend="triton"), run(case), TOLERANCE)


SPLIT = {*COVERING, "T=130", "odd head", "masked", "continued", "everything at once, unpacked", "phi=callable"}
PIECES = {
    "token by token": in_pieces(*range(1, 1000)),
    "ragged pieces": in_pieces(1, 64, 70, 200),
    "long prompt, then tokens": in_pieces(*range(-5, 0)),
}


@pytest.mark.parametrize("case", named([case for case in CAUSAL if not case.packed and case.length < 1000], SPLIT))
@pytest.mark.parametrize(
    ("backend", "pieces"), [("reference", "ragged pieces"), *(("chunked", pieces) for pieces in PIECES)]
)
def test_any_split_gives_the_whole(case, backend, pieces):
    assert_agree(run(case, PIECES[pieces], backend), run(case), TOLERANCE)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_a_base_for_each_head_is_each_head_by_itself(normalize):
    torch.manual_seed(0)
    bases, qkv = (100.0, None, 7.0), torch.randn(3, 2, 3, 130, 6, dtype=torch.float64)
    options = {"normalize": normalize, "return_state": True, "backend": "reference"}
    o, final = in_pieces(100)(*qkv, RotaryEmbedding(6, bases), **options)
    for h, base in enumerate(bases):
        rope = None if base is None else RotaryEmbedding(6, base)
        found, alone = in_pieces(100)(*qkv[:, :, h : h + 1], rope, **options)
        torch.testing.assert_close(o[:, h], found[:, 0], rtol=1e-10, atol=1e-12)
        for name, x in alone.tensors.items():
            torch.testing.assert_close(final.tensors[name][:, h], x[:, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", OF_FLOAT64)
def test_a_document_boundary_is_a_fresh_start(backend):
    """A packed row equals its documents run apart; its final state is the last document's, and forgets all before."""
    case = by_name("everything at once", backend)
    _, call = make(case)
    q, k, v, rope = call.pop("args")
    past, mask, decay = call.pop("state"), call.pop("key_mask"), call.pop("log_decay")
    boundaries = [0, 10, 64, 140, q.shape[2]]
    ids = torch.zeros(case.batch, q.shape[2], dtype=torch.int64)
    for start in boundaries[1:-1]:
        ids[:, start:] += 1
    options = {"log_decay": decay, "key_mask": mask, "return_state": True}
    whole, final = linear_attention(q, k, v, rope, segment_ids=ids, state=past, backend=backend, **options)
    for start, stop in itertools.pairwise(boundaries):
        tokens = slice(start, stop)
        apart, alone = on_tokens(tokens, q, k, v, rope, state=past if start == 0 else None, **options)
        torch.testing.assert_close(whole[:, :, tokens], apart, rtol=1e-10, atol=1e-12)
    assert (final.log_decay == -torch.inf).all()
    assert final.length == past.length + q.shape[2]
    torch.testing.assert_close(final.k_sum, alone.k_sum, rtol=1e-10, atol=1e-12)
    nothing = State.zeros(case.batch, case.heads, q.shape[3], v.shape[3], dtype=torch.float64)
    shifted = merge(replace(nothing, length=past.length + boundaries[-2]), alone, rope)
    torch.testing.assert_close(final.kv, shifted.kv, rtol=1e-10, atol=1e-12)


LATER = ("T=65", "everything at once", "normalize=none", "normalize=rotary", "phi=callable")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *itertools.product(("reference", "chunked"), LATER),
        ("triton", LATER[0]),
        *(pytest.param("triton", name, marks=pytest.mark.exhaustive) for name in LATER[1:]),
    ],
)
def test_later_tokens_change_nothing_earlier(backend, name):
    """Bit for bit: whatever stands at position t and after it, outputs before t are the same."""
    _, call = make(by_name(name, backend))
    q, k, v, rope = call.pop("args")
    before = linear_attention(q, k, v, rope, backend=backend, **call)
    for t in (30, 64) if backend == "triton" else (1, 30, 63, 64):
        changed = [x.detach().clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t:] = torch.randn_like(x[:, :, t:]) * 100
        other = dict(call)
        if "log_decay" in call:
            other["log_decay"] = call["log_decay"].detach().clone()
            other["log_decay"][:, :, t:] *= 50
        after = linear_attention(*changed, rope, backend=backend, **other)
        assert torch.equal(before[:, :, :t], after[:, :, :t])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", OF_FLOAT64)
def test_masked_keys_change_nothing(backend, causal):
    """Whatever a masked key holds, NaN and infinity included: outputs, state and gradients are those without it."""
    torch.manual_seed(0)
    length, fills = (70, [torch.nan]) if backend == "triton" else (150, [torch.nan, torch.inf, 1e30])
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(1, length) > 0.3

    def outputs_and_gradients(fill):
        a, b, c = q.clone().requires_grad_(), k.clone(), v.clone()
        b[:, :, ~mask[0]], c[:, :, ~mask[0]] = fill, fill
        b.requires_grad_(), c.requires_grad_()
        o, state = linear_attention(
            a, b, c, key_mask=mask, causal=causal, return_state=True, backend=backend, feature_map="exp"
        )
        return [o, state.kv, state.k_sum, *torch.autograd.grad(o.sum() + state.kv.sum(), [a, b, c])]

    plain = outputs_and_gradients(0.0)
    for fill in fills:
        for actual, expected in zip(outputs_and_gradients(fill), plain):
            assert torch.equal(actual, expected)
    if not causal:
        kept = [x[:, :, mask[0]] for x in (k, v)]
        expected = linear_attention(q, *kept, causal=False, backend="reference", feature_map="exp")
        torch.testing.assert_close(plain[0], expected, rtol=1e-10, atol=1e-12)
    assert all((gradient[:, :, ~mask[0]] == 0).all() for gradient in plain[4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_reaches_a_learned_feature_map_and_may_change_before_the_backward(backend):
    """φ's weights get no NaN from a masked key, and the mask that counts is that of the call."""
    phi = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softplus())
    q, k, v = torch.randn(3, 1, 1, 70, 4).unbind()
    mask = torch.arange(70)[None] != 5
    k[:, :, ~mask[0]] = float("nan")

    def gradients(mask, changed=None):
        o = linear_attention(q, k, v, key_mask=mask, feature_map=phi, backend=backend)
        if changed:
            mask.fill_(True)
        return torch.autograd.grad(o.sum(), phi.parameters())

    expected = gradients(mask)
    assert all(gradient.isfinite().all() for gradient in expected)
    assert all(map(torch.equal, gradients(mask, changed=True), expected))


@pytest.mark.parametrize(
    "name",
    covering(["everything at once, unpacked", "normalize=rotary, continued"], ["everything at once, unpacked"]),
)
def test_gradcheck(name):
    """Against finite differences, every differentiable input at once, θ and the incoming state among them."""
    case = by_name(name)
    inputs, call = make(replace(case, length=5, head_dim=4, value_dim=2, batch=1, heads=2))
    rope, length = call["args"][3], call["state"].length
    options = {name: value for name, value in call.items() if name not in ("args", "state", "log_decay")}

    def outputs(*tensors):
        given = dict(zip(inputs, tensors))
        rope._parameters["theta"] = given["theta"]  # gradcheck hands in copies
        past = {name.removeprefix("past "): tensor for name, tensor in given.items() if name.startswith("past ")}
        call = options | {"log_decay": given["log_decay"], "state": State(length=length, **past)}
        o, final = linear_attention(*tensors[:3], rope, return_state=True, backend="chunked", **call)
        return o, final.kv, final.k_sum, final.log_decay

    assert torch.autograd.gradcheck(outputs, tuple(inputs.values()))


def test_short_documents_are_put_together():
    """Up to 64 tokens each, and 512 with those that fill them up; one with a state to take or to leave is alone."""
    assert _together([3, 100, 25, 1, 64, 65, 1, 1], False, False) == [[3], [100], [25, 1, 64], [65], [1, 1]]
    assert _together([60] * 10, False, False) == [[60] * 8, [60] * 2]
    assert _together([2, 3, 4, 5], True, False) == [[2], [3, 4, 5]]
    assert _together([2, 3, 4, 5], False, True) == [[2, 3, 4], [5]]
    assert _together([2, 3], True, True) == [[2], [3]]
    assert _together([2], True, True) == [[2]]


@pytest.mark.parametrize("documents", [[5, 7, 9], [100, 20, 50, 130]])
def test_documents_of_all_keys_do_not_touch_each_other(documents):
    """Not even by 0 times infinity, and not in the gradients where all keys of the last one are masked (0 / 0)."""
    length, first = sum(documents), documents[0]
    q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    mask = ids < len(documents) - 1
    with torch.no_grad():
        v[:, :, first : first + 2] = math.inf
        o = linear_attention(q, k, v, RotaryEmbedding(4), causal=False, segment_ids=ids, key_mask=mask, eps=0.0)
        assert o[:, :, :first].isfinite().all()
        assert not o[:, :, first : first + 2].isfinite().any()
        v[:, :, first : first + 2] = 1.0
    o = linear_attention(q, k, v, RotaryEmbedding(4), causal=False, segment_ids=ids, key_mask=mask, eps=0.0)
    for gradient in torch.autograd.grad(o[:, :, :first].sum(), (q, k, v)):
        assert gradient[:, :, :first].isfinite().all()
        assert gradient[:, :, :first].any()
        assert not gradient[:, :, first : length - documents[-1]].any()


def test_a_second_derivative_is_refused_clearly():
    q, k, v = (torch.randn(1, 1, 70, 4, requires_grad=True) for _ in range(3))
    o = linear_attention(q, k, v, backend="chunked")
    with pytest.raises(ValueError, match=r"create_graph=True.*backend='reference'"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
    (first,) = torch.autograd.grad(linear_attention(q, k, v, backend="reference").sum(), q, create_graph=True)
    assert torch.autograd.grad(first.sum(), k)[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_output_and_leave_the_state(backend):
    q, k, v = (torch.randn(2, 3, 0, size) for size in (4, 4, 5))
    past = State(torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4), 9, -torch.rand(2, 3))
    options = {"log_decay": torch.zeros(2, 3, 0), "segment_ids": torch.zeros(2, 0, dtype=torch.int64)}
    o, state = linear_attention(q, k, v, state=past, return_state=True, backend=backend, **options)
    assert o.shape == (2, 3, 0, 5)
    assert state.length == 9
    assert all(map(torch.equal, state.tensors.values(), past.tensors.values()))


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_gives_an_empty_output(backend, causal, normalize):
    q, ids = torch.randn(0, 2, 70, 4, requires_grad=True), torch.zeros(0, 70, dtype=torch.int64)
    o = linear_attention(q, q, q, causal=causal, normalize=normalize, segment_ids=ids, backend=backend)
    assert o.shape == (0, 2, 70, 4)
    o.sum().backward()


@pytest.mark.parametrize("strongest", [-1e3, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", OF_FLOAT64)
def test_forgetting_everything_at_once_is_a_fresh_start(backend, strongest):
    """However strong one decay, those after it keep their digits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 4, dtype=torch.float64) for _ in range(3))
    log_decay = torch.full((1, 2, 100), -0.5, dtype=torch.float64)
    log_decay[:, :, 70] = strongest
    o = linear_attention(q, k, v, log_decay=log_decay, backend=backend)
    alone = on_tokens(slice(70, 100), q, k, v, None, log_decay=log_decay.clamp(min=-1), backend=backend)
    torch.testing.assert_close(o[:, :, 70:], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decay_that_is_no_number_gives_none(backend):
    """As NaN in q, k and v: a diverged gate is to be seen in the loss, in all that comes after it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 4) for _ in range(3))
    log_decay = torch.full((1, 2, 100), -0.5)
    log_decay[:, 0, 70] = torch.nan
    o = linear_attention(q, k, v, log_decay=log_decay, backend=backend)
    assert o[:, 0, 70:].isnan().all()
    assert o[:, 1].isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    tensors = [torch.randn(1, 2, 150, 4, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(linear_attention(*tensors).square().sum(), tensors)
    o = torch.utils.checkpoint.checkpoint(linear_attention, *tensors, use_reentrant=reentrant)
    o.square().sum().backward()
    for tensor, gradient in zip(tensors, expected):
        assert torch.equal(tensor.grad, gradient)


def test_frozen_inputs_change_nothing_for_the_others():
    case = by_name("everything at once")
    _, call = make(case)
    q, k, v, rope = call.pop("args")
    o = linear_attention(q, k, v, rope, **call)
    frozen = linear_attention(q.detach(), k, v.detach(), rope, **call)
    assert torch.equal(torch.autograd.grad(frozen.sum(), k)[0], torch.autograd.grad(o.sum(), k)[0])
    with torch.inference_mode():
        assert torch.equal(linear_attention(q, k, v, rope, **call), o)


@pytest.mark.parametrize("backend", covering(["chunked", "triton"], ["chunked"]))
def test_strided_inputs_give_the_same(backend):
    """Slices, transposes and expanded tensors are read as they are."""
    torch.manual_seed(0)
    q, k, v = (x.transpose(1, 2) for x in torch.randn(2, 70, 3, 3, 8).unbind(2))
    mask = (torch.rand(70, 2) > 0.4).T

    def attend(q, k, v, mask):
        return linear_attention(q, k, v, key_mask=mask, backend=backend)

    for values in (v, torch.randn(1, 1, 70, 8).expand(2, 3, 70, 8)):
        given = q, k, values, mask
        assert torch.equal(attend(*given), attend(*(x.contiguous() for x in given)))


@pytest.mark.parametrize("backend", OF_FLOAT64)
def test_signed_rotation_by_its_formula(backend):
    """num_i = Σ ((R q)ᵀ(R k) + φ(q')ᵀφ(k')) v, den_i = Σ φ(q')ᵀφ(k')."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 9, 6, dtype=torch.float64).unbind()
    rotated = [RotaryEmbedding(4).rotate(x[..., :4]) for x in (q, k)]
    mapped = [torch.nn.functional.elu(x[..., 4:]) + 1 for x in (q, k)]
    signed, plain = ((x @ y.mT).tril() for x, y in (rotated, mapped))
    expected = (signed + plain) @ v / (plain.sum(dim=-1, keepdim=True) + 1e-6)
    o = linear_attention(q, k, v, RotaryEmbedding(6, rotary_dim=4, signed=True), backend=backend)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
