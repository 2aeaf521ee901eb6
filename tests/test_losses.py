"""Losses in slices of rows, against the same losses from all logits."""

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.layers.linear import Linear
from linrope.losses import (
    IGNORE,
    rows_of_slice,
    summed_cross_entropy,
    summed_cross_entropy_of,
    token_losses,
    token_losses_of,
)
from tests.conftest import assert_input_errors

B, T, D, V = 3, 13, 5, 11


def test_label_smoothing_is_that_of_torch_and_its_equation():
    torch.manual_seed(0)
    output, x, targets = nn.Linear(D, V).double(), torch.randn(B, T, D).double(), torch.randint(V, (B, T))
    targets[1, 4:9] = IGNORE
    x.requires_grad_()
    log_p = output(x).log_softmax(-1)
    wanted = 0.8 * torch.nn.functional.one_hot(targets.clamp_min(0), V) + 0.2 / V
    written_out = -(wanted * log_p).sum(-1)[targets != IGNORE].sum()
    kept = {"reduction": "sum", "ignore_index": IGNORE, "label_smoothing": 0.2}
    of_torch = torch.nn.functional.cross_entropy(output(x).flatten(0, 1), targets.flatten(), **kept)
    torch.testing.assert_close(of_torch, written_out)
    of_parameters = [x, *output.parameters()]
    expected = torch.autograd.grad(written_out, of_parameters)
    for loss in (summed_cross_entropy(output(x), targets, 0.2), summed_cross_entropy_of(output, x, targets, 7, 0.2)):
        torch.testing.assert_close(loss, written_out)
        torch.testing.assert_close(torch.autograd.grad(loss, of_parameters), expected)
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy_of(output, x, targets, 7, 0.2), written_out)


class WithAdapter(nn.Module):
    """An output layer of somebody's own: a frozen matrix, a bias and a trained product of two small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(D, V), nn.Linear(D, 2, bias=False), nn.Linear(2, V, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class LossOf(nn.Module):
    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self.output = output

    def forward(self, x, targets):
        return summed_cross_entropy_of(self.output, x, targets, 7)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, targets = torch.randn(B, T, D, dtype=dtype, requires_grad=True), torch.randint(V, (B, T))
    targets[0, 3:9] = targets[2, -1] = IGNORE
    return x, targets


@pytest.mark.parametrize("layer", [lambda: Linear(D, V, bias=False), WithAdapter])
@pytest.mark.parametrize("rows", [1, 7, B * T - 1, B * T, 1000])
def test_a_loss_in_slices_is_that_of_all_logits(layer, rows):
    x, targets = inputs()
    output = layer().double()
    sources = [x, *(p for p in output.parameters() if p.requires_grad)]
    expected = summed_cross_entropy(output(x), targets)
    loss = summed_cross_entropy_of(output, x, targets, rows)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(one / 7, sources) for one in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy_of(output, x, targets, rows), expected, rtol=1e-12, atol=0)
        each = token_losses_of(output, x, targets, rows)
    torch.testing.assert_close(each, token_losses(output(x), targets), rtol=1e-6, atol=0)
    assert each.shape == (B, T)
    assert each.dtype == torch.float32


@pytest.mark.parametrize("rows", [7, 1000])
def test_tensors_that_the_output_layer_finds_elsewhere_are_trained_too(rows):
    """Those of hooks and closures, leaves or not."""
    x, targets = inputs()
    scale, made = torch.tensor(1.5).double().requires_grad_(), torch.randn(V, D).double().requires_grad_()

    class Generated(nn.Module):
        def forward(self, x):
            return x @ made.tanh().mT

    scaled = Linear(D, V, bias=False).double()
    scaled.register_forward_hook(lambda module, arguments, logits: logits * scale)
    for output, sources in ((scaled, [x, scaled.weight, scale]), (Generated(), [x, made])):
        expected = summed_cross_entropy(output(x), targets)
        with pytest.warns(UserWarning, match="trained tensors that are not its parameters"):
            loss = summed_cross_entropy_of(output, x, targets, rows)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(one, sources) for one in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


def test_parameters_may_be_made_of_others_or_not_be_used():
    x, targets = inputs()
    output = WithAdapter().double()
    output.spare = nn.Parameter(torch.ones(3).double())
    summed_cross_entropy_of(output, x, targets, 7).backward()
    assert output.spare.grad is None
    torch.testing.assert_close(x.grad, torch.autograd.grad(summed_cross_entropy(output(x), targets), x)[0])
    output, seed = Linear(D, V, bias=False).double(), torch.randn(V, D).double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = functional_call(LossOf(output), {"output.weight": seed.exp()}, (x, targets))
    (found,) = torch.autograd.grad(loss, seed)
    (expected,) = torch.autograd.grad(summed_cross_entropy(x @ seed.exp().mT, targets), seed)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_a_transform_takes_the_gradient_of_a_loss():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocab_size=V, d_model=8, n_layers=1, n_heads=2)).double()
    tokens = torch.randint(V, (2, 9))
    loss_of = lambda weights: functional_call(model, weights, (tokens,), {"targets": tokens})  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the attention's own
        found = torch.func.grad(loss_of)({name: p.detach() for name, p in model.named_parameters()})
    model(tokens, targets=tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_logits_are_computed_where_there_is_a_target():
    x, targets = inputs()
    output, read = Linear(D, V, bias=False).double(), []
    output.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    summed_cross_entropy_of(output, x, targets, 1000)
    assert read == [B * T - 7]
    nothing = torch.full_like(targets, IGNORE)
    loss = summed_cross_entropy_of(output, x, nothing, 1000)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, x)[0].count_nonzero() == 0


def test_only_what_is_trained_gets_a_gradient_and_twice_the_backward_is_twice_the_gradient():
    x, targets = inputs()
    output = Linear(D, V, bias=False).double()
    summed_cross_entropy_of(output, x.detach(), targets, 7).backward()
    alone = output.weight.grad
    output.weight.grad = None
    loss = summed_cross_entropy_of(output, x, targets, 7)
    loss.backward(retain_graph=True)
    assert torch.equal(output.weight.grad, alone)
    loss.backward()
    torch.testing.assert_close(output.weight.grad, 2 * alone, rtol=0, atol=0)
    output.weight.requires_grad_(False)
    (found,) = torch.autograd.grad(summed_cross_entropy_of(output, x, targets, 7), x)
    torch.testing.assert_close(2 * found, x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_summed_in_float32(dtype):
    """600 slices of one row: sums in half precision would lose the last of them."""
    torch.manual_seed(0)
    x, targets = torch.randn(1, 600, D), torch.randint(V, (1, 600))
    exact, output = Linear(D, V, bias=False), Linear(D, V, bias=False).to(dtype)
    exact.weight.data = output.weight.detach().float()
    (found,) = torch.autograd.grad(summed_cross_entropy_of(output, x.to(dtype), targets, 1), output.weight)
    (expected,) = torch.autograd.grad(summed_cross_entropy(exact(x.to(dtype).float()), targets), exact.weight)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=2 * unit, atol=2 * unit * 600**0.5)


def test_under_autocast_slices_compute_what_the_whole_does():
    x, targets = inputs(torch.float32)
    output = Linear(D, V, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = summed_cross_entropy(output(x), targets)
        loss = summed_cross_entropy_of(output, x, targets, 7)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert loss.dtype == torch.float32
    found, exact = (torch.autograd.grad(one, [x, output.weight]) for one in (loss, expected))
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], exact[1], rtol=2e-2, atol=1e-2)  # sums of slices are rounded less
    assert {x.dtype for x in found} == {torch.float32}


def test_no_logits_are_kept_and_never_more_than_those_of_a_slice():
    model = LanguageModel(LanguageModelConfig(vocab_size=2**12, d_model=8, n_layers=1, n_heads=1))
    tokens, rows, made = torch.randint(2**12, (2, 700)), [], []

    def seen(layer, args, logits):
        assert all(earlier() is None for earlier in made)
        made.append(weakref.ref(logits.untyped_storage()))
        rows.append(logits.shape[0])

    model.output.register_forward_hook(seen)
    assert rows_of_slice(2**12, "cpu") == 512
    loss = model(tokens, targets=tokens)
    assert rows == [512, 512, 376]
    assert made[-1]() is None
    loss.backward()
    with torch.no_grad():
        each = model(tokens, targets=tokens, reduction="none")
    assert rows == 2 * [512, 512, 376]
    torch.testing.assert_close(each.sum(), loss.detach())


def test_a_model_with_targets_gives_the_loss_of_its_logits_and_their_gradients():
    model = LanguageModel(LanguageModelConfig(vocab_size=300, d_model=16, n_layers=2, n_heads=2)).double()
    tokens, targets = torch.randint(300, (2, 2, 35)).unbind()
    loss, state = model(tokens, targets=targets, return_state=True)
    logits, expected_state = model(tokens, return_state=True)
    expected = summed_cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(state[1].past.kv, expected_state[1].past.kv, rtol=0, atol=0)
    for found, exact in zip(*(torch.autograd.grad(one, list(model.parameters())) for one in (loss, expected))):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-13)


@pytest.mark.filterwarnings("ignore:linrope takes backend 'reference' in transforms")
def test_gradients_of_each_row_of_a_model_with_targets_by_vmap():
    model = LanguageModel(LanguageModelConfig(vocab_size=20, d_model=8, n_layers=1, n_heads=1, rope=None))
    tokens, targets = torch.randint(20, (2, 3, 7))
    targets[0, 2] = IGNORE
    weights = dict(model.named_parameters())

    def loss(weights, tokens, targets):
        return torch.func.functional_call(model, weights, (tokens[None],), {"targets": targets[None]})

    of_rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    found = of_rows(weights, tokens, targets)
    for row in range(3):
        exact = torch.autograd.grad(model(tokens[row, None], targets=targets[row, None]), list(weights.values()))
        torch.testing.assert_close([found[name][row] for name in weights], list(exact), rtol=1e-4, atol=1e-5)
    targets[2, 1] = 20
    assert_input_errors((lambda: of_rows(weights, tokens, targets), "targets has 20, vocab_size is 20"))


def test_what_a_loss_in_slices_does_not_take_is_said():
    model = LanguageModel(LanguageModelConfig(d_model=8, n_layers=1, n_heads=1))
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    assert_input_errors(
        (lambda: model(tokens, targets=tokens[:, 1:]), r"targets is \(1, 5\), tokens \(1, 6\): pass one"),
        (lambda: model(tokens, targets=tokens.tolist()), r"targets is a list: pass int64 of the shape of tokens"),
        (lambda: model(tokens, targets=tokens.to("meta")), r"targets is on meta, tokens on cpu: use one device"),
        (lambda: model(tokens.to("meta")), r"tokens on the device meta, without values, for a model on cpu"),
        (lambda: model(tokens, targets=tokens, logits_to_keep=1), "logits_to_keep=1 does not go with targets"),
        (lambda: model(tokens, targets=tokens, reduction="mean"), "reduction='mean'"),
    )
    loss = model(tokens, targets=tokens)
    with pytest.raises(InputError, match="create_graph=True asks for a second derivative"):
        torch.autograd.grad(loss, model.output.weight, create_graph=True)
    logits = model(tokens).sum()
    with pytest.raises(InputError, match=r"second derivative, .* Of a model, nest torch\.func\.grad over"):
        torch.autograd.grad(logits, model.embedding.weight, create_graph=True)
