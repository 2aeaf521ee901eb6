"""A grid from end to end, its speeds, and what it refuses."""

import csv
import json
import math
import multiprocessing
import re
from itertools import islice, product
from types import SimpleNamespace

import pytest
import torch
import yaml

from benchmarks.experiments import ablation, ablation_report, training_run
from benchmarks.experiments.grid import n_steps
from benchmarks.experiments.results_folder import Folder, Speed
from benchmarks.experiments.training_run import GridText, smallest_denominator, validation_batches
from benchmarks.harness.timing import Sample
from linrope import LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.data.batches.windows import EvaluationWindows
from tests.benchmarks.commands import refusal
from tests.benchmarks.experiments.test_ablation_report import run_of


@pytest.fixture
def grid(tmp_path):
    """A folder of text, and a grid of two variants, two seeds and few steps on it."""
    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / f"{name}.txt").write_text(f"the {name} quick brown fox jumps over it. " * 150)
    values = {
        "title": "Small",
        "tokens": 1340,  # 20 steps and a little
        "seeds": [0, 1],
        "reference": "linear",
        "validations": 4,
        "validation_tokens": 640,
        "precision": "32-true",
        "model": {"d_model": 16, "n_layers": 1, "n_heads": 2},
        "data": {"path": str(tmp_path / "text"), "context": 32, "batch_size": 2, "fractions": [0.6, 0.4, 0.0]},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "evaluate": {"contexts": [32, 128], "tokens": 256},
        "variants": {"linear": {}, "softmax": {"model.attention": "softmax"}},
    }
    return Changed(tmp_path, values)


class Changed:
    """A grid whose values tests change."""

    def __init__(self, folder, values):
        self.folder, self.results, self.values = folder, folder / "results", values

    def args(self) -> list[str]:
        path = self.folder / "small.yaml"
        path.write_text(yaml.safe_dump(self.values))
        return ["--grid", str(path), "--output", str(self.results), "--rounds", "1"]

    def run(self, *args, **changes) -> int:
        self.values.update(changes)
        return ablation.Ablation.main([*self.args(), *args])

    def refuse(self, capsys, *args, **changes) -> str:
        """The message with which the command ends before anything runs."""
        self.values.update(changes)
        return refusal(ablation.Ablation, [*self.args(), *args], capsys)

    def parsed(self) -> Folder:
        return ablation.Ablation.parse(self.args()).folder

    def train(self, stem, variant="linear", steps=20, **changes):
        """One run of a variant in this process; `changes` are of its settings."""
        identity = self.parsed().identity(variant, 0)
        identity["settings"] |= changes
        return training_run.run(identity, steps, self.folder / stem)

    def read(self, variant, seed):
        return json.loads((self.results / "runs" / f"{variant}-seed{seed}.json").read_text())

    def rows(self):
        return {row["variant"]: row for row in csv.DictReader((self.results / "ablation.csv").open())}

    @property
    def files(self):
        return {f.name: f.stat().st_mtime_ns for f in (self.results / "runs").glob("*.json")}


def said(capsys) -> str:
    """What was printed, in one line."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def here(monkeypatch):
    """Grids make their runs in this process: a new one takes seconds to start."""
    run = training_run.main
    monkeypatch.setattr(ablation, "run_process", lambda file, show: (run(str(file)) or 0, []))


@pytest.mark.exhaustive
def test_a_grid_end_to_end(grid, here, capsys):
    assert "--only softmx: unknown. Did you mean" in grid.refuse(capsys, "--only", "softmx")
    assert "holds no finished run" in grid.refuse(capsys, "--report")
    assert grid.run("--only", "softmax") == 0  # not even the one that the others are compared with
    alone = grid.files
    assert set(alone) == {"softmax-seed0.json", "softmax-seed1.json"}
    assert grid.parsed().read_speeds().keys() == {"softmax"}
    assert "softmax" in capsys.readouterr().out
    assert grid.run() == 0
    files = grid.files
    assert alone.items() <= files.items()
    assert set(files) == {f"{v}-seed{s}.json" for v in ("linear", "softmax") for s in (0, 1)}
    run = grid.read("linear", 1)
    assert (run["steps"], run["tokens"], run["diverged"]) == (20, 1280, None)
    assert [point["step"] for point in run["curve"]] == [5, 10, 15, 20]
    assert len(run["training"]["losses"]) == 20
    assert run["smallest_denominator"] > 0
    assert set(run["evaluation"]) == {"32", "128"}
    assert {path.suffix for path in (grid.results / "runs").iterdir()} == {".json", ".model"}
    # the weights that were kept are those that were measured
    model = LanguageModel.from_pretrained(grid.results / "runs" / "linear-seed1.model")
    assert model.n_parameters == run["parameters"]
    assert "NaN" not in (grid.results / "ablation.json").read_text()  # which is no JSON
    row = grid.rows()["softmax"]
    finals = [grid.read("softmax", seed)["final"]["bpb"] for seed in (0, 1)]
    assert float(row["mean"]) == pytest.approx(sum(finals) / 2)
    assert row["verdict"] in ("better", "worse", "within noise")
    assert "Small" in capsys.readouterr().out

    # again: nothing is run, or measured, anew; one seed more is, and no other
    assert grid.run() == 0
    assert grid.files == files
    assert grid.run(more_seeds={"linear": [2]}) == 0
    assert grid.files.keys() - files.keys() == {"linear-seed2.json"}
    assert grid.read("linear", 2)["steps"] == 20
    assert files.items() <= grid.files.items()

    # the folder of another grid is left as it is
    files, own = grid.files, dict(grid.values)
    for change, message in (
        ({"title": "Other"}, "results of another grid: those of 'Small'"),
        ({"tokens": 2560}, "results of another grid: runs of 'linear' with other options (tokens was"),
        ({"validation_tokens": 320}, "(validation_tokens was 640)"),
        ({"precision": "bf16-mixed"}, "(precision was None)"),
        ({"optimizer": {"lr": 0.02, "warmup_steps": 2}}, "optimizer was {'lr': 0.01"),
    ):
        assert message in grid.refuse(capsys, **{**own, **change})
        assert grid.files == files

    # nor do runs on another text join it, though what was found can be read without that text
    run_file = grid.results / "runs" / "linear-seed1.json"
    run_file.write_text(json.dumps({**run, "text": "that of another day"}))
    assert "runs of 'linear' on another text" in grid.refuse(capsys, **own)
    assert grid.run("--report") == 0
    assert "the runs were made on different texts: " in said(capsys)


def test_rows_of_all_lengths_are_validated_on_the_same_text(grid):
    """As much of it is read, whatever the batches of training."""
    options = {**grid.values["data"], "seed": 0}
    for variant in ({"context": 32, "batch_size": 3}, {"context": 128, "batch_size": 7}):
        data = GridText(128, **{**options, **variant})
        data.open()
        windows = EvaluationWindows(data.corpora["val"], 128, "val")
        for n_tokens, n_batches in zip((256, 1280), validation_batches("text", 1290, 128), strict=True):
            batches = list(islice(data.val_dataloader(), n_batches))
            for name in ("inputs", "targets"):
                assert {batch[name].shape for batch in batches} == {(128 // data.context, data.context)}
                read = torch.cat([batch[name].flatten() for batch in batches])
                assert torch.equal(read, torch.cat([windows[i][name] for i in range(n_tokens // 128)]))


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_where_it_was(grid, monkeypatch):
    """Stopped between validations or before one, a run ends with the same numbers as one that was never stopped."""
    whole = grid.train("whole")

    class Stopping(training_run.Recorder):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == step:
                raise InterruptedError

    monkeypatch.setattr(training_run, "SAVE_EVERY_SECONDS", 0)
    for step in (8, 10):
        with monkeypatch.context() as patched:
            patched.setattr(training_run, "Recorder", Stopping)
            with pytest.raises(InterruptedError):
                grid.train(f"cut{step}")
    changed = grid.train("cut8", optimizer={"lr": 0.02, "warmup_steps": 2})
    assert changed["steps"] == len(changed["training"]["losses"]) == 20  # begun anew, not from those steps
    assert changed["training"]["losses"][0] == whole["training"]["losses"][0] != changed["training"]["losses"][-1]
    for step in (8, 10):
        (unfinished,) = grid.folder.glob(f"cut{step}.{grid.parsed().settings['linear'].fingerprint}*/last.ckpt")
        resumed = grid.train(f"cut{step}")
        assert all(resumed[name] == whole[name] for name in ("training", "final", "curve"))
        assert unfinished.exists()  # until the result is in its place


def test_a_run_interrupted_in_its_evaluation_does_not_train_again(grid, monkeypatch):
    evaluate_text, found = training_run.evaluate_text, []

    def interrupted(*args, **options):
        found.append(evaluate_text(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training_run, "evaluate_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grid.train("run")
    monkeypatch.setattr(training_run.Recorder, "on_train_batch_end", None)  # another step would fail here
    again = grid.train("run")
    assert [again["evaluation"]] == found
    assert (again["steps"], len(again["curve"])) == (20, 4)


def test_a_loss_that_is_no_number_at_the_end_is_a_diverged_run(grid, monkeypatch):
    monkeypatch.setattr(training_run, "_validation_metrics", lambda trainer: {"loss": math.nan, "bpb": math.nan})
    assert grid.train("run", steps=4)["diverged"] == "val_loss is nan after the last step"


def test_a_curriculum_counts_the_tokens_of_its_steps_and_has_no_one_speed(grid, monkeypatch):
    stages = [{"tokens": 512, "seq_len": 32, "batch_size": 2}, {"tokens": 128, "seq_len": 128, "batch_size": 1}]
    longer = {"data.curriculum": stages, "data.context": 128}
    monkeypatch.setattr(ablation.Ablation, "make_runs", lambda *args: None)
    grid.run(variants={"longer": longer, "linear": {}}, reference="longer")
    folder = grid.parsed()
    assert folder.read_speeds().keys() == {"linear"}
    steps = n_steps(folder.grid, folder.settings["longer"])
    assert steps == 12  # 8 of 64 tokens and 6 of 128 are 1,280 of 1,340; four validations at equal distances leave 12
    found = grid.train("longer", "longer", steps)
    assert found["tokens"] == 8 * 64 + 4 * 128
    assert [point["tokens"] for point in found["curve"]] == [3 * 64, 6 * 64, 8 * 64 + 128, 8 * 64 + 4 * 128]


def test_ctrl_c_keeps_finished_runs(grid, here, monkeypatch, capsys):
    make = ablation.run_process

    def stop_at_the_second(spec_file, show):
        if spec_file.stem == "softmax-seed0":
            raise KeyboardInterrupt
        return make(spec_file, show)

    monkeypatch.setattr(ablation, "run_process", stop_at_the_second)
    assert grid.run() == 130
    assert set(grid.files) == {"linear-seed0.json"}
    told = capsys.readouterr().out
    assert "3 runs are left" in told
    assert f"linear, seed 0: {grid.read('linear', 0)['final']['bpb']:.3f} bits per byte" in told


def test_two_commands_on_one_folder_share_the_runs(grid, monkeypatch, capsys):
    """What another process holds is left to it, and what it has made meanwhile is not made again."""
    made = []

    def run_process(spec_file, show):
        made.append(spec_file.stem)
        for name in {spec_file.stem, "softmax-seed0"}:  # the other one as the other process does meanwhile
            spec_file.with_name(f"{name}.json").write_text(json.dumps(run_of(name, 0, 2.0)))
        return 0, []

    monkeypatch.setattr(ablation, "run_process", run_process)
    monkeypatch.setattr(ablation.Ablation, "finish", lambda self: 0)
    runs = grid.results / "runs"
    runs.mkdir(parents=True)
    with ablation.claimed(runs / "softmax-seed1.spec"):
        assert grid.run() == 0
    assert made == ["linear-seed0", "linear-seed1"]
    told = said(capsys)
    assert "softmax, seed 0: another process made it meanwhile" in told
    assert "softmax, seed 1: another process is making it" in told
    made = {f"{run}.json" for run in ("linear-seed0", "linear-seed1", "softmax-seed0")}
    assert {file.name for file in runs.iterdir()} == made  # and no file of a run under way


def test_speeds_are_measured_by_one_process_at_a_time(grid, monkeypatch, capsys):
    grid.results.mkdir(parents=True)
    lock = ablation.claimed(grid.results / "speed.lock")
    lock.__enter__()
    monkeypatch.setattr(ablation.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    monkeypatch.setattr(ablation.Ablation, "make_runs", lambda self, speeds: None)
    monkeypatch.setattr(ablation.Ablation, "finish", lambda self: 0)
    assert grid.run() == 0
    assert said(capsys).count("another process measures the speeds of this folder: waiting for it") == 1
    assert [file.name for file in grid.results.iterdir() if file.is_file()] == ["speed.json"]


@pytest.mark.parametrize("file", ["runs/other.json", "speed.json"])
@pytest.mark.parametrize("text", ["{}", "[1]", "{bad"])
def test_a_folder_with_files_of_something_else(grid, file, text, capsys):
    file = "runs/other.json" if text == "{}" else file  # speeds may be none
    message = "cannot be read: .* Move it" if text == "{bad" else "is not a result of a grid"
    (grid.results / "runs").mkdir(parents=True)
    (grid.results / file).write_text(text)
    assert re.search(f"{file} {message}", grid.refuse(capsys))


def test_a_run_that_sigterm_ends_is_interrupted_not_done(grid, monkeypatch):
    """Lightning turns SIGTERM into an exit that looks like success. A forked process has nothing to import."""
    fork, codes = multiprocessing.get_context("fork"), []
    stepped = fork.Event()

    def terminate_at_the_first_step(spec_file, show):
        process = fork.Process(target=training_run.command, args=(str(spec_file),))
        process.start()
        assert stepped.wait(60)
        process.terminate()
        process.join()
        codes.append(process.exitcode)
        return process.exitcode, []

    monkeypatch.setattr(training_run, "say", lambda **shown: stepped.set())
    monkeypatch.setattr(ablation, "run_process", terminate_at_the_first_step)
    assert grid.run(tokens=64 * 10**5) == 130
    assert codes == [130]
    assert not grid.files
    (unfinished,) = grid.results.glob("runs/linear-seed0.*.unfinished/last.ckpt")
    kept = torch.load(unfinished, weights_only=True)
    assert kept["global_step"] == len(kept["callbacks"]["Recorder"]["losses"]) > 0


@pytest.mark.exhaustive
def test_runs_in_processes_of_their_own(grid):
    assert grid.run("--only", "linear") == 0
    assert grid.read("linear", 1)["steps"] == 20


def test_a_run_that_fails_is_told_with_its_reason(grid, capsys, monkeypatch):
    script = grid.folder / "python"
    progress = json.dumps({"completed": 1, "now": "training"})
    script.write_text(f"#!/bin/sh\necho '{progress}'\necho no such thing: $@\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(ablation.sys, "executable", str(script))
    assert grid.run() == 1
    assert "linear, seed 0 failed:\nno such thing: -m benchmarks.training_run" in capsys.readouterr().out
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    assert grid.run() == 1  # as a machine out of memory does; Ctrl-C it is not
    assert "linear, seed 0 was ended by SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize("rope", [RotaryConfig(), RotaryConfig(rotary_dim=4, placement="signed")], ids=str)
def test_the_smallest_denominator_is_that_of_the_operator(rope):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, rope=rope)).eval()
    layer = model.blocks[0].attention
    with torch.no_grad():
        x = model.blocks[0].attention_norm(model.embedding(torch.arange(9)[None]))
        q, k, _ = layer.qkv(x).view(1, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
        features_q, features_k = (torch.nn.functional.elu(x[..., 4 if rope.signed else 0 :]) + 1 for x in (q, k))
        den = (features_q * features_k.cumsum(dim=2)).sum(dim=-1)
    row = SimpleNamespace(context=9, corpora={"val": SimpleNamespace(tokens=torch.arange)})
    assert smallest_denominator(model, row) == pytest.approx(den.min().item(), rel=1e-5)


def test_a_recall_grid_reports_accuracy(grid, here, capsys):
    model = {**grid.values["model"], "vocab_size": 32}
    data = {"vocab_size": 32, "tokens_per_batch": 256, "test_rows": 8, "cases": [[16, 2], [32, 8]]}
    data["stages"] = [[16, 2, 1], [32, 4, 1]]
    assert grid.run(task="mqar", tokens=2048, validations=2, model=model, data=data, evaluate={}) == 0
    finals = {run: grid.read(*run)["final"] for run in product(("linear", "softmax"), (0, 1))}
    assert all({"accuracy", "accuracy/16x2", "accuracy/32x8"} <= final.keys() for final in finals.values())
    assert grid.read("linear", 0)["steps"] == 8
    gaps = [finals["softmax", seed]["accuracy"] - finals["linear", seed]["accuracy"] for seed in (0, 1)]
    assert float(grid.rows()["softmax"]["difference"]) == pytest.approx(sum(gaps) / 2)
    by_case = json.loads((grid.results / "ablation.json").read_text())["by_case"]["softmax"]
    of_case = [finals["softmax", seed]["accuracy/32x8"] for seed in (0, 1)]
    assert by_case["32x8"]["mean"] == pytest.approx(sum(of_case) / 2)
    assert "accuracy after 2,048 tokens" in capsys.readouterr().out


def test_speeds_that_are_added_later_are_brought_to_the_same_hour(grid, monkeypatch, capsys):
    """The reference took 1 s a step then and 2 s now: what takes 4 s now would have taken 2 s."""
    seconds = {"linear": 1.0, "softmax": 3.0}

    def alternation(steps, *args, **options):
        samples = {name: Sample((seconds[name],)) for name in steps}
        return SimpleNamespace(samples=samples, failures={}, run=lambda *args: None)

    monkeypatch.setattr(ablation, "Alternation", alternation)
    monkeypatch.setattr(ablation.Ablation, "make_runs", lambda *args: None)
    grid.run()

    def speeds() -> list[float]:
        found = json.loads((grid.results / "speed.json").read_text()).values()
        return sorted(speed["tokens_per_second"] for speed in found)

    first = speeds()
    seconds.update(linear=2.0, none=4.0)
    grid.run(variants={**grid.values["variants"], "none": {"model.rope": None}})
    assert "linear trains at 0.50 times its speed when the other variants were measured" in said(capsys)
    second = speeds()
    assert first == [64 * 2 / 2 / 3.0, 64 * 2 / 2 / 1.0]
    assert second == [first[0], 64 * 2 / 2 / 2.0, first[1]]
    seconds["far"] = 1.0
    grid.run(variants={"linear": {}, "far": {"model.rope.base": 500.0}})  # a grid of fewer variants forgets none
    assert speeds() == sorted([*second, 2 * first[1]])
    seconds["near"] = 8.0  # linear is the clock, though another is the reference: 2 s for its 1 s then
    grid.run(variants={"linear": {}, "near": {"model.rope.base": 50.0}}, reference="near")
    assert speeds() == sorted([*second, 2 * first[1], first[1] / 4])


def test_what_is_not_known_of_speeds_is_said():
    said = ablation_report.remarks_on_speeds({"a": Speed(1.0, 0.1, "one"), "b": Speed(1.0, 0.25, "two")}, [])
    assert "within 25% of each other (b)" in said[0]
    assert "on different machines, so this table is an estimate: one, two" in said[1]
    assert ablation_report.remarks_on_speeds({"b": Speed(1.0, None, "one")}, ["a"]) == [
        "not in this table, without a speed or a validation that early: a"
    ]


def test_steps_that_are_the_same_are_measured_once(grid, monkeypatch):
    monkeypatch.setattr(ablation.Ablation, "make_runs", lambda *args: None)
    variants = {"linear": {}, "slow": {"optimizer.lr": 0.005}, "softmax": {"model.attention": "softmax"}}
    grid.run(variants={**variants, "muon": {"optimizer.name": "muon"}})
    assert len(json.loads((grid.results / "speed.json").read_text())) == 3
    found = grid.parsed().read_speeds()
    assert found["slow"] == found["linear"] not in (found["softmax"], found["muon"])
    grid.run(precision="bf16-mixed")
    assert len(json.loads((grid.results / "speed.json").read_text())) == 6


@pytest.mark.exhaustive
def test_grids_train_in_bfloat16_and_with_muon_where_they_say_so(grid):
    full = grid.train("full")
    assert "precision" not in full["measured"]  # as in results that are older than the option
    assert grid.train("muon", optimizer={"lr": 0.01, "warmup_steps": 2, "name": "muon"})["final"] != full["final"]
    grid.values["precision"] = "bf16-mixed"
    assert grid.parsed().grid.measured["precision"] == "bf16-mixed"
    mixed = grid.train("mixed")
    assert mixed["final"] != full["final"]
    assert mixed["final"]["bpb"] == pytest.approx(full["final"]["bpb"], rel=0.05)
