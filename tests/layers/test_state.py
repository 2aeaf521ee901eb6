"""The states of layers and models: moved, detached, their rows chosen, saved and loaded."""

import io

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig, LinearAttention, ModelState, SoftmaxAttention
from linrope.layers.state import map_state
from tests.conftest import assert_input_errors

SIZES = {"vocab_size": 40, "d_model": 16, "n_layers": 3, "n_heads": 2, "short_conv": 3}
KINDS = {"attention": ["linear", "softmax", "linear"], "forget_gate": True}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**SIZES, **KINDS)).eval()


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(0))


def state_of(model, tokens):
    """The state after rows in which a document ended: all tensors that a state may have."""
    ids = (torch.arange(20) >= torch.tensor([[0], [7], [20]])).long()
    return model(tokens, segment_ids=ids, return_state=True)[1]


def named(state):
    found = []
    map_state(lambda name, x: found.append((name, x)) or x, state)
    return found


@pytest.mark.parametrize(
    "rows", [[2, 0, 0, 1], torch.tensor([True, False, True]), torch.tensor([1, 0, 1], dtype=torch.uint8)], ids=str
)
def test_chosen_rows_are_continued_as_those_rows(model, tokens, rows):
    state = state_of(model, tokens)
    assert len(named(state)) == len(set(named(state))) == 2 * 5 + 5
    chosen = state.select_rows(rows)
    assert type(chosen) is ModelState
    numbers = torch.arange(3)[rows].tolist() if isinstance(rows, torch.Tensor) and rows.dtype == torch.bool else rows
    numbers = torch.as_tensor(numbers).long()
    expected = model(tokens, state)[numbers]
    torch.testing.assert_close(model(tokens[numbers], chosen), expected, rtol=1e-5, atol=1e-6)


def test_a_layer_state_has_the_same_methods():
    for layer in (LinearAttention(16, 2, forget_gate=True), SoftmaxAttention(16, 2)):
        x = torch.randn(3, 9, 16)
        _, state = layer(x, return_state=True)
        chosen = state.select_rows([2, 0]).detach()
        assert [len(tensor) for _, tensor in named(state.select_rows([]))] == [0] * len(named(state))
        torch.testing.assert_close(layer(x[[2, 0]], chosen), layer(x, state)[[2, 0]], rtol=1e-5, atol=1e-6)
        assert not any(tensor.requires_grad for _, tensor in named(chosen))
        assert any(tensor.requires_grad for _, tensor in named(state))


@pytest.mark.parametrize("layer", [LinearAttention, SoftmaxAttention])
def test_documents_that_begin_after_a_cut_have_no_past(layer):
    """Here in the first row; that of the second one goes on."""
    layer, x = layer(16, 2, short_conv=3), torch.randn(2, 20, 16)
    ids = (torch.arange(20) >= torch.tensor([[9], [13]])).long()
    _, state = layer(x[:, :9], segment_ids=ids[:, :9], return_state=True)
    rest = layer(x[:, 9:], state.reset_rows(torch.tensor([True, False])), ids[:, 9:])
    torch.testing.assert_close(rest, layer(x, segment_ids=ids)[:, 9:], rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_exist_are_named(model, tokens):
    state = state_of(model, tokens)
    assert_input_errors(
        (lambda: state.select_rows([0, 3]), r"rows lie in \[0, 3\], the state has rows 0 … 2"),
        (lambda: state[0].select_rows([-1]), r"rows lie in \[-1, -1\]"),
        (lambda: state.select_rows([True, False]), r"rows is \(2,\) torch.bool: pass \(N,\) integers, or \(3,\) bool"),
        (lambda: state.select_rows([0.0]), r"rows is \(1,\) torch.float32"),
        (lambda: state.select_rows(1), r"rows is \(\) torch.int64"),
        (lambda: state.reset_rows([True]), r"ended is \(1,\) torch.bool: pass \(3,\) booleans"),
        (lambda: state[0].reset_rows([0, 1, 1]), r"ended is \(3,\) torch.int64: pass \(3,\) booleans"),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_state_moves_as_its_model_does(model, tokens, dtype):
    """Into another dtype: positions, what is visible, and angles keep their dtypes, sums are float32 at least."""
    state = state_of(model, tokens).detach()
    with torch.no_grad():
        before, after = model(tokens, state), model.to(dtype)(tokens, state.to(dtype))
    tolerance = 1e-4 if dtype == torch.float64 else 0.05  # float32 sums; bfloat16 weights of a small model
    torch.testing.assert_close(after.double(), before.double(), rtol=tolerance, atol=tolerance)
    for (name, old), (_, new) in zip(named(state), named(state.to(device="cpu", dtype=dtype)), strict=True):
        sums = name in ("kv", "k_sum", "log_decay")
        kept = old.dtype if name in ("angle", "document_start", "visible") else dtype
        assert new.dtype == (torch.promote_types(dtype, torch.float32) if sums else kept), name
    assert {x.device.type for _, x in named(state.to("meta"))} == {"meta"}


def test_training_continues_from_a_detached_state_of_inference_mode(model, tokens):
    with torch.inference_mode():
        _, state = model(tokens, return_state=True)
    model(tokens, state.detach()).sum().backward()
    detached = state.detach(differentiable=True)
    model(tokens, detached).sum().backward()
    read = ("kv", "k_sum", "k", "v", "conv_tail")
    assert all(x.grad is not None for name, x in named(detached) if name in read)
    assert not any(x.is_inference() for x in state[0].past.detach().tensors.values())


@pytest.mark.exhaustive
def test_methods_of_a_state_are_part_of_a_graph(model, tokens):
    state = state_of(model, tokens).detach()

    def changed(state, rows):
        return [x for _, x in named(state.detach().select_rows(rows))]

    rows = torch.tensor([2, 0])
    compiled = torch.compile(changed, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(state, rows), changed(state, rows), strict=True):
        assert torch.equal(found, expected)


def test_a_state_is_saved_and_loaded_as_tensors_and_plain_values(model, tokens):
    state = state_of(model, tokens).detach()
    for saved in (state, state[1], {"step": 3, "state": state}):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is type(saved)
        if type(saved) is ModelState:
            assert torch.equal(model(tokens, loaded), model(tokens, state))


@pytest.mark.exhaustive
def test_a_compiled_model_returns_a_state(model, tokens):
    """Of any length: the second call makes a graph in which it is open."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (5, 20):
        _, state = compiled(tokens[:, :length], return_state=True)
        _, expected = model(tokens[:, :length], return_state=True)
        assert type(state) is ModelState
        torch.testing.assert_close(model(tokens, state), model(tokens, expected))
