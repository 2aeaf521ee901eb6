"""`linrope fit` with devices that share rows trains what one device trains, to the last digits."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from linrope import EncoderConfig, LanguageModelConfig
from linrope.cli.main import main
from linrope.distributed.group import SequenceGroup
from linrope.errors import InputError
from linrope.training import LanguageModelingModule
from linrope.training.sharding import mesh_sizes
from linrope.training.tasks.masked_lm import MaskedLMModule
from tests.conftest import tiny_options, write_documents
from tests.distributed.ranks import run_on_ranks
from tests.processes import Run
from tests.training.test_ddp import CONSTANT, folder_of, last
from tests.training.test_fsdp import checkpoint_of
from tests.training.test_resume import losses

EXHAUSTIVE = pytest.mark.exhaustive
HYBRID = ["--model.d_model=16", "--model.n_layers=3", "--model.n_heads=2", "--model.short_conv=3"]
HYBRID += ["--model.forget_gate=true", "--model.attention=[linear, softmax, linear]", "--model.window=6"]
EVEN, RAGGED = "--data.context=24", "--data.context=27"
PACKED = ["--data.document_mask=true"]
SINGLE = "float32"
SEGMENTS = ["--segment_length=6"]
ACCUMULATED = ["--trainer.accumulate_grad_batches=2"]
RECOMPUTED = "--trainer.strategy.activation_checkpointing=true"
STAGES = "--data.curriculum=[{tokens: 480, seq_len: 12, batch_size: 2}, {tokens: 1, seq_len: 27, batch_size: 2}]"
CASES = {
    "ragged, packed": ((1, 2), [RAGGED, *PACKED]),
    "2 × 2": ((2, 2), [RAGGED, *PACKED]),
    "even": ((1, 2), [EVEN]),
    SINGLE: ((1, 2), [RAGGED, *PACKED]),
    "segments": ((1, 2), [RAGGED, *PACKED, *SEGMENTS]),
    "segments, 2 × 2": ((2, 2), ["--data.context=29", *SEGMENTS]),
    "4": ((1, 4), [RAGGED, *PACKED]),
    "contiguous": ((2, 2), [RAGGED, *PACKED, "--data.contiguous=true"]),
    "contiguous, segments": ((1, 2), [RAGGED, *PACKED, *SEGMENTS, "--data.contiguous=true"]),
    "recomputed": ((1, 2), [RAGGED, RECOMPUTED]),
    "sharded segments": ((2, 1), [RAGGED, *PACKED, *SEGMENTS]),
    "accumulated": ((1, 2), [RAGGED, *PACKED, *ACCUMULATED]),
    "accumulated segments, 2 × 2": ((2, 2), ["--data.context=29", *SEGMENTS, *ACCUMULATED, RECOMPUTED]),
    "curriculum": (
        (2, 2),
        [RAGGED, STAGES],
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Options of all runs: a windowed hybrid on documents of 1 to 199 bytes."""
    folder = tmp_path_factory.mktemp("sequence")
    texts = write_documents(folder / "texts", (1 + 37 * number % 199 for number in range(86)))
    options = [f"--data.path={texts}", "--data.batch_size=2", f"--run.folder={folder}", "--trainer.max_steps=20"]
    options += [
        "--data.fractions=[0.7, 0.2, 0.1]",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
        "--trainer.log_every_n_steps=1",
    ]
    return ["fit", *HYBRID, *CONSTANT, *options, "--run.checkpoint_every_n_steps=10", "--run.health_every_n_steps=7"]


@pytest.fixture
def double():
    """Models of float64, which Lightning has no precision for in a mesh."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def on_mesh(data: int, sequence: int) -> list[str]:
    strategy = ["--trainer.strategy=ShardedStrategy", f"--trainer.strategy.data_parallel_size={data}"]
    every = "--trainer.val_check_interval=20"
    return [
        f"--trainer.devices={data * sequence}",
        *strategy,
        f"--trainer.strategy.sequence_parallel_size={sequence}",
        every,
    ]


def alone(data: int, options: list[str]) -> list[str]:
    """The run of one device with the batches of `data` devices."""
    kept = [option for option in options if "strategy" not in option]
    accumulated = data * (2 if ACCUMULATED[0] in options else 1)
    return [*kept, f"--trainer.accumulate_grad_batches={accumulated}", f"--trainer.val_check_interval={20 * data}"]


def fit(base: list[str], mesh: tuple[int, int], folder: Path, *options: str, code: int = 0) -> str:
    """Runs the processes of a mesh, and returns what they print to stderr."""
    run = Run([*base, *on_mesh(*mesh), *options], folder, ranks=mesh[0] * mesh[1])
    found, out, err = run.wait()
    assert found == code, out + err
    return err


@EXHAUSTIVE
@pytest.mark.parametrize("case", CASES)
def test_devices_that_share_rows_train_what_one_device_trains(base, tmp_path, case, request):
    mesh, options = CASES[case]
    if case != SINGLE:
        request.getfixturevalue("double")
    fit(base, mesh, tmp_path, *options, "--run.name=shared")
    ours = folder_of(base, "shared")
    if "contiguous" in case and mesh[0] > 1:  # the text is cut for each row of a step
        options = [*options, f"--data.batch_size={2 * mesh[0]}"]
        mesh = (1, mesh[1])
    assert main([*base, *alone(mesh[0], options), "--run.name=alone"]) == 0
    expected = folder_of(base, "alone")
    found, wanted = checkpoint_of(ours)["state_dict"], checkpoint_of(expected)["state_dict"]
    tolerance = 1e-5 if case == SINGLE else 1e-10
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert losses(ours)[20] != losses(ours)[1]
    for name in ("train_loss", "train_bpb", "grad_norm", "val_loss", "val_bpb", "tokens"):
        ours_logged, logged = losses(ours, name), losses(expected, name)
        assert ours_logged.keys() == logged.keys() != set()
        relative = 1e-5 if case == SINGLE else 1e-9
        assert list(map(float, ours_logged.values())) == pytest.approx(list(map(float, logged.values())), rel=relative)


@EXHAUSTIVE
def test_a_run_of_four_devices_goes_on_with_two_and_with_one(base, tmp_path, double):
    options = [RAGGED, *PACKED]
    fit(base, (1, 4), tmp_path, *options, "--run.name=four", "--trainer.max_steps=10")
    resumed = [*options, f"--ckpt_path={last(folder_of(base, 'four'))}"]
    fit(base, (1, 2), tmp_path, *resumed, "--run.name=two")
    assert main([*base, *alone(1, resumed), "--run.name=one"]) == 0
    assert main([*base, *alone(1, options), "--run.name=whole"]) == 0
    expected = checkpoint_of(folder_of(base, "whole"))["state_dict"]
    for name in ("two", "one"):
        found = checkpoint_of(folder_of(base, name))["state_dict"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@EXHAUSTIVE
def test_contiguous_rows_go_on_where_they_were(base, tmp_path, double):
    options = [RAGGED, *PACKED, "--data.contiguous=true"]
    fit(base, (2, 2), tmp_path, *options, "--run.name=half", "--trainer.max_steps=10")
    fit(base, (2, 2), tmp_path, *options, "--run.name=resumed", f"--ckpt_path={last(folder_of(base, 'half'))}")
    assert main([*base, *alone(1, options), "--data.batch_size=4", "--run.name=at-once"]) == 0
    found, wanted = (checkpoint_of(folder_of(base, name))["state_dict"] for name in ("resumed", "at-once"))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@EXHAUSTIVE
def test_blocks_are_recomputed_if_asked(base, tmp_path, monkeypatch):
    def noted(*args, **options):
        (tmp_path / "recomputed").touch()
        return checkpoint(*args, **options)

    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", noted)
    fit(base, (1, 2), tmp_path, RAGGED, RECOMPUTED, "--run.name=recomputed", "--trainer.max_steps=1")
    assert (tmp_path / "recomputed").exists()


@EXHAUSTIVE
def test_a_plan_of_shared_rows_is_refused(base, error_of):
    plan = ["plan", *(option for option in base[1:] if "run." not in option)]
    assert "sequence_parallel_size=2: `linrope plan` knows runs whose" in error_of(*plan, *on_mesh(1, 2))
    masked = ["plan", f"--config={Path(__file__).parents[2] / 'configs' / 'mlm-small.yaml'}"]
    assert "sequence_parallel_size=2: `linrope plan` knows runs whose" in error_of(*masked, *on_mesh(1, 2))


def configs() -> list:
    """Those of language models, except for softmax attention without a window."""
    paths = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    paths = [path for path in paths if "task" not in yaml.safe_load(path.read_text()) and "softmax" not in path.stem]
    return [pytest.param(path, id=path.stem, marks=EXHAUSTIVE) for path in paths]


@pytest.mark.parametrize("config", configs())
def test_devices_share_rows_in_every_shipped_config_of_language_models(config, text_file, tmp_path):
    options = [*tiny_options(text_file, tmp_path), "--model.n_layers=4", "--model.d_model=128", "--run.start_from=null"]
    options += [*on_mesh(1, 2), "--trainer.val_check_interval=2", "--trainer.precision=32-true"]
    options += ["--data.test_stride=16"]
    code, out, err = Run(["fit", f"--config={config}", *options], tmp_path, ranks=2).wait()
    assert code == 0, err
    assert re.search(r"^step 2/2  loss \d\.\d+  bpb \d\.\d+  [\d,]+ tok/s  0:00 left$", out, re.M)


@EXHAUSTIVE
def test_devices_share_the_rows_of_masked_lm(tmp_path, text_file, double):
    config = Path(__file__).parents[2] / "configs" / "mlm-small.yaml"
    options = [option for option in tiny_options(text_file, tmp_path) if "--sample" not in option]
    options += ["--data.context=27", "--trainer.max_steps=20", "--trainer.precision=32-true", "--model.d_ff=32"]
    options += ["--trainer.limit_val_batches=1.0"]
    args = ["fit", f"--config={config}", *options, "--trainer.log_every_n_steps=1"]
    fit(args, (2, 2), tmp_path, "--run.name=shared")
    assert main([*args, *alone(2, []), "--run.name=alone"]) == 0
    ours, expected = (tmp_path / "runs" / name / "version_0" for name in ("shared", "alone"))
    found, wanted = checkpoint_of(ours)["state_dict"], checkpoint_of(expected)["state_dict"]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for name in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"):
        found, wanted = losses(ours, name), losses(expected, name)
        relative = 1e-9 if "train" in name else 1e-6  # validation sums in float32
        assert list(map(float, found.values())) == pytest.approx(list(map(float, wanted.values())), rel=relative)


SIZES = {"vocab_size": 257, "d_model": 16, "n_layers": 1, "n_heads": 2}
PREDICTING = {
    "language model": lambda: LanguageModelingModule(LanguageModelConfig(**SIZES)),
    "segments": lambda: LanguageModelingModule(LanguageModelConfig(**SIZES), segment_length=4),
    "masked": lambda: MaskedLMModule(EncoderConfig(**SIZES, dropout=0.0)),
}


def predicted(name: str, is_shared: bool) -> list[dict[str, float]]:
    """The predictions for two rows, the first of which has targets in its first half only."""
    torch.manual_seed(0)
    task = PREDICTING[name]().eval()
    inputs, targets = torch.randint(256, (2, 2, 13)).unbind()
    targets[0, 6:] = -100
    trainer = SimpleNamespace(strategy=SimpleNamespace(sequence_group=SequenceGroup() if is_shared else None))
    task.trainer, task._stage = trainer, "predict"
    with torch.inference_mode():
        return task.predict_step({"inputs": inputs, "targets": targets}, 0)


def test_predictions_are_those_of_whole_rows_on_every_device(tmp_path):
    of_ranks = run_on_ranks(2, tmp_path, {name: partial(predicted, name, True) for name in PREDICTING})
    for name in PREDICTING:
        expected = predicted(name, False)
        assert expected[0]["masked" if name == "masked" else "targets"] == 6
        for found in of_ranks:
            assert found[name] == [pytest.approx(row, rel=1e-5) for row in expected]


@EXHAUSTIVE
@pytest.mark.parametrize("config", ["finetune-classification", "translation-small"])
def test_tasks_that_read_whole_rows_refuse_to_share_them(config, tmp_path):
    path = Path(__file__).parents[2] / "configs" / f"{config}.yaml"
    options = [f"--config={path}", f"--run.folder={tmp_path}", *on_mesh(1, 2)]
    code, _, err = Run(["fit", *options], tmp_path, ranks=2).wait()
    assert code == 2
    assert "share rows, which the tasks language_modeling and masked_lm can" in " ".join(err.split())


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.context=1"], "data.context=1 leaves 1 tokens, and each of the 2 devices that share a row needs one"),
        (
            ["--data.context=25", "--segment_length=6"],
            "data.context=25 leaves 1 tokens for the last segment, after 2 of 2 × 6, and each of the 2 devices",
        ),
        (
            ["--model.window=null"],
            "sequence_parallel_size=2 needs a state of fixed size, but layer 1 is softmax",
        ),
        (
            ["--trainer.strategy.data_parallel_size=2"],
            "data_parallel_size=2 × sequence_parallel_size=2 must make 2, the number of devices",
        ),
        (
            ["--trainer.strategy.process_group_backend=mpi"],
            "trainer.strategy.process_group_backend='mpi': this PyTorch has none.",
        ),
        (
            ["--run.compile=true"],
            "run.compile=True does not go with trainer.strategy.sequence_parallel_size: drop one.",
        ),
    ],
)
def test_what_devices_cannot_share_is_refused_on_all(base, tmp_path, options, said):
    err = fit(base, (1, 2), tmp_path, *options, "--run.name=refused", code=2)
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_the_sizes_of_a_mesh_make_the_number_of_devices():
    assert mesh_sizes(6, "auto", 1) == (6, 1)
    assert mesh_sizes(6, "auto", 2) == (3, 2)
    assert mesh_sizes(6, 2, "auto") == (2, 3)
    assert mesh_sizes(6, "auto", "auto") == (1, 6)
    with pytest.raises(InputError, match=r"data_parallel_size=auto × sequence_parallel_size=4 must make 6"):
        mesh_sizes(6, "auto", 4)
    with pytest.raises(InputError, match="must be numbers of devices"):
        mesh_sizes(6, "auto", 0)
