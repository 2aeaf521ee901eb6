"""The kernel as an operator of PyTorch: compiled, exported, checked, and clear about what it does not do."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from linrope import (
    InputError,
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    RotaryEmbedding,
    State,
    linear_attention,
    merge,
    summarize,
)
from linrope.ops.torch_kernel import plan
from linrope.ops.torch_kernel.memory import Pool
from linrope.ops.triton_kernel import plan as triton_plan
from tests.conftest import covering
from tests.ops.cases import assert_agree, by_name, run

FORWARD = torch.ops.linrope.linear_attention.default


def arguments(
    dtype=torch.float32, *, width=5, plain=True, decay=False, mask=False, packed=False, causal=True, base=1e4, signed=0,
    backend="chunked",
):  # fmt: skip
    """What the operator takes, differentiable wherever it differentiates."""
    shape = (1, 2, 70) if backend == "triton" else (2, 3, 130)
    batch, _, length = shape
    q, k, v = (torch.randn(*shape, size, dtype=dtype, requires_grad=True) for size in (6, 6, width))
    log_decay = (-torch.rand(shape)).requires_grad_() if decay else None
    theta = RotaryEmbedding(6, base, rotary_dim=signed or None).frequencies().requires_grad_()
    past = torch.randn(*shape[:2], width, 6).mT.requires_grad_(), torch.rand(*shape[:2], 6, requires_grad=True)
    key_mask = torch.rand(batch, length) > 0.3 if mask else None
    documents = (torch.arange(length) // 50).expand(batch, -1).contiguous() if packed else None
    options = 7, "elu1", "plain" if plain else "none", 1e-6, True, causal, signed, backend
    return *past, q, k, v, log_decay, theta, key_mask, documents, *options


OPTIONS = [
    {"signed": 4, "decay": True, "plain": False}, {"decay": True, "backend": "triton"},
    {"mask": True, "decay": True, "packed": True, "backend": "cpu"},
]  # fmt: skip
EXHAUSTIVE = [
    {"mask": True, "decay": True, "packed": True}, {}, {"plain": False, "decay": True},
    {"causal": False, "mask": True}, {"dtype": torch.bfloat16}, {"width": 1},
    {"base": [100.0, None, 7.0]}, {"base": [100.0, None, 7.0], "causal": False}, {"signed": 4, "decay": True},
    {"dtype": torch.bfloat16, "width": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [*OPTIONS, *(pytest.param(options, marks=pytest.mark.exhaustive) for options in EXHAUSTIVE)], ids=str
)
def test_opcheck(options):
    """PyTorch's own checks: schema, autograd registration, shapes without data, and tracing with dynamic sizes."""
    checks = {}
    if options.get("backend") == "triton":  # tracing in the interpreter: test_compiled_in_one_graph
        checks["test_utils"] = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(FORWARD, arguments(**options), **checks)


COMPILED = (
    "everything at once", "noncausal masked", "a base for each head, continued, one token",
    "normalize=rotary, continued", "T=321", "continued, one token", "a base for each head",
    "noncausal a base for each head",
)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("chunked", name) for name in COMPILED[:2]),
        *(pytest.param("chunked", name, marks=pytest.mark.exhaustive) for name in COMPILED[2:]),
        *(pytest.param("triton", name, marks=pytest.mark.exhaustive) for name in ("continued, one token", "T=65")),
    ],
)
def test_compiled_in_one_graph(backend, name):
    """No graph break, and the same numbers: outputs, final state and gradients."""
    torch._dynamo.reset()
    case = by_name(name, backend)
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    assert_agree(run(case, compiled, backend), run(case, backend=backend), 1e-12)


@pytest.mark.parametrize("length", [1, 130])
def test_the_compiled_kernel_in_one_graph(length):
    """Chosen while the graph is traced, for training and for a decoding step."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=length > 1) for _ in range(3))
    rope, compiled = RotaryEmbedding(8), torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    o, expected = compiled(q, k, v, rope), linear_attention(q, k, v, rope, backend="cpu")
    assert torch.equal(o, expected)
    if length > 1:
        found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected))
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("backend", "causal", "length"), [("auto", False, 5), ("auto", True, 0), ("reference", True, 5)]
)
def test_the_definition_in_one_graph(backend, causal, length):
    """Which short rows take without causality, and rows without tokens."""
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 2, 2, length, 8).requires_grad_().unbind()
    options = {"rope": RotaryEmbedding(8), "causal": causal, "backend": backend}
    o = torch.compile(linear_attention, backend="eager", fullgraph=True)(q, k, v, **options)
    expected = linear_attention(q, k, v, **options)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)))


def test_a_whole_model_compiles_in_one_graph():
    torch._dynamo.reset()
    model = LanguageModel(LanguageModelConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2))
    tokens = torch.randint(50, (2, 70))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-5)  # float32, other fusions
    compiled(tokens).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


EXPORTED = [("auto", True), ("chunked", True), ("triton", True), ("auto", False)]


@pytest.mark.parametrize(("backend", "causal"), covering(EXPORTED, [("auto", True), ("auto", False)]))
def test_exported_with_a_length_left_open(backend, causal, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is there for Linux only")
    monkeypatch.setattr(triton_plan, "PROGRAMS", 1)  # stretches of three sizes, by the length

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = RotaryEmbedding(8)

        def forward(self, q, k, v):
            return linear_attention(q, k, v, self.rope, backend=backend, causal=causal)

    length = torch.export.Dim("length", min=2, max=10_000)
    example = tuple(torch.randn(1, 1, 100, 8) for _ in range(3))
    program = torch.export.export(Attention(), example, dynamic_shapes=[{2: length}] * 3)
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert [node.target for part in parts for node in part.graph.nodes].count(FORWARD) == 1
    for size in (2, 5, 100, 777, 1100):  # in eager mode the definition takes the shortest without causality
        tensors = [torch.randn(1, 1, size, 8) for _ in range(3)]
        torch.testing.assert_close(program.module()(*tensors), Attention()(*tensors))


def test_documents_that_see_all_their_keys_are_mapped_too():
    x, ids = torch.randn(3, 1, 2, 70, 8), torch.arange(70).expand(3, 1, 70) // 40

    def mapped(backend):
        options = {"causal": False, "backend": backend}
        return torch.vmap(lambda x, ids: linear_attention(x, x, x, segment_ids=ids, **options))(x, ids)

    sys.modules["linrope.ops.linear_attention"]._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="takes backend 'reference' in transforms"):
        found = mapped("auto")
    torch.testing.assert_close(found, mapped("reference"))
    torch.testing.assert_close(found[1], linear_attention(*[x[1]] * 3, causal=False, segment_ids=ids[1]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["key_mask", "segment_ids"])
def test_masks_and_documents_alone_are_mapped(name, causal):
    x, one = torch.randn(1, 2, 70, 8), torch.arange(70) // torch.tensor([[[30]], [[40]]]) == 0
    given = one if name == "key_mask" else one.long()

    def attend(value, backend="auto"):
        return linear_attention(x, x, x, causal=causal, backend=backend, **{name: value})

    sys.modules["linrope.ops.linear_attention"]._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="takes backend 'reference' in transforms"):
        found = torch.vmap(attend)(given)
    torch.testing.assert_close(found, torch.stack([attend(value) for value in given]))
    with pytest.raises(InputError, match="no transforms"):
        torch.vmap(lambda value: attend(value, "chunked"))(given)


def gradient(attend, x):
    return torch.func.grad(lambda x: attend(x).sum())(x)


@pytest.mark.parametrize("transformed", [
    lambda attend, x: torch.vmap(attend)(x[None]), lambda attend, x: torch.func.jvp(attend, (x,), (x,)), gradient,
], ids=["vmap", "jvp", "grad"])  # fmt: skip
def test_transforms_are_refused_with_the_fix(transformed):
    """Without a rule for it an operator's tangent would be 0, silently."""
    x = torch.randn(1, 2, 70, 8)
    with pytest.raises(InputError, match=r"'chunked' supports no transforms.*backend='auto' or 'reference'.*larger B"):
        transformed(lambda x: linear_attention(x, x, x, backend="chunked"), x)
    with pytest.raises(InputError, match=r"'cpu' supports no transforms"):
        transformed(lambda x: linear_attention(x, x, x, backend="cpu"), x)
    expected = transformed(lambda x: linear_attention(x, x, x, backend="reference"), x)
    sys.modules["linrope.ops.linear_attention"]._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="takes backend 'reference' in transforms"):
        found = transformed(lambda x: linear_attention(x, x, x), x)
    torch.testing.assert_close(found, expected)


def test_a_transform_leaves_nothing_behind():
    """Frequencies are kept from call to call: those made in a transform are of no use after it."""
    rope, x = RotaryEmbedding(8, base=321.0), torch.randn(1, 2, 70, 8)
    gradient(lambda x: linear_attention(x, x, x, rope, backend="reference"), x)
    with pytest.raises(InputError, match="no transforms"):
        gradient(lambda x: linear_attention(x, x, x, RotaryEmbedding(8, base=123.0), backend="chunked"), x)
    for base in (321.0, 123.0):
        again = RotaryEmbedding(8, base=base)
        expected = linear_attention(x, x, x, again, backend="reference")
        torch.testing.assert_close(linear_attention(x, x, x, again), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_each_row_of_a_gated_layer_by_vmap():
    """The check of the decays reads values, which a tensor of vmap does not give away."""
    layer = LinearAttention(16, 2, forget_gate=True, short_conv=4, backend="reference").double()
    x, weights = torch.randn(3, 20, 16, dtype=torch.float64), dict(layer.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(layer, weights, (row[None],)).square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for number, row in enumerate(x):
        expected = torch.autograd.grad(loss(weights, row), list(weights.values()))
        torch.testing.assert_close([gradient[number] for gradient in found.values()], list(expected))
    with pytest.raises(InputError, match=r"log_decay lies in .*: every entry must be finite and at most 0"):
        torch.func.grad(lambda q: linear_attention(q, q, q, log_decay=1 + 0 * q[..., 0], backend="reference").sum())(
            torch.randn(1, 2, 5, 4)
        )


def test_tensors_without_values_pass_the_check_of_decays():
    layer, x = LinearAttention(16, 2, forget_gate=True), torch.randn(1, 20, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.randn(1, 20, 16)).shape == x.shape

    def attend(q, log_decay):
        return linear_attention(q, q, q, log_decay=log_decay, backend="reference")

    inputs = torch.randn(1, 2, 9, 4), -torch.rand(1, 2, 9)
    for mode in ("real", "fake", "symbolic"):
        torch.testing.assert_close(make_fx(attend, tracing_mode=mode)(*inputs)(*inputs), attend(*inputs))


def test_functional_gradients_of_the_definition_are_those_of_autograd():
    x = torch.randn(1, 2, 70, 8, requires_grad=True)
    found = gradient(lambda x: linear_attention(x, x, x, backend="reference"), x.detach())
    (expected,) = torch.autograd.grad(linear_attention(x, x, x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, other orders of summation


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [1, 5])
def test_gradients_that_arrive_are_left_as_they_are(width, causal):
    """The gradient of the state may be the caller's own tensor, in any strides."""
    q, k, v = (torch.randn(2, 3, 130, size, requires_grad=True) for size in (4, 4, width))
    _, state = linear_attention(q, k, v, causal=causal, return_state=True)
    grad_kv, grad_k_sum = torch.randn(2, 3, width, 4).mT, torch.randn(3, 2, 4).transpose(0, 1)
    before = grad_kv.clone(), grad_k_sum.clone()
    torch.autograd.grad((state.kv, state.k_sum), (q, k, v), (grad_kv, grad_k_sum), allow_unused=True)
    assert torch.equal(grad_kv, before[0])
    assert torch.equal(grad_k_sum, before[1])


@pytest.mark.parametrize("name", [
    "everything at once", "noncausal masked", "a base for each head, everything", "noncausal a base for each head",
])  # fmt: skip
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (2, 3)])
def test_groups_of_rows_give_what_all_rows_give(monkeypatch, rows, name):
    """Many heads are worked through in groups: any grouping is the same sum."""
    case = by_name(name)
    expected = run(case)
    monkeypatch.setattr(plan, "MAX_BLOCK", 128)
    monkeypatch.setattr(plan.Partition, "_rows", staticmethod(lambda *sizes: rows))
    assert_agree(run(case, backend="chunked"), expected, 1e-10)


BLOCKS = {
    (1, 8, 16_384, 64): (1, 8, 512), (1, 1, 16_384, 64): (1, 1, 2048), (64, 8, 256, 64): (2, 8, 512),
    (1, 12, 16_384, 64): (1, 6, 640), (4, 4, 16_384, 256): (1, 2, 512), (1, 2, 100_000, 8192): (1, 1, 64),
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "block"), BLOCKS.items())
def test_blocks_fit_the_cache_whatever_the_sizes(sizes, block):
    chosen = plan.Partition.of(*sizes)
    assert (chosen.batch, chosen.heads, chosen.tokens) == block
    tokens = min(chosen.tokens, sizes[2])
    assert chosen.batch * chosen.heads * tokens * sizes[-1] <= max(plan.BLOCK_ELEMENTS, 64 * sizes[-1])


def test_workspace_made_in_inference_serves_training():
    tensors = [torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3)]
    Pool.of_thread.__dict__.clear()
    with torch.inference_mode():
        inferred = linear_attention(*tensors)
    o = linear_attention(*tensors)
    assert torch.equal(o, inferred)
    o.sum().backward()


def test_calls_share_nothing_but_workspace():
    """Two calls between forward and backward, of other shapes and dtypes: neither disturbs the other."""
    first = [torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3)]
    second = [torch.randn(2, 1, 333, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(linear_attention(*first).sum(), first)
    o = linear_attention(*first)
    kept = o.clone()
    linear_attention(*second).sum().backward()
    assert torch.equal(o, kept)
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), first), expected))


@pytest.mark.parametrize("backend", [pytest.param("chunked", marks=pytest.mark.exhaustive), "auto"])
def test_a_call_in_a_signal_handler_leaves_the_interrupted_call_alone(backend):
    """Signals arrive between any two functions: here a profiler makes the other call at some of them."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3)]
    others = [torch.randn(1, 2, 200, 16) for _ in range(3)]
    rope = RotaryEmbedding(16)

    def results():
        o = linear_attention(*inputs, rope, backend=backend)
        return o, *torch.autograd.grad(o.square().sum(), inputs)

    def interrupted(at):
        n_events = 0

        def profile(frame, event, arg):
            nonlocal n_events
            n_events += 1
            if n_events == at:
                sys.setprofile(None)
                linear_attention(*others, rope, backend=backend)

        Pool.of_thread.__dict__.clear()
        sys.setprofile(profile)
        try:
            return results(), n_events
        finally:
            sys.setprofile(None)

    expected, n_events = interrupted(-1)
    for at in range(1, n_events, 31):
        found, _ = interrupted(at)
        assert all(map(torch.equal, found, expected)), at


@pytest.mark.exhaustive
def test_a_first_call_does_not_load_the_compiler():
    """It would take a second and a hundred megabytes of everyone who only imports the operator."""
    program = (
        "import sys, torch; from linrope import linear_attention; q = torch.randn(1, 1, 70, 4, requires_grad=True); "
        "linear_attention(q, q, q).sum().backward(); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("backend", covering(["auto", "reference", "chunked"], ["auto", "reference"]))
@pytest.mark.parametrize("length", [70, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 0))])
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"log_decay": -torch.ones(2, 3, 70)}, {"normalize": "rotary"}, {"feature_map": torch.exp},
    {"key_mask": torch.ones(2, 70, dtype=torch.bool), "segment_ids": torch.zeros(2, 70, dtype=torch.int64)},
    {"segment_ids": torch.zeros(2, 70, dtype=torch.int64), "causal": False}, {"state": State.zeros(2, 3, 8)},
], ids=lambda options: " ".join(options))  # fmt: skip
def test_on_the_device_meta_it_computes_shapes(backend, length, options):
    rope = RotaryEmbedding(8)

    def moved(x):
        if isinstance(x, State):
            return x.to("meta")
        return x[..., :length].to("meta") if isinstance(x, torch.Tensor) else x

    options = {name: moved(x) for name, x in options.items()}
    q, k, v = (torch.empty(2, 3, length, 8, device="meta", requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = linear_attention(q, k, v, rope, backend=backend, return_state=True, **options)
    assert (o.shape, o.dtype, state.kv.shape, state.length) == (q.shape, q.dtype, (2, 3, 8, 8), length)
    assert {x.device.type for x in (o, *state.tensors.values())} == {"meta"}
    o.sum().backward()
    assert q.grad.shape == q.shape
    if options.get("causal", True):
        options = {name: x for name, x in options.items() if name != "state"}
        assert merge(state, summarize(k, v, rope, **options), rope).kv.is_meta
