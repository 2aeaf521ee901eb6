"""Sequences read in segments have the loss and the gradients of the whole, in memory that does not grow."""

import functools
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from linrope import InputError, LanguageModel, LanguageModelConfig, RotaryConfig, segmented_loss
from linrope.layers.state import tensors_of
from linrope.losses import summed_cross_entropy
from linrope.positions.base import PositionsConfig
from tests.conftest import covering
from tests.models.test_language_model import awake

MODELS = {
    "plain": {},
    "recipe": {"short_conv": 4, "forget_gate": True, "rope": RotaryConfig(rotary_dim=4, placement="signed")},
    "rope in both sums": {"rope": RotaryConfig(placement="both")},
    "frequencies trained by head": {"rope": RotaryConfig(base=[10.0, 100.0], trainable=True), "forget_gate": True},
    "before the map, learned map": {"rope": RotaryConfig(placement="before_map"), "feature_map": "hedgehog"},
    "sinusoids": {"positions": PositionsConfig("sinusoidal"), "short_conv": 4},
    "window": {"attention": ["linear", "softmax"], "window": 6, "short_conv": 3},
}
T = 101


def model_of(dtype=torch.float64, **options) -> LanguageModel:
    torch.manual_seed(0)
    return awake(LanguageModel(LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, **options))).to(dtype)


def text(batch: int = 3, length: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, batch, length), generator=draw).unbind()


def packed() -> torch.Tensor:
    """Documents that end anywhere, in two rows just where segments of 20 and of 40 tokens do."""
    ids = (torch.rand(3, T, generator=torch.Generator().manual_seed(2)) < 0.08).cumsum(1)
    ids[0, 40:] += 1
    ids[1, 80:] += 1
    return ids


def gradients(model: LanguageModel, loss: torch.Tensor) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def assert_same(actual, expected, tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def segment_by_segment(model: LanguageModel, length: int, between: Callable = lambda state: state) -> torch.Tensor:
    """The loss of the text, for autograd through all segments; `between` changes the state before each."""
    (inputs, targets), total, state = text(), 0.0, None
    for start in range(0, T, length):
        segment = slice(start, start + length)
        logits, state = model(inputs[:, segment], between(state), return_state=True)
        total = total + summed_cross_entropy(logits, targets[:, segment])
    return total


BY_DEFAULT = [*product(MODELS, [40], [False]), *product(MODELS, [20], [True])]
BY_DEFAULT += [("recipe", 1000, False), ("recipe", T - 1, True)]


@pytest.mark.parametrize(
    ("name", "length", "is_packed"),
    covering([*product(MODELS, (7, 20, 40, T - 1, T, 1000), (False, True))], BY_DEFAULT),
)
def test_loss_and_gradients_are_those_of_the_whole(name, length, is_packed):
    model, ids = model_of(**MODELS[name]), packed() if is_packed else None
    inputs, targets = text()
    whole = summed_cross_entropy(model(inputs, segment_ids=ids), targets)
    total, _ = segmented_loss(model, inputs, targets, length, segment_ids=ids)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    assert_same(gradients(model, total), gradients(model, whole), 1e-10)


def test_the_second_pass_runs_in_the_autocast_of_the_first():
    """One segment is the whole: the same numbers to the bit in bfloat16, in a backward outside of autocast."""
    model, (inputs, targets) = model_of(torch.float32, **MODELS["recipe"]), text()
    with torch.autocast("cpu", torch.bfloat16):
        whole = summed_cross_entropy(model(inputs), targets)
        total, _ = segmented_loss(model, inputs, targets, T)
    assert total == whole
    found, expected = gradients(model, total), gradients(model, whole)
    assert all(map(torch.equal, found, expected))
    exact = gradients(model, summed_cross_entropy(model(inputs), targets))
    assert not torch.equal(found[0], exact[0])


def test_the_gradient_of_a_scaled_mean_with_a_loss_of_ones_own():
    def loss(logits, values):
        return (logits.logsumexp(-1) * values).square().sum()

    model, (inputs, targets) = model_of(), text()
    total, _ = segmented_loss(model, inputs, targets / 256.0, 30, loss=loss)
    assert_same(gradients(model, total / 7), gradients(model, loss(model(inputs), targets / 256.0) / 7), 1e-10)


def test_a_trained_tensor_without_a_gradient_is_told():
    model, (inputs, targets) = model_of(), text()
    temperature = torch.ones(2, requires_grad=True)

    def loss(logits, targets):
        return summed_cross_entropy(logits * temperature[0], targets)

    total, _ = segmented_loss(model, inputs, targets, 30, loss=loss)
    with pytest.warns(UserWarning, match=r"a tensor of shape \(2,\) with requires_grad=True gets none"):
        total.backward()
    assert temperature.grad is None
    model.temperature = torch.nn.Parameter(temperature.detach())
    temperature = model.temperature
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segmented_loss(model, inputs, targets, 30, loss=loss)[0].backward()
    (expected,) = torch.autograd.grad(loss(model(inputs), targets), temperature)
    torch.testing.assert_close(temperature.grad, expected, rtol=1e-10, atol=0)


def test_a_loss_of_ones_own_may_be_a_constant_in_a_segment():
    """As where it has no targets: no gradient comes from there, but one goes through."""

    def loss(logits, weights):
        return (logits.logsumexp(-1) * weights).sum() if weights.any() else torch.zeros(())

    model, (inputs, _) = model_of(), text()
    for start, end in ((40, 60), (80, T), (0, 0)):
        weights = torch.zeros(inputs.shape, dtype=torch.float64)
        weights[:, start:end] = 1
        total, _ = segmented_loss(model, inputs, weights, 20, loss=loss)
        found = gradients(model, total)
        if start == end:
            assert not any(gradient is not None for gradient in found)
        else:
            assert_same(found, gradients(model, loss(model(inputs), weights)), 1e-10)


def test_states_go_in_and_out():
    """Two calls chained by their state see what one call sees; no gradient goes back through it."""
    model, (inputs, targets) = model_of(**MODELS["recipe"]), text()
    _, after = model(inputs[:, :50], return_state=True)
    total, state = segmented_loss(model, inputs[:, :50], targets[:, :50], 20)
    rest, last = segmented_loss(model, inputs[:, 50:], targets[:, 50:], 20, state=state)
    whole, final = segmented_loss(model, inputs, targets, 1000)
    assert (total + rest).item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(tensors_of(state + last), tensors_of(after.detach() + final), rtol=1e-10, atol=1e-12)
    assert not any(tensor.requires_grad for tensor in tensors_of(state + last))
    expected = summed_cross_entropy(model(inputs[:, 50:], after.detach()), targets[:, 50:])
    assert_same(gradients(model, rest), gradients(model, expected), 1e-10)


def test_truncated_backpropagation_stops_at_each_segment():
    model, (inputs, targets) = model_of(**MODELS["recipe"]), text()
    total, _ = segmented_loss(model, inputs, targets, 40, truncated=True)
    expected = gradients(model, segment_by_segment(model, 40, lambda state: state and state.detach()))
    assert_same(gradients(model, total), expected, 1e-10)
    exact, _ = segmented_loss(model, inputs, targets, 40)
    assert exact.item() == pytest.approx(total.item(), rel=1e-12)
    assert not torch.allclose(gradients(model, exact)[1], expected[1])


def test_dropout_draws_the_same_masks_in_both_passes():
    model = model_of(dropout=0.3, **MODELS["recipe"]).train()
    torch.manual_seed(5)
    total, _ = segmented_loss(model, *text(), 20)
    before = torch.get_rng_state()
    found = gradients(model, total)
    assert torch.equal(torch.get_rng_state(), before)  # what is drawn next does not depend on the backward
    torch.manual_seed(5)
    expected = segment_by_segment(model, 20)
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same(found, gradients(model, expected), 1e-10)


def test_no_activations_are_kept_between_segments():
    """The logits of a segment are gone when the next one's are made, in both passes."""
    model = model_of()
    made: list[weakref.ref] = []

    def loss(logits, targets):
        assert all(earlier() is None for earlier in made)
        made.append(weakref.ref(logits))
        return summed_cross_entropy(logits, targets)

    total, _ = segmented_loss(model, *text(1, 1000), 100, loss=loss)
    assert len(made) == 10
    assert made[-1]() is None
    total.backward()
    assert len(made) == 20
    with torch.no_grad():
        value, _ = segmented_loss(model, *text(1, 1000), 100, loss=loss)
    assert value.item() == pytest.approx(total.item(), rel=1e-12)


def test_gradients_of_half_precision_are_summed_in_float32():
    """Of a bfloat16 model: many segments are no further from float32 than the whole is."""
    model, exact = (model_of(dtype, **MODELS["recipe"]) for dtype in (torch.bfloat16, torch.float32))
    inputs, targets = text(1, 256)
    exact.load_state_dict(model.state_dict())

    def gradient(model: LanguageModel, length: int) -> torch.Tensor:
        found = gradients(model, segmented_loss(model, inputs, targets, length)[0])
        assert all(g.dtype == model.embedding.weight.dtype for g in found)
        return torch.cat([g.flatten().float() for g in found])

    right = gradient(exact, 256)
    # float32 sums in another order, over the whole gradient: single small ones are differences of larger sums
    assert (gradient(exact, 64) - right).norm() <= 1e-5 * right.norm()
    errors = [(gradient(model, length) - right).norm() for length in (256, 4)]
    assert errors[1] < 1.2 * errors[0]


def test_activation_checkpointing_of_blocks_changes_nothing():
    model, (inputs, targets) = model_of(**MODELS["recipe"]), text()
    expected = gradients(model, segmented_loss(model, inputs, targets, 40)[0])
    for block in model.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    assert_same(gradients(model, segmented_loss(model, inputs, targets, 40)[0]), expected, 1e-12)


def test_parameters_without_a_part_or_frozen_get_no_gradient_and_none_gets_a_second():
    model = model_of()
    model.embedding.weight.requires_grad_(False)
    model.unused = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match="create_graph=True asks for a second derivative"):
        segmented_loss(model, *text(), 30)[0].backward(create_graph=True)
    segmented_loss(model, *text(), 30)[0].backward()
    assert model.embedding.weight.grad is None
    assert model.unused.grad is None
    assert model.blocks[0].mlp.out.weight.grad.norm() > 0


def test_weights_that_change_before_the_backward_are_noticed():
    model = model_of()
    loss, _ = segmented_loss(model, *text(), 30)
    with torch.no_grad():
        model.blocks[0].mlp.out.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forgotten_rows_are_as_if_nothing_came_before():
    for options in MODELS.values():
        model = model_of(**options).eval()
        inputs, _ = text()
        _, state = model(inputs[:, :60], return_state=True)
        state = state.reset_rows([True, False, True])
        ids = torch.ones(3, T, dtype=torch.int64)
        ids[0::2, :60] = 0
        expected = model(inputs, segment_ids=ids)[:, 60:]
        torch.testing.assert_close(model(inputs[:, 60:], state), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({}, {"segment_length": 0}, "segment_length=0 must be a whole number, at least 1"),
        ({}, {"segment_length": 2.5}, "segment_length=2.5 must be a whole number"),
        ({"attention": ["linear", "softmax"]}, {}, "layer 1 is softmax attention without a window.*Set model.window"),
        ({"attention": ["linear", "softmax"], "window": 21}, {}, "segment_length=20 is less than model.window=21"),
        ({}, {"segment_ids": torch.zeros(3, T + 9, dtype=torch.int64)}, r"segment_ids is \(3, 110\)"),
        ({}, {"inputs": torch.full((3, T), 300)}, r"tokens lie in \[300, 300\]"),
        ({"rope": RotaryConfig(trainable=True)}, {"truncated": True}, "truncated=True detaches the state"),
        ({}, {"inputs": [[1, 2]]}, "inputs is a list: pass a tensor"),
        ({}, {"loss": lambda logits, targets: 1.0}, "is a float: return the loss of the segment as a scalar tensor"),
        ({}, {"loss": lambda logits, targets: logits[0, 0]}, r"is of shape \(\d+,\): return"),
        ({}, {"targets": torch.zeros(3, 5)}, r"inputs \(3, 101\) and targets \(3, 5\)"),
        ({}, {"inputs": torch.zeros(3, 0, dtype=torch.int64), "targets": torch.zeros(3, 0)}, "pass .B, T. with T ≥ 1"),
    ],
)
def test_bad_input(options, args, message):
    inputs, targets = text()
    call = {"inputs": inputs, "targets": targets, "segment_length": 20, **args}
    with pytest.raises(InputError, match=message):
        segmented_loss(model_of(**options), **call)


# --- over devices ----------------------------------------------------------------------------------------------------


class Loss(torch.nn.Module):
    """What is wrapped for several devices: the model with its segmented loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return segmented_loss(self.model, inputs, targets, 20)[0]


def on_one_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(Loss(model_of(**MODELS["recipe"])))
    reduced = []

    def counted(group, bucket):
        reduced.append(bucket.index())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, counted)
    inputs, targets = text(4)
    mine = slice(2 * rank, 2 * rank + 2)
    with wrapped.no_sync():  # accumulation: the first half without any exchange
        wrapped(inputs[mine, :60], targets[mine, :60]).backward()
    assert not reduced
    wrapped(inputs[mine, 60:], targets[mine, 60:]).backward()
    found = [p.grad for p in wrapped.module.parameters()]
    torch.save({"gradients": found, "reduced": reduced}, f"{folder}/{rank}.pt")
    # Without destructors: that of the group waits, with the interpreter's lock, for a thread that may want the lock to
    # free a hook's callback.
    os._exit(0)


def test_two_processes_exchange_gradients_once(tmp_path):
    multiprocessing.set_forkserver_preload([__name__])  # imported once, for both
    mp.start_processes(on_one_of_two, (str(tmp_path),), nprocs=2, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model = model_of(**MODELS["recipe"])
    inputs, targets = text(4)
    whole = sum(summed_cross_entropy(model(inputs[:, cut]), targets[:, cut]) for cut in (slice(60), slice(60, T)))
    expected = [gradient / 2 for gradient in gradients(model, whole)]  # DDP takes the mean over ranks
    for rank in ranks:
        assert_same(rank["gradients"], expected, 1e-10)
        assert len(rank["reduced"]) == len(set(rank["reduced"]))  # each bucket of gradients once
