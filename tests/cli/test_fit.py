"""`linrope fit`: runs, what they print and leave, interrupted and resumed ones."""

import io
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils.data import get_worker_info

from linrope.cli.fit import RunConsole
from linrope.cli.main import main
from linrope.data.batches import windows
from linrope.training.data_modules.masked_text import MaskedTextDataModule
from linrope.training.tasks.language_modeling import LanguageModelingModule
from tests.cli.conftest import read_csv
from tests.processes import Run
from tests.training.attached import record_batches
from tests.training.test_resume import load, version

ROOT = Path(__file__).parents[2]


def rows(run_folder: Path) -> list[dict[str, str]]:
    return read_csv(run_folder / "metrics.csv")


# Every shipped config trains, also those for a GPU or for a text of the user's: the tests give all of them a small
# model, a small text, and masked LM one stage of rows in place of a curriculum.


def configs(task: str, default: tuple[str, ...] = ()) -> list:
    """All shipped ones of a task; by default those that differ most."""
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    paths = [path for path in paths if yaml.safe_load(path.read_text()).get("task", "language_modeling") == task]
    paths = [path for path in paths if "parallel" not in path.stem]  # these need several processes
    marks = [[] if path.stem in default else pytest.mark.exhaustive for path in paths]
    return [pytest.param(path, id=path.stem, marks=mark) for path, mark in zip(paths, marks)]


@pytest.mark.parametrize("config", configs("language_modeling", default=("quickstart", "lm-long")))
def test_every_shipped_config_trains_two_steps(config, tiny, run_folder, capsys):
    # room for the configs' kinds of layers, rotary_dim and bases; lm-long goes on from a trained model
    sizes = ["--model.n_layers=4", "--model.d_model=128", "--model.n_heads=2", "--run.start_from=null"]
    sizes.append("--data.test_stride=16")
    assert main(["fit", f"--config={config}", *tiny, *sizes]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^decoding state +\d+ KiB", out, re.M)
    assert re.search(r"^steps +2 *$", out, re.M)
    assert re.search(r"^step 2/2  loss \d\.\d+  bpb \d\.\d+  [\d,]+ tok/s  0:00 left$", out, re.M)
    assert re.search(r"^step 2  val_loss [45]\.\d+  val_bpb \d\.\d+$", out, re.M)
    prompt = yaml.safe_load(config.read_text())["sample"]["prompt"]
    assert f"\n{prompt}" in out  # the sample
    last = run_folder / "checkpoints" / "last.ckpt"
    assert f"linrope generate --ckpt_path {last} --prompt '{prompt}'" in out
    assert "\x1b" not in out
    assert torch.load(last, weights_only=True)["global_step"] == 2
    assert (run_folder / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.parametrize("config", configs("masked_lm", default=("mlm-small", "mlm-roformer")))
def test_every_shipped_config_of_masked_lm_trains_two_steps(config, tiny, run_folder, capsys):
    options = [option for option in tiny if not option.startswith("--sample")]
    options += ["--data.curriculum=null", "--model.vocab_size=261", "--model.d_ff=64"]
    assert main(["fit", f"--config={config}", *options]) == 0
    assert re.search(r"^step 2  val_loss 5\.\d+  val_accuracy \d\.\d+$", capsys.readouterr().out, re.M)
    assert (run_folder / "checkpoints" / "best.ckpt").is_file()


def test_the_stages_of_roformer_are_as_published_and_end_with_a_validation():
    config = yaml.safe_load((ROOT / "configs" / "mlm-roformer.yaml").read_text())
    trainer, plan = config["trainer"], MaskedTextDataModule(**config["data"]).plan_for(8)
    published = [(512, 256, 200_000), (1536, 256, 12_500), (256, 256, 120_000)]
    published += [(128, 512, 80_000), (1536, 256, 10_000), (512, 512, 30_000)]
    assert [(stage.seq_len, stage.samples_per_step, stage.n_steps) for stage in plan.stages] == published
    assert (trainer["accumulate_grad_batches"], trainer["devices"]) == (8, 1)
    assert trainer["max_steps"] == plan.n_steps == sum(steps for _, _, steps in published)
    assert all(stage.n_steps * 8 % trainer["val_check_interval"] == 0 for stage in plan.stages)


@pytest.mark.exhaustive
def test_the_shipped_config_of_translation_trains_two_steps(tmp_path, capsys):
    options = ["--trainer.max_epochs=-1", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    options += ["--model.d_model=16", "--trainer.limit_val_batches=1", f"--run.folder={tmp_path / 'runs'}"]
    assert main(["fit", f"--config={ROOT / 'configs' / 'translation-small.yaml'}", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^text +numbers written out \(built in\), de to en *$", out, re.M)
    assert re.search(r"^step 2  val_loss [56]\.\d+  val_accuracy \d\.\d+$", out, re.M)
    assert (tmp_path / "runs" / "translation-small" / "version_0" / "checkpoints" / "best.ckpt").is_file()


def test_metrics_checkpoint_and_config_of_a_run_serve_the_other_commands(tiny, run_folder, capsys):
    assert main(["fit", *tiny, "--trainer.max_steps=3", "--trainer.log_every_n_steps=1"]) == 0
    train = [row for row in rows(run_folder) if row["train_loss"]]
    assert [row["step"] for row in train] == ["1", "2", "3"]
    for row in train:
        assert float(row["train_bpb"]) == pytest.approx(float(row["train_loss"]) / 0.6931472, rel=1e-5)
        assert float(row["tokens_per_second"]) > 0
        assert float(row["grad_norm"]) > 0
    assert float(train[0]["lr"]) == pytest.approx(1e-5)  # 1/100 of the peak, the default warm-up
    val = next(row for row in rows(run_folder) if row["val_bpb"])

    ckpt = f"--ckpt_path={run_folder / 'checkpoints' / 'best.ckpt'}"
    config = f"--config={run_folder / 'config.yaml'}"
    capsys.readouterr()
    assert main(["validate", config, ckpt]) == 0
    loss, bpb = re.match(r"val_loss (\S+)  val_bpb (\S+)\n", capsys.readouterr().out).groups()
    assert float(loss) == pytest.approx(float(val["val_loss"]), abs=1e-4)
    assert float(bpb) == pytest.approx(float(val["val_bpb"]), abs=1e-4)
    assert main(["test", config, ckpt]) == 0
    assert re.fullmatch(r"test_loss 5\.\d+  test_bpb \d\.\d+\n", capsys.readouterr().out)
    assert main(["generate", ckpt, "--prompt=hello", "--max_new_tokens=20", "--seed=3"]) == 0
    assert re.match(r"hello(?s:.{6,})", capsys.readouterr().out)


def test_the_config_of_a_run_keeps_what_is_null(tiny, run_folder):
    """Where the default is not: a run without RoPE would be repeated with it."""
    assert main(["fit", *tiny, "--model.rope=null", "--trainer.max_steps=1"]) == 0
    assert yaml.safe_load((run_folder / "config.yaml").read_text())["model"]["rope"] is None
    assert main(["validate", f"--ckpt_path={run_folder / 'checkpoints' / 'last.ckpt'}"]) == 0


def test_a_checkpoint_of_another_model_or_a_finished_run_is_named(trained_run, error_of):
    err = error_of("fit", *trained_run.resumed, "--model.n_heads=4", "--model.rope.base=500")
    assert f"--config {trained_run.folder / 'config.yaml'}" in err
    assert "model.n_heads: 2 in the checkpoint, 4 here" in err
    assert "model.rope.base: 10000.0 in the checkpoint, 500.0 here" in err
    assert "d_model" not in err


def test_a_finished_run_has_nothing_to_resume_which_is_no_error(trained_run, capsys):
    """So that a loop ends that restarts a run until it succeeds."""
    before = trained_run.checkpoint.read_bytes()
    assert main(["fit", *trained_run.resumed]) == 0
    out, err = capsys.readouterr()
    said = r"linrope: trainer\.max_steps=2 is already done: .*last\.ckpt is at step 2\. To train on, raise it\.\n"
    assert re.fullmatch(said, err)
    assert out == ""
    assert trained_run.checkpoint.read_bytes() == before


@pytest.mark.parametrize("gate", ["false", "true"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(gate, tiny, run_folder, capsys):
    explode = ["--optimizer.lr=1e30", "--optimizer.warmup_steps=0", "--run.checkpoint_every_n_steps=1"]
    assert main(["fit", *tiny, *explode, f"--model.forget_gate={gate}", "--trainer.max_steps=50"]) == 1
    err = capsys.readouterr().err
    last = run_folder / "checkpoints" / "last.ckpt"
    step = int(re.search(r"(?:loss|norm) is (?:nan|inf) at step (\d+)", err)[1])
    assert f"last good checkpoint, {last}," in err
    assert "Traceback" not in err
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == step - 1
    assert all(weights.isfinite().all() for weights in checkpoint["state_dict"].values())


def test_a_resumed_run_may_be_longer_and_takes_the_options_it_is_given(tiny, run_folder, monkeypatch):
    batches_seen = record_batches(monkeypatch)
    assert main(["fit", *tiny, "--trainer.max_steps=4"]) == 0
    last = run_folder / "checkpoints" / "last.ckpt"
    options = ["--trainer.max_steps=8", "--optimizer.lr=0.5", "--optimizer.warmup_steps=0"]
    options += ["--optimizer.final_lr_fraction=1", "--optimizer.weight_decay=0.25", "--trainer.log_every_n_steps=1"]
    assert main(["fit", *tiny, *options, f"--ckpt_path={last}"]) == 0
    assert len(batches_seen) == 8
    assert len({tuple(batch["inputs"].flatten().tolist()) for batch in batches_seen}) == 8
    rates = [(row["step"], float(row["lr"])) for row in rows(run_folder) if row["lr"]]
    assert rates == [(str(step), 0.5) for step in range(5, 9)]
    optimizer = load(run_folder)["optimizer_states"][0]
    assert optimizer["param_groups"][0]["weight_decay"] == 0.25


def test_automatic_precision_is_that_of_the_processor_and_a_resumed_run_keeps_it(tiny, run_folder, capsys, monkeypatch):
    def on_processor(native: bool, *options: object) -> str:
        monkeypatch.setattr("linrope.training.precision.has_fast_bfloat16", lambda: native)
        capsys.readouterr()
        assert main(["fit", *tiny, "--trainer.precision=auto", *map(str, options)]) == 0
        return re.search(r"^device +(.+?) *$", capsys.readouterr().out, re.M)[1]

    monkeypatch.setenv("COLUMNS", "200")
    assert "cpu, bf16-mixed (the processor multiplies bfloat16 fast)" in on_processor(True)
    assert "  precision: bf16-mixed\n" in (run_folder / "config.yaml").read_text()
    last = run_folder / "checkpoints" / "last.ckpt"
    assert load(run_folder)["linrope"]["precision"] == "bf16-mixed"
    resumed = [f"--ckpt_path={last}", "--trainer.max_steps=3"]
    with pytest.warns(UserWarning, match=r"trainer\.precision=bf16-mixed is slow here: this processor"):
        assert "cpu, bf16-mixed (that of the checkpoint)" in on_processor(False, *resumed)
    assert "  precision: bf16-mixed\n" in (run_folder / "config.yaml").read_text()
    assert "  max_steps: 3\n" in (run_folder / "config.yaml").read_text()
    started = [f"--run.start_from={last}"]  # a new run
    assert "cpu, 32-true (the processor does not multiply bfloat16 fast)" in on_processor(False, *started)
    assert load(version(run_folder, 1))["linrope"]["precision"] == "32-true"


@pytest.mark.parametrize(("hook", "times"), [("setup", 1), ("on_after_backward", 2)])
def test_ctrl_c_before_the_first_step_leaves_nothing_to_resume_and_twice_aborts_at_once(
    tiny, run_folder, capsys, monkeypatch, hook, times
):
    plain, handler = getattr(LanguageModelingModule, hook), signal.getsignal(signal.SIGINT)

    def interrupted(self, **options):
        plain(self, **options)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LanguageModelingModule, hook, interrupted)
    assert main(["fit", *tiny]) == 130
    said = "stopped before the first step was finished: there is nothing to resume." in capsys.readouterr().err
    assert said == (times == 1)
    assert not (run_folder / "checkpoints" / "last.ckpt").exists()
    signal.signal(signal.SIGINT, handler)  # after two, Lightning leaves it ignored


def test_ctrl_c_ends_the_sample_and_not_the_run(tiny, run_folder, capsys, monkeypatch):
    def interrupted(write, *args, **options):
        write("the beginning")
        signal.raise_signal(signal.SIGINT)
        write("the end")

    monkeypatch.setattr("linrope.training.callbacks.summary.write_sample", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores the signal
    try:
        assert main(["fit", *tiny, "--sample.prompt=a"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert re.search(r"the beginning\n\ncheckpoint  .*last\.ckpt", out)
    assert "the end" not in out
    assert "finishing" not in err


def test_a_signal_in_a_validation_is_answered_with_what_is_finished_first(tiny, capfd, monkeypatch):
    plain = LanguageModelingModule.validation_step

    def interrupted(self, batch, number):
        if self.trainer.global_step == 2 and number == 0:
            signal.raise_signal(signal.SIGTERM)
        return plain(self, batch, number)

    monkeypatch.setattr(LanguageModelingModule, "validation_step", interrupted)
    assert main(["fit", *tiny, "--trainer.max_steps=3"]) == 128 + signal.SIGTERM
    err = capfd.readouterr().err
    assert "finishing this validation, then saving a checkpoint" in err
    assert "stopped after step 2." in err


def test_a_run_without_a_validation_share_keeps_its_checkpoint_and_says_so(tiny, run_folder, capsys):
    assert main(["fit", *tiny, "--data.fractions=[1,0,0]"]) == 0
    assert (run_folder / "checkpoints" / "last.ckpt").is_file()
    assert "none: data.fractions=[1.0, 0.0, 0.0] leaves no text" in capsys.readouterr().out


def test_a_warm_up_that_is_longer_than_the_run_is_named(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    warning = "longer than the run: optimizer.warmup_steps=3 is more than trainer.max_steps=2"
    for warmup in (2, 3):
        assert main(["fit", *tiny, f"--optimizer.warmup_steps={warmup}"]) == 0
        assert (warning in capsys.readouterr().out) is (warmup == 3)


def test_a_summary_says_how_often_the_text_is_read(tiny, text_file, capsys):
    assert main(["fit", *tiny, "--data.fractions=[0.5,0.25,0.25]", "--trainer.max_steps=40"]) == 0
    passes = 40 * 2 * 32 / (len(text_file.read_bytes()) // 2)
    assert f"40, {passes:.2f} times the training text" in capsys.readouterr().out


def test_a_run_goes_on_without_a_reader(capsys, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    moved = []
    monkeypatch.setattr(os, "dup2", lambda *files: moved.append(files))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(fileno=lambda: 1))
    console = RunConsole(file=Closed())
    console.print("a line")
    console.print("another")
    assert [to for _, to in moved] == [1]
    assert capsys.readouterr().err == "linrope: the output is closed: the run goes on without it\n"
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=Closed().write, fileno=lambda: 2))
    RunConsole(file=Closed()).print("a line")
    assert [to for _, to in moved] == [1, 1, 2]


def test_ctrl_c_sent_to_a_real_process_leaves_a_checkpoint_that_resumes(tiny, run_folder, tmp_path):
    run = Run(["fit", *tiny, "--trainer.log_every_n_steps=1", "--trainer.max_steps=1000000"], tmp_path)
    run.wait_for_steps(3)
    run.send(signal.SIGINT)
    code, out, err = run.wait()
    assert code == 130, err
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    step = int(re.search(r"stopped after step (\d+)\. To resume:", err)[1])
    assert step >= 3

    resume = shlex.split(err.splitlines()[-1])[1:]
    assert main([*resume, f"--trainer.max_steps={step + 2}"]) == 0
    logged = [int(row["step"]) for row in rows(run_folder) if row["train_loss"]]
    assert logged == list(range(1, step + 3))


def few_files(folder: Path) -> Path:
    (folder / "few").mkdir()
    for number in range(9):
        (folder / "few" / f"{number}.txt").write_text(f"document {number}, {number**7} " * 60)
    return folder / "few"


def test_a_folder_of_few_files_trains_and_its_summary_says_how_it_was_split(tiny, tmp_path, run_folder, capsys):
    options = [*tiny, f"--data.path={few_files(tmp_path)}", "--trainer.max_steps=1"]
    assert main(["fit", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^split +by position: 9 documents are too few to split by name *$", out, re.M)
    assert re.search(r"^  val +\d+ bytes in 1 document *$", out, re.M)
    last = f"--ckpt_path={run_folder / 'checkpoints' / 'last.ckpt'}"
    assert main(["fit", *options, "--trainer.max_steps=2", last]) == 0


@pytest.mark.exhaustive
def test_an_old_run_of_few_files_keeps_its_split(tiny, tmp_path, run_folder, monkeypatch, capsys, error_of):
    fractions = ["--data.fractions=[0.5, 0.3, 0.2]", f"--data.path={few_files(tmp_path)}"]
    with monkeypatch.context() as patch:
        patch.setattr("linrope.data.corpus.splits.FEW", 0)
        assert main(["fit", *tiny, *fractions, "--trainer.max_steps=1"]) == 0
    by_name = re.search(r"^  val +(.*)$", capsys.readouterr().out, re.M)[1].strip()
    last = run_folder / "checkpoints" / "last.ckpt"
    for options in (f"--ckpt_path={last}", f"--run.start_from={last}"):
        assert main(["fit", *tiny, *fractions, options]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^  val +(.*)$", out, re.M)[1].strip() == by_name
        assert "by position" not in out
    with pytest.warns(UserWarning, match="this text is cut by position"):
        assert "data.split: None in the checkpoint, 'position' here" in error_of(
            "fit", *tiny, *fractions, f"--ckpt_path={last}", "--data.split=position", "--trainer.max_steps=3"
        )
    (tmp_path / "few" / "0.txt").write_text("another text " * 60)  # which is not what that run was trained on
    with pytest.warns(UserWarning, match="this text is cut by position"):
        assert main(["validate", *tiny, *fractions, f"--ckpt_path={last}"]) == 0


def test_a_run_that_cannot_start_leaves_no_folder(tiny, tmp_path, error_of):
    assert "the val split holds 22 tokens, too few" in error_of("fit", *tiny, "--data.fractions=[0.998, 0.001, 0.001]")
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            lambda file: os.kill(os.getpid(), signal.SIGKILL),
            r"a data worker was killed \(SIGKILL\), .*: lower data",
        ),
        (
            lambda file: file.unlink(missing_ok=True),
            r".*corpus\.txt cannot be read any more \(No such file",
        ),
    ],
    ids=["killed", "gone"],
)
def test_what_happens_in_a_data_worker_is_one_line(tiny, text_file, monkeypatch, capfd, end, message):
    read = windows.window

    def window(corpus, start, *options):
        if get_worker_info() is not None:
            end(text_file)
        return read(corpus, start, *options)

    monkeypatch.setattr(windows, "window", window)
    assert main(["fit", *tiny, "--data.num_workers=1"]) == 1
    assert re.fullmatch(rf"linrope: error: {message}.*\n", capfd.readouterr().err)
