"""Grids of `linrope fit` runs of any task."""

import json
import threading
from pathlib import Path

import pytest
import yaml

from benchmarks.experiments import family_report as report
from benchmarks.experiments.family import Family, FamilyGrid, RunFailed
from benchmarks.experiments.results_folder import claimed
from linrope.errors import InputError
from tests.benchmarks.commands import refusal

GRID = {
    "title": "Tiny",
    "question": "Does it run?",
    "config": "configs/mlm-small.yaml",
    "metric": "val_loss",
    "label": "nats",
    "reference": "softmax",
    "seeds": [3],
    "options": {
        "model.d_model": 8,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.context": 32,
        "data.batch_size": 2,
        "trainer.max_steps": 4,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 2,
    },
    "scores": ["test_accuracy"],
    "variants": {
        "softmax": {"model.attention": "softmax"},
        "started": {"start_from": "softmax"},
    },
}


def run_of(variant, seed, *losses):
    curve = [{"step": 10 * (n + 1), "val_loss": loss} for n, loss in enumerate(losses)]
    return {"variant": variant, "seed": seed, "parameters": 7, "curve": curve, "test": {"test_bleu": losses[-1] * 10}}


def test_rows_have_differences_times_and_steps():
    """By hand: b reaches a's last loss half way between its validations at step 10 and 20, and takes twice the time."""
    results = [run_of("a", 0, 4.0, 3.0), run_of("a", 1, 4.5, 3.5)]
    results += [run_of("b", 0, 4.0, 2.0), run_of("b", 1, 4.5, 2.5)]
    runs = report.by_variant(results, ["a", "b", "c"])
    b, a, *scores = report.rows_of(runs, {"a": 0.1, "b": 0.2}, "a", "val_loss", ["test_bleu"])
    assert (a.variant, b.variant, [row.metric for row in scores]) == ("a", "b", ["test_bleu"] * 2)
    assert (b.mean, b.difference, b.difference_interval) == pytest.approx((2.25, -1 / 3.25, 0))
    assert (b.seconds, b.at_equal_seconds, a.at_equal_seconds) == (4.0, 4.25, 3.25)
    assert b.difference_at_equal_seconds == pytest.approx(1 / 3.25)
    assert (a.share_of_steps, b.share_of_steps) == (1, 0.75)
    assert b.interval == pytest.approx(12.706 * 0.5 / 2)  # t · s / √n, s = 0.25 · √2
    assert (scores[0].variant, scores[0].mean, scores[0].difference) == ("b", 22.5, -10)
    tables = [make([b, a, *scores], "Tiny", "nats", "a") for make in (report.table_of, report.table_at_equal_time)]
    assert [table.title for table in tables] == ["Tiny", "Tiny"]
    assert [list(table.columns[0].cells) for table in tables] == [["b", "a"], ["a", "b"]]


def interrupted(*unused):
    raise KeyboardInterrupt


@pytest.mark.exhaustive
def test_runs_are_made_once_and_start_from_others(tmp_path, capsys, monkeypatch):
    text, grid = tmp_path / "text.txt", tmp_path / "tiny.yaml"
    text.write_bytes(bytes(range(32, 127)) * 40)
    grid.write_text(yaml.safe_dump(GRID))
    command = ["--grid", str(grid), "--data", str(text), "--output", str(tmp_path / "out"), "--jobs", "2"]
    assert "starts from softmax, which has no result" in refusal(Family, [*command, "--only", "started"], capsys)
    assert Family.main(command) == 0
    results = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out/runs").glob("*.json")}
    assert sorted(results) == ["softmax-seed3", "started-seed3"]
    assert [row["step"] for row in results["softmax-seed3"]["curve"]] == [2, 4]
    assert results["started-seed3"]["curve"][0]["val_loss"] < results["softmax-seed3"]["curve"][0]["val_loss"]
    assert 0 <= results["softmax-seed3"]["test"]["test_accuracy"] <= 1
    assert str(tmp_path) not in (tmp_path / "out" / "runs" / "softmax-seed3.json").read_text()
    assert "softmax, seed 3:" in capsys.readouterr().out
    assert Family.main([*command, "--speeds", "--rounds", "2"]) == 0
    assert json.loads((tmp_path / "out" / "speeds.json").read_text()).keys() == {"softmax", "started"}
    assert "seed 3:" not in capsys.readouterr().out
    table = (tmp_path / "out" / "family.csv").read_text()
    monkeypatch.setattr(Family, "measured_speeds", interrupted)
    assert Family.main([*command, "--speeds"]) == 130
    assert (tmp_path / "out" / "family.csv").read_text() == table  # that of the finished runs
    grid.write_text(yaml.safe_dump({**GRID, "options": {**GRID["options"], "optimizer.lr": 1.0}}))
    assert "another optimizer.lr: give another folder" in refusal(Family, command, capsys)


@pytest.mark.exhaustive
def test_a_failed_run_is_told(tmp_path, capsys):
    text, grid = tmp_path / "text.txt", tmp_path / "tiny.yaml"
    text.write_bytes(bytes(range(32, 127)) * 40)
    grid.write_text(yaml.safe_dump({**GRID, "variants": {"softmax": {"data.context": 10_000}}}))
    assert Family.main(["--grid", str(grid), "--data", str(text), "--output", str(tmp_path / "out")]) == 1
    assert "data.context=10000" in capsys.readouterr().out


@pytest.fixture
def with_a_result(tmp_path):
    """A command for the tiny grid, one of whose runs is finished."""
    text, grid, runs = tmp_path / "text.txt", tmp_path / "tiny.yaml", tmp_path / "out" / "runs"
    text.write_bytes(bytes(range(32, 127)) * 40)
    grid.write_text(yaml.safe_dump(GRID))
    runs.mkdir(parents=True)
    command = ["--grid", str(grid), "--data", str(text), "--output", str(tmp_path / "out")]
    spec = Family(Family.parse(command)).specs[0]
    result = {**run_of("softmax", 3, 4.0, 3.0), **spec.recorded, "test": {"test_accuracy": 0.5}}
    (runs / "softmax-seed3.json").write_text(json.dumps(result))
    return command


def test_what_a_run_would_find_wrong_is_found_before(with_a_result, tmp_path, capsys):
    grid = tmp_path / "tiny.yaml"
    grid.write_text(yaml.safe_dump({**GRID, "variants": {**GRID["variants"], "last": {"model.d_modle": 8}}}))
    assert "variants: last: unknown option 'model.d_modle'" in refusal(Family, with_a_result, capsys)
    for name, value, message in [
        ("metric", "val_los", "metric='val_los' is not in the validation of softmax, seed 3: choose one of val_loss."),
        ("scores", ["test_los"], "scores: test_los is not in the test of softmax, seed 3: choose of test_accuracy."),
    ]:
        grid.write_text(yaml.safe_dump({**GRID, name: value}))
        assert message in refusal(Family, [*with_a_result, "--report"], capsys)


def test_results_of_other_data_or_another_configuration_are_refused(with_a_result, tmp_path, capsys, monkeypatch):
    Family.parse(with_a_result)
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40 + b"!")
    assert "with another text at data.path: give another folder" in refusal(Family, with_a_result, capsys)
    grid = tmp_path / "tiny.yaml"
    grid.write_text(yaml.safe_dump({**GRID, "config": "configs/mlm-roformer.yaml"}))
    assert "with another configs/mlm-roformer.yaml" in refusal(Family, [*with_a_result, "--report"], capsys)


def test_after_a_run_that_fails_those_under_way_go_on_and_none_begins(with_a_result, tmp_path, capsys, monkeypatch):
    grid, runs, has_failed = tmp_path / "tiny.yaml", tmp_path / "out" / "runs", threading.Event()
    result = (runs / "softmax-seed3.json").read_text()

    def run_process(self, spec, file):
        if spec.variant == "broken":
            has_failed.set()
            raise RunFailed("broken, seed 3 failed:\nfor a reason")
        assert spec.variant == "slow"
        assert has_failed.wait(60)
        Path(spec.result).write_text(result.replace('"softmax"', '"slow"'))

    monkeypatch.setattr(Family, "run_process", run_process)
    variants = dict.fromkeys(("softmax", "slow", "broken", "unmade"), GRID["variants"]["softmax"])
    grid.write_text(yaml.safe_dump({**GRID, "variants": variants}))
    assert Family.main([*with_a_result, "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert "slow, seed 3: 3.0000 nats" in out
    assert "broken, seed 3 failed:\nfor a reason" in out
    assert {file.name for file in runs.glob("*.json")} == {"softmax-seed3.json", "slow-seed3.json"}


def test_a_run_that_another_process_makes_is_left_to_it(with_a_result, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Family, "run_process", lambda *args: pytest.fail("made twice"))
    result = tmp_path / "out" / "runs" / "softmax-seed3.json"
    with claimed(result.with_name("started-seed3.spec")):
        assert Family.main(with_a_result) == 0
    assert "started, seed 3: another process is making it" in capsys.readouterr().out
    result.rename(tmp_path / "kept")
    with claimed(result.with_suffix(".spec")):
        assert Family.main(with_a_result) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "another process is making the run that it starts from: give the command again" in told


def test_errors():
    for change, message in [
        ({"reference": "c"}, "reference='c' is no variant"),
        ({"variants": {"softmax": {"start_from": "linear"}}}, "softmax starts from 'linear', which is no variant"),
        ({"seeds": 3}, "seeds=3 has the wrong type"),
        ({"variants": {"softmax": 3}}, "variants: softmax is 3: give its options by name"),
        ({"pictures": {"": ["title"]}}, "pictures: '' is .*: give its title and a list of variants"),
    ]:
        with pytest.raises(InputError, match=message):
            FamilyGrid(**{**GRID, **change})
