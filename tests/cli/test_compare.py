"""`linrope compare`: what it reads of runs, its table, its files."""

import re
from pathlib import Path

import pytest

from linrope.cli.main import main
from linrope.evaluation import reports
from linrope.evaluation.run_comparison import figure_of, smoothed
from linrope.evaluation.run_curves import Point, RunCurves, names_of
from tests.cli.conftest import read_csv

HEADER = "step,tokens,seconds,train_bpb,val_bpb"


def log(folder: Path, *rows: str, header: str = HEADER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text("\n".join([header, *rows, ""]))
    return folder


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    """100 tokens a second, to 2.0 bits per byte after 400 tokens."""
    rows = ["0,100,1,7.0,", "1,200,2,5.0,", "1,200,2,,4.0", "3,400,4,3.0,", "3,400,4,,2.0"]
    return log(tmp_path / "runs" / "fast" / "version_0", *rows)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A third of that speed, to 1.0 after 600 tokens."""
    return log(tmp_path / "runs" / "slow" / "version_2", "1,200,6,,3.0", "5,600,18,2.5,", "5,600,18,,1.0")


def test_runs_are_compared_at_equal_tokens_and_equal_time(fast, slow, tmp_path, capsys, monkeypatch):
    log(tmp_path / "runs" / "slow" / "version_1", "1,200,6,,9.0")  # an older one
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["compare", str(fast), str(slow.parent), f"--report={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("runs by bits per byte")
    # at 400 tokens the slow run lies between 3.0 and 1.0; after 6 seconds or less it has no two validations
    assert re.search(r"^slow +600 +18 s +2\.500 +1\.000 +1\.000 +2\.000 *$", printed, re.M)
    assert re.search(r"^fast +400 +4 s +3\.000 +2\.000 +2\.000 +2\.000 *$", printed, re.M)
    assert printed.index("slow") < printed.index("fast")  # the best first
    rows = read_csv(tmp_path / "out" / "runs.csv")
    assert [(row["run"], row["val"], row["at_equal_tokens"], row["at_equal_seconds"]) for row in rows] == [
        ("slow", "1.0", "2.0", ""),
        ("fast", "2.0", "2.0", ""),
    ]
    curves = read_csv(tmp_path / "out" / "curves.csv")
    assert [row["loss"] for row in curves if row["run"] == "fast"] == ["7.0", "5.0", "3.0", "4.0", "2.0"]
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_equal_time_lies_between_validations(fast, tmp_path, capsys):
    late = log(tmp_path / "runs" / "late" / "version_0", "1,100,1,,6.0", "5,300,5,,2.0")
    assert main(["compare", str(fast), str(late)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^fast .* 3\.000 +2\.000 *$", printed, re.M)  # 300 tokens: (4 + 2) / 2; 4 seconds: its end
    assert re.search(r"^late .* 2\.000 +3\.000 *$", printed, re.M)


def test_runs_of_the_fit_command_are_compared(trained_run, capsys):
    assert main(["compare", str(trained_run.folder)]) == 0
    assert re.search(r"^tiny +128 .* 8\.\d+ +8\.\d+ *$", capsys.readouterr().out, re.M)


def test_runs_without_bits_per_byte_are_compared_by_their_loss(fast, tmp_path, capsys):
    header = HEADER.replace("bpb", "loss")
    rows = ["0,100,1,7.0,", "1,200,2,,4.0"]
    logs = [log(tmp_path / f"{number}", *rows, header=header) for number in (1, 2)]
    assert main(["compare", *map(str, logs)]) == 0
    assert capsys.readouterr().out.startswith("runs by loss")


def test_losses_of_different_tokenizers_are_not_compared(fast, tmp_path, error_of):
    """Without a tokenizer the bytes of a token are unknown."""
    other = log(tmp_path / "other", "1,200,2,,4.0", header=HEADER.replace("bpb", "loss"))
    assert "other has no bits per byte, and others have" in error_of("compare", str(fast), str(other))


def test_losses_of_different_tasks_are_not_compared(tmp_path, error_of):
    header = HEADER.replace("bpb", "loss")
    logs = {name: log(tmp_path / name, "1,200,2,,4.0", header=header) for name in ("words", "labels", "own")}
    for name, task in (("words", "masked_lm"), ("labels", "classification")):
        (logs[name] / "config.yaml").write_text(f"task: {task}\n")
    said = error_of("compare", *map(str, logs.values()))
    assert "words of masked_lm, labels of classification. Name runs of one task." in said
    assert main(["compare", str(logs["words"]), str(logs["own"])]) == 0


def test_steps_that_were_done_again_count_once_and_a_torn_line_not_at_all(tmp_path, capsys):
    run = log(tmp_path / "run", "1,200,2,,4.0", "2,300,3,,9.0", "2,300,4,,3.0", "3,400,5,,nan")
    with open(run / "metrics.csv", "a") as file:
        file.write("4,500,6,,0.")
    assert main(["compare", str(run), f"--report={tmp_path / 'out'}"]) == 0
    assert [row["loss"] for row in read_csv(tmp_path / "out" / "curves.csv")] == ["4.0", "3.0"]


def test_without_matplotlib_the_table_is_printed_and_the_way_to_the_picture(fast, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reports, "can_draw", lambda: False)
    assert main(["compare", str(fast), f"--report={tmp_path / 'out'}"]) == 0
    assert "no picture (pip install 'linrope[bench]')" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curves.csv", "runs.csv"]


def test_names_are_as_short_as_tells_runs_apart():
    def names(*folders):
        return names_of([Path(folder, "metrics.csv") for folder in folders])

    assert names("runs/a/version_0", "runs/b/version_3") == ["a", "b"]
    assert names("runs/a/version_0", "runs/a/version_3") == ["a/version_0", "a/version_3"]
    assert names("x/a/version_0", "y/a/version_0") == ["x/a/version_0", "y/a/version_0"]
    assert names("my-run") == ["my-run"]


def test_a_picture_has_six_runs_and_says_so():
    points = [Point(100.0 * n, 1.0 * n, 3.0 - n / 10) for n in range(1, 11)]
    runs = [RunCurves(f"run {n}", points, points, 1000, 10) for n in range(7)]
    figure = figure_of(runs, "bits per byte")
    assert len(figure.axes[0].get_lines()) == 12  # training and validation
    assert figure.get_suptitle() == "run 0 ends lowest, at 2.000 bits per byte; the best 6 of 7 runs"
    assert figure_of(runs[:1], "loss").get_suptitle() == "run 0 ends at a loss of 2.000"
    only_training = figure_of([RunCurves("run", points, [], 1000, 10)], "bits per byte")
    assert only_training.get_suptitle() == "Training loss of run"
    one_point = figure_of([RunCurves("run", points[:1], [], 100, 1)], "bits per byte")
    assert [line.get_marker() for axes in one_point.axes for line in axes.get_lines()] == [".", "."]  # not invisible
    assert smoothed([Point(n, n, float(n)) for n in range(100)])[:3] == [0, 0.5, 1.5]


def test_mistakes_are_named(fast, tmp_path, error_of):
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    empty = log(tmp_path / "empty")
    text = log(tmp_path / "text", "a,b,c,d,e")
    for args, message in [
        ([tmp_path / "nowhere"], "nowhere' has no metrics.csv: name a folder that `linrope fit` wrote"),
        ([fast, fast.parent], "is named twice"),
        ([tmp_path / "binary.csv"], "binary.csv is not a log of `linrope fit`"),
        ([text], "is not a log of `linrope fit`: could not convert string to float: 'a'"),
        ([empty], "has no row with tokens, seconds and a loss"),
    ]:
        assert message in error_of("compare", *args)
