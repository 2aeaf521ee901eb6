"""Muon beside AdamW: one optimizer that does what the two do, and resumes."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.models.base import Model, ModelConfig
from linrope.training.optimizer import OptimizerConfig, parameter_groups
from tests.conftest import tiny_options
from tests.training.test_resume import TRAINED, equal, load

CONFIG = LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, short_conv=4, forget_gate=True)
MUON = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.2)


def model_of(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(CONFIG)


def step(model: LanguageModel, *optimizers: torch.optim.Optimizer, seed: int = 0) -> None:
    tokens = torch.randint(257, (2, 33), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    for optimizer in optimizers:
        optimizer.step()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else():
    model = model_of()
    matrices, decaying, plain = parameter_groups(model, 0.2, "muon")
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_muon = {names[parameter] for parameter in matrices["params"]}
    layers = ("attention.qkv", "attention.out", "attention.forget.linear", "mlp.gate_up", "mlp.out")
    assert of_muon == {f"blocks.{number}.{layer}.weight" for number in range(2) for layer in layers}
    others = {names[parameter] for group in (decaying, plain) for parameter in group["params"]}
    assert of_muon.isdisjoint(others)
    assert of_muon | others == set(names.values())
    assert "embedding.weight" in {names[parameter] for parameter in decaying["params"]}
    assert [group["weight_decay"] for group in (matrices, decaying, plain)] == [0.2, 0.2, 0.0]


def test_its_steps_are_those_of_muon_and_adamw_apart(monkeypatch):
    """The learning rate of the group is the one that a schedule sets."""
    monkeypatch.setattr("linrope.training.precision.has_fast_bfloat16", lambda: True)
    model, other = model_of(), model_of()
    one = MUON.make(parameter_groups(model, 0.2, "muon"), fused=None)
    matrices, *others = parameter_groups(other, 0.2, "muon")
    apart = Muon([matrices], lr=0.01, adjust_lr_fn="match_rms_adamw"), AdamW(others, lr=0.01, betas=MUON.betas)
    for number in range(3):
        for group in (*one.param_groups, *apart[0].param_groups, *apart[1].param_groups):
            group["lr"] = 0.01 / (1 + number)
        step(model, one, seed=number)
        step(other, *apart, seed=number)
    assert same_weights(model, other)
    assert not same_weights(model, model_of())


class _Products(TorchDispatchMode):
    """Notes the dtype of each product of matrices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(found.dtype)
        return found

    def __enter__(self):
        self.dtypes: list[torch.dtype] = []
        return super().__enter__()


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration from the matrix over its norm (the coefficients of Muon's authors)."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("native", "dtype", "error"), [(True, torch.bfloat16, 0.05), (False, torch.float32, 1e-5)])
@pytest.mark.parametrize("way", ["step", "copied"])
def test_muon_orthogonalises_in_bfloat16_only_where_the_processor_has_it(monkeypatch, native, dtype, error, way):
    monkeypatch.setattr("linrope.training.precision.has_fast_bfloat16", lambda: native)
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.zeros(12, 20)), nn.Parameter(torch.zeros(5))
    gradient = torch.randn(12, 20)
    groups = [{"params": [parameter], "weight_decay": 0.0} for parameter in (matrix, vector)]
    optimizer = MUON.make(groups, fused=None)
    if way == "copied":
        (matrix, vector), optimizer = copy.deepcopy(((matrix, vector), optimizer))

    def closure() -> float:
        assert torch.is_grad_enabled()
        assert vector.bfloat16().dtype == torch.bfloat16  # the model's own computations keep their dtypes
        matrix.grad, vector.grad = gradient.clone(), torch.zeros(5)
        return 1.5

    with torch.no_grad(), _Products() as products:
        assert optimizer.step(closure) == 1.5
    assert products.dtypes == [dtype] * 15
    expected = -0.01 * 0.2 * 20**0.5 * orthogonalised(gradient.double())
    assert (matrix - expected).norm() < error * expected.norm()
    assert torch.equal(matrix.grad, gradient)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_copy_goes_on_as_the_original(way):
    model = model_of()
    optimizer = MUON.make(parameter_groups(model, 0.2, "muon"), fused=True)
    step(model, optimizer)
    if way == "deepcopy":
        other, others_optimizer = copy.deepcopy((model, optimizer))
    else:
        other = copy.deepcopy(model)
        others_optimizer = MUON.make(parameter_groups(other, 0.2, "muon"), fused=True)
        others_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, seed=1)
    step(other, others_optimizer, seed=1)
    assert same_weights(model, other)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_with_the_same_bits_and_has_new_options(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 60)
    options = ["fit", *tiny_options(text, tmp_path), "--optimizer.name=muon", "--optimizer.lr=0.01"]
    options += ["--optimizer.warmup_steps=2", "--trainer.val_check_interval=5", "--trainer.max_steps=6"]
    assert main([*options, "--run.name=whole"]) == 0
    stopped = [*options, "--run.name=stopped", "--run.checkpoint_every_n_steps=3", "--run.keep_checkpoints=2"]
    assert main(stopped) == 0
    runs = tmp_path / "runs"
    at_three = next(runs.rglob("step_3.ckpt"))
    assert main([*options, "--run.name=resumed", f"--ckpt_path={at_three}"]) == 0
    whole, resumed = (load(runs / name / "version_0") for name in ("whole", "resumed"))
    assert equal([whole[name] for name in TRAINED], [resumed[name] for name in TRAINED])
    momenta = [state for state in resumed["optimizer_states"][0]["state"].values() if "momentum_buffer" in state]
    assert len(momenta) == 4  # the layers of the one block

    assert main([*options, "--run.name=other", f"--ckpt_path={at_three}", "--optimizer.weight_decay=0.5"]) == 0
    decays = [
        group["weight_decay"] for group in load(runs / "other" / "version_0")["optimizer_states"][0]["param_groups"]
    ]
    assert decays == [0.5, 0.5, 0.0]


def test_states_of_another_optimizer_are_refused_with_the_fix(tiny, run_folder, error_of):
    assert main(["fit", *tiny]) == 0
    resumed = [*tiny, f"--ckpt_path={run_folder / 'checkpoints' / 'last.ckpt'}", "--trainer.max_steps=4"]
    err = error_of("fit", *resumed, "--optimizer.name=muon")
    assert "optimizer.name=muon, but checkpoint" in err
    assert "has the states of adamw: set adamw, or start a new run with its weights: --run.start_from" in err


def test_names_and_models_without_matrices_are_refused():
    with pytest.raises(InputError, match=r"optimizer\.name='mouon' is unknown: choose one of 'adamw', 'muon'"):
        OptimizerConfig(name="mouon")

    class Flat(Model):
        def __init__(self):
            super().__init__(ModelConfig())
            self.layer = nn.Linear(2, 2)

    assert len(parameter_groups(Flat(), 0.1)) == 2
    with pytest.raises(InputError, match=r"optimizer\.name=muon .* Flat has none in `blocks_to_shard`.*: set adamw"):
        parameter_groups(Flat(), 0.1, "muon")
