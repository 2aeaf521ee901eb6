"""Runs on several processes in trouble: ranks that differ, fail, hang or are killed end all, with one clear message."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from linrope.cli import ranks
from linrope.cli.main import main
from linrope.errors import DamagedFile, InputError
from linrope.models.saving import open_checkpoint
from linrope.training import LanguageModelingModule, task
from linrope.training.agreement import MAY_DIFFER, differences_of, require_same_samples, run_values
from linrope.training.rank_board import RankBoard
from tests.conftest import write_documents
from tests.processes import Run, free_port
from tests.training.test_ddp import CONSTANT, MODEL, folder_of, last, texts_of
from tests.training.test_fsdp import checkpoint_of, require_same_training
from tests.training.test_resume import TRAINED, equal, load, losses

TIMEOUT = 3
TWO = ["--trainer.devices=2", "--trainer.strategy=DDPStrategy", f"--trainer.strategy.timeout={TIMEOUT}"]
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("devices", [1, 2])
def test_processes_that_torchrun_starts_beyond_the_devices_are_refused(monkeypatch, devices):
    """With one device each would train by itself, in one folder."""
    started = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "3"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)
    with pytest.raises(InputError, match=rf"devices={devices} × trainer\.num_nodes=1 are not the 3 processes"):
        ranks.require_launched(trainer)
    monkeypatch.setenv("WORLD_SIZE", str(devices))
    ranks.require_launched(trainer)


@pytest.mark.parametrize(
    ("machines", "of_torchrun", "warns"), [("2", "True", True), ("1", "True", False), ("2", "False", False)]
)
def test_a_server_that_outlives_restarts_of_several_machines_is_named(
    monkeypatch, capsys, machines, of_torchrun, warns
):
    started = {"TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": machines}
    for name, value in {**started, "TORCHELASTIC_USE_AGENT_STORE": of_torchrun}.items():
        monkeypatch.setenv(name, value)
    ranks.require_launched(Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err) == warns


def test_ranks_meet_whatever_restarts_their_machines_have_counted(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    environment, boards = LightningEnvironment(), []
    for rank, restarts in enumerate("01"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        boards.append(RankBoard(environment, rank, 2, seconds=5))
    boards[1].write("values/1", 17)
    assert boards[0].read_all("values") == {1: 17}


def test_a_rank_that_failed_by_itself_is_known_after_its_server_has_ended(monkeypatch):
    """Rank 0 prints its own error, and was not killed."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    host, other = (RankBoard(LightningEnvironment(), rank, 2, seconds=5) for rank in range(2))

    def gone(*args):
        raise torch.distributed.DistError("Broken pipe")

    def explained():
        with monkeypatch.context() as patch:
            patch.setattr(other, "write", gone)
            return other.why_collective_failed(RuntimeError("Connection closed by peer"))

    assert "rank 0 was lost: it was killed" in str(explained())
    host.announce("no room", own=True)
    assert other.failed() == [0]  # as the watch asks at each beat
    assert (str(explained()), explained().printed_by) == ("stopped, because rank 0 failed.", 0)


KILLED_ONCE = """
import os, signal
from pathlib import Path
from lightning.pytorch import Callback

class KilledOnce(Callback):
    def on_train_batch_start(self, trainer, *args):
        mark = Path(__file__).with_name("killed")
        if trainer.global_rank == 1 and trainer.global_step == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@EXHAUSTIVE
def test_two_machines_restart_after_one_rank_was_killed(base, tmp_path):
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    run = ["--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.strategy=ddp", "--run.name=machines"]
    run += [f"--import={tmp_path}/killed_once.py", "--trainer.callbacks+=killed_once.KilledOnce", "--ckpt_path=auto"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=1", "-m", "linrope"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [subprocess.Popen([*torchrun, *base, *run], env=environment) for _ in range(2)]
    try:
        assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert (tmp_path / "killed").exists()
    assert list(losses(folder_of(base, "machines"))) == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Options of all runs: a small model on 86 documents, with a checkpoint every two steps."""
    folder = tmp_path_factory.mktemp("operations")
    texts = write_documents(folder / "texts", (1 + 37 * number % 199 for number in range(86)))
    options = [f"--data.path={texts}", "--data.context=24", "--data.batch_size=2", f"--run.folder={folder}"]
    options += ["--data.fractions=[0.7, 0.2, 0.1]", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    options += ["--run.checkpoint_every_n_steps=2", "--trainer.max_steps=6", "--trainer.logger=CSVLogger"]
    return ["fit", *MODEL, "--model.dropout=0.1", *CONSTANT, *options]


def at_step_4_of_rank_1(patch: pytest.MonkeyPatch, happens: Callable[[], None], rank: int = 1) -> None:
    """In processes to come, something happens on rank 1, or another, before the forward pass of step 4."""
    step = LanguageModelingModule.training_step

    def training_step(self: LanguageModelingModule, batch, batch_idx):
        if rank_zero_only.rank == rank and self.trainer.global_step == 3:
            happens()
        return step(self, batch, batch_idx)

    patch.setattr(LanguageModelingModule, "training_step", training_step)


def fail() -> None:
    raise AttributeError("of rank 1")


def read_damaged() -> None:
    raise DamagedFile("tokens.bin ends early.")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(TIMEOUT + 5)
    os._exit(9)  # as its launcher would end it


class Launched(LightningEnvironment):
    """A launcher that tells a process its rank before it has a Trainer, as torchrun does."""

    detect = staticmethod(lambda: True)

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])


HAPPENS = {"fails": fail, "killed": be_killed, "hangs": hang}


def start(base: list[str], folder: Path, name: str) -> Run:
    """A run of two processes to which something happens."""
    with pytest.MonkeyPatch.context() as patch:
        at_step_4_of_rank_1(patch, HAPPENS[name])
        return Run([*base, *TWO, f"--run.name={name}"], folder, ranks=2)


@pytest.fixture(scope="module")
def killed(base, tmp_path_factory) -> tuple[list[int], str]:
    """As `printed`, of a rank that is killed."""
    run = start(base, tmp_path_factory.mktemp("killed"), "killed")
    _, _, err = run.wait()
    return run.codes, err


@pytest.fixture(scope="module")
def printed(base, tmp_path_factory) -> dict[str, tuple[list[int], str]]:
    """Exit codes by rank, and standard error of runs of two processes, by what happens."""
    runs, results = {"fails": start(base, tmp_path_factory.mktemp("fails"), "fails")}, {}
    options = {1: ["--optimizer.lr=0.02", "--model.rope.base=500", f"--run.folder={texts_of(base).parent}/other"]}
    folder = tmp_path_factory.mktemp("differ")
    runs["differ"] = Run([*base, *TWO, "--run.name=differ"], folder, ranks=2, more=options)
    for name, run in runs.items():
        _, _, err = run.wait()
        results[name] = run.codes, err
    return results


@pytest.mark.exhaustive
def test_the_error_of_one_rank_is_printed_by_it_and_the_others_end(printed):
    codes, err = printed["fails"]
    assert codes == [1, 1]
    assert err.count("Traceback") == err.count("AttributeError: of rank 1") == 1
    assert "linrope: rank 1: Traceback" in err
    assert err.count("linrope: error: stopped, because rank 1 failed.\n") == 1


@EXHAUSTIVE
def test_a_job_that_lost_a_rank_restarts_to_the_weights_of_one_that_did_not(killed, base, tmp_path):
    """The same command line starts a new run and goes on with it."""
    shutil.copytree(folder_of(base, "killed"), folder_of(base, "restarted"))
    for name in ("whole", "restarted"):
        run = Run([*base, *TWO, f"--run.name={name}", "--ckpt_path=auto"], tmp_path, ranks=2)
        code, _, err = run.wait()
        assert code == 0, err
        assert f"--ckpt_path=auto {'starts a new run' if name == 'whole' else 'is '}" in err
    whole, restarted = (load(folder_of(base, name)) for name in ("whole", "restarted"))
    assert all(equal(whole[key], restarted[key]) for key in TRAINED)


@EXHAUSTIVE
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "ShardedStrategy"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(base, tmp_path, strategy):
    options = ["--trainer.devices=2", f"--trainer.strategy={strategy}", "--trainer.max_steps=2000"]
    if strategy == "ShardedStrategy":
        options += ["--trainer.strategy.sequence_parallel_size=2"]
    run = Run([*base, *options, f"--run.name=signal-{strategy}"], tmp_path, ranks=2)
    run.wait_for_steps(3)
    run.send(signal.SIGTERM, rank=1)
    code, _, err = run.wait()
    assert [code, *run.codes] == [128 + signal.SIGTERM] * 3, err
    step = int(re.findall(r"stopped after step (\d+)\.", err)[0])
    assert open_checkpoint(last(folder_of(base, f"signal-{strategy}")))["global_step"] == step >= 3
    assert "Traceback" not in err


@EXHAUSTIVE
def test_an_input_error_of_one_rank_is_printed_by_it(base, tmp_path, monkeypatch):
    at_step_4_of_rank_1(monkeypatch, read_damaged)
    run = Run([*base, *TWO, "--run.name=damaged"], tmp_path, ranks=2)
    _, _, err = run.wait()
    assert run.codes == [1, 2]
    lines = re.findall("^linrope: .*$", err, re.M)
    assert sorted(lines)[-2:] == [
        "linrope: error: stopped, because rank 1 failed.",
        "linrope: rank 1: error: tokens.bin ends early.",
    ]


FSDP = ["--trainer.strategy=fsdp2", "--trainer.devices"]


@pytest.fixture(scope="module")
def four(base, tmp_path_factory) -> Path:
    """The folder of a run of three steps on four processes that share the model."""
    run = Run([*base, *FSDP, "4", "--trainer.max_steps=3", "--run.name=four"], tmp_path_factory.mktemp("four"), ranks=4)
    code, _, err = run.wait()
    assert code == 0, err
    return folder_of(base, "four")


@EXHAUSTIVE
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_run_of_four_goes_on_with_fewer_to_the_weights_of_one(four, base, tmp_path, n):
    alone = folder_of(base, "alone")
    if not alone.exists():
        assert main([*base, "--trainer.accumulate_grad_batches=4", "--run.name=alone"]) == 0
    name, batches = f"of-four-{n}", f"--trainer.accumulate_grad_batches={4 // n}"
    args = [*base, batches, f"--ckpt_path={last(four)}", f"--run.name={name}"]
    if n == 1:
        assert main(args) == 0
    else:
        code, _, err = Run([*args, *FSDP, str(n)], tmp_path, ranks=n).wait()
        assert code == 0, err
    require_same_training(folder_of(base, name), alone)


@EXHAUSTIVE
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_a_shared_model_trains_in_bfloat16(base, tmp_path, precision, dtype):
    """bf16-mixed keeps the weights and their moments in float32."""
    options = [*FSDP, "2", f"--trainer.precision={precision}", "--trainer.max_steps=12", f"--run.name={precision}"]
    code, _, err = Run([*base, *options], tmp_path, ranks=2).wait()
    assert code == 0, err
    folder = folder_of(base, precision)
    assert float(losses(folder)[12]) < float(losses(folder)[1]) - 0.1
    found = checkpoint_of(folder)
    assert {weight.dtype for weight in found["state_dict"].values() if weight.is_floating_point()} == {dtype}
    moments = [one["exp_avg"] for one in found["optimizer_states"][0]["state"].values()]
    assert {moment.dtype for moment in moments} == {dtype}


@EXHAUSTIVE
def test_a_rank_that_is_killed_is_named_and_leaves_the_last_checkpoint(killed, base):
    codes, err = killed
    assert codes == [1, -signal.SIGKILL]
    assert err.count("linrope: error: rank 1 was lost: killed, stopped, or not reachable. All ranks stop. Start") == 1
    assert "Traceback" not in err
    assert open_checkpoint(last(folder_of(base, "killed")))["global_step"] == 2


@EXHAUSTIVE
def test_a_rank_that_hangs_is_named_after_the_timeout(base, tmp_path, monkeypatch):
    at_step_4_of_rank_1(monkeypatch, hang)
    run = Run([*base, *TWO, "--run.name=hangs"], tmp_path, ranks=2)
    _, _, err = run.wait()
    assert run.codes == [1, 9]
    seen = "rank 1, last seen after reading the batch of step 4,"
    assert len(re.findall(rf"^linrope: waiting for \d s for {seen} at most {TIMEOUT} s \(", err, re.M)) == 1
    assert err.count(f"linrope: error: {seen} did not come to a collective operation in time") == 1
    assert "Traceback" not in err
    assert open_checkpoint(last(folder_of(base, "hangs")))["global_step"] == 2


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["killed", "hangs"])
def test_of_three_ranks_that_share_a_model_the_one_to_blame_is_named(base, tmp_path, name, monkeypatch):
    """Rank 2 waits too, without an error of its own as yet, when rank 0 gives up."""
    at_step_4_of_rank_1(monkeypatch, HAPPENS[name])
    options = ["--trainer.devices=3", "--trainer.strategy=ModelParallelStrategy"]
    options += [f"--trainer.strategy.timeout={TIMEOUT}", f"--run.name=three-{name}"]
    run = Run([*base, *options], tmp_path, ranks=3)
    code, _, err = run.wait()
    assert [code, *run.codes[1:]] == [1, -signal.SIGKILL if name == "killed" else 9, 1]
    assert len(re.findall(r"^linrope: (?:rank \d: )?error: rank 1(?: was lost|, last seen)", err, re.M)) == 1
    assert err.count("error: ") == 1
    assert open_checkpoint(last(folder_of(base, f"three-{name}")))["global_step"] == 2


@EXHAUSTIVE
def test_the_others_say_that_rank_0_was_killed(base, tmp_path, monkeypatch):
    at_step_4_of_rank_1(monkeypatch, be_killed, rank=0)
    run = Run([*base, *TWO, "--run.name=first-killed"], tmp_path, ranks=2)
    code, _, err = run.wait()
    assert [code, *run.codes] == [-signal.SIGKILL, -signal.SIGKILL, 1]
    assert err.count("error: rank 0 was lost: it was killed, or cannot be reached.") == 1
    assert "Traceback" not in err


@pytest.mark.exhaustive
def test_ranks_with_different_options_are_refused_with_one_message(printed, base):
    codes, err = printed["differ"]
    assert codes == [2, 2]
    said = (
        "linrope: error: the ranks of this run differ; start all of them with the same options, files and packages:\n"
        "  model.rope.base: 10000.0 on rank 0, 500.0 on rank 1\n"
        "  optimizer.lr: 0.01 on rank 0, 0.02 on rank 1\n"
    )
    assert err.endswith(said)
    assert err.count("differ;") == 1
    assert not folder_of(base, "differ").exists()
    assert not (texts_of(base).parent / "other").exists()


@EXHAUSTIVE
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_that_read_different_texts_are_refused_with_one_message(base, tmp_path, monkeypatch, strategy):
    order = task.run_order
    hash_of = {0: "ab", 1: "cd"}
    monkeypatch.setattr(
        task, "run_order", lambda trainer, seed: order(trainer, seed) | {"data.text_hash": hash_of[trainer.global_rank]}
    )
    options = ["--trainer.devices=2", f"--trainer.strategy={strategy}", f"--run.name=texts-{strategy}"]
    run = Run([*base, *options], tmp_path, ranks=2)
    _, _, err = run.wait()
    assert run.codes == [2, 2]
    assert err.endswith("options, files and packages:\n  data.text_hash: ab on rank 0, cd on rank 1\n")
    assert err.count("differ;") == 1
    assert not folder_of(base, f"texts-{strategy}").exists()


def test_the_samples_of_ranks_are_compared_without_the_times_of_their_files():
    orders = [{"data.text_hash": "ab", "data.batch_size": 2, "data.text_modified": str(rank)} for rank in range(3)]
    require_same_samples(orders)
    orders[2]["data.text_hash"] = "cd"
    with pytest.raises(InputError, match=r"this run differ; .*\n  data\.text_hash: ab on rank 0, cd on rank 2$"):
        require_same_samples(orders)


@EXHAUSTIVE
def test_an_error_before_the_start_of_one_rank_ends_all(base, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "LAUNCHERS", (Launched,))
    run = Run([*base, *TWO, "--run.name=early"], tmp_path, ranks=2, more={1: ["--model.d_modle=3"]})
    _, _, err = run.wait()
    assert run.codes == [1, 2]
    assert err.count("linrope: rank 1: error: unknown option 'model.d_modle'.") == 1
    assert err.count("linrope: error: stopped, because rank 1 failed.\n") == 1
    assert not folder_of(base, "early").exists()


@EXHAUSTIVE
def test_ranks_with_different_meshes_are_refused_before_the_mesh_is_made(base, tmp_path):
    mesh = ["--trainer.devices=2", "--trainer.strategy=ShardedStrategy", "--trainer.strategy.timeout=50"]
    sizes = {rank: [f"--trainer.strategy.sequence_parallel_size={rank + 1}"] for rank in range(2)}
    run = Run([*base, *mesh, "--run.name=meshes"], tmp_path, ranks=2, more=sizes)
    code, _, err = run.wait()
    assert [code, *run.codes] == [2] * 3
    assert "\n  trainer.strategy.init_args.sequence_parallel_size: 1 on rank 0, 2 on rank 1\n" in err
    assert err.count("differ;") == 1


def test_versions_and_missing_options_are_compared():
    config = {"model": {"d_model": 8, "rope": {"base": 10.0}}, "run": {"folder": "a"}, "data": {}}
    values = run_values(config)
    assert values["model.rope.base"] == "10.0"
    assert not set(MAY_DIFFER) & set(values)
    others = {**values, "the version of torch": "1.0"}
    fewer = {name: value for name, value in others.items() if name != "model.d_model"}
    assert differences_of({0: values, 1: values}) == []
    assert differences_of({0: values, 1: fewer, 2: others, 3: values}) == [
        f"the version of torch: {values['the version of torch']} on rank 0, 1.0 on ranks 1 and 2",
        "model.d_model: 8 on rank 0, not set on rank 1",
    ]
