"""Options of Lightning's Trainer in `linrope fit`."""

import json
import re
import shlex
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor, LambdaCallback

from linrope.cli.main import main
from linrope.cli.plan import PlanOptions
from linrope.cli.training import ConfigCLI
from linrope.training.callbacks.named_errors import name_setup_errors
from linrope.training.tasks.language_modeling import LanguageModelingModule
from tests.conftest import covering
from tests.training.attached import record_batches
from tests.training.test_resume import equal, interrupt, load, losses, version

STRATEGIES = {
    "DDPStrategy": "ddp",
    "ShardedStrategy": "fsdp2",
    "linrope.training.ShardedStrategy": "fsdp2",
    "ModelParallelStrategy": "fsdp2",
    "fsdp2": "fsdp2",
}
BY_EPOCH = "--trainer.check_val_every_n_epoch"
EARLY_STOPPING = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]


def test_progress_can_be_turned_off_and_results_are_printed(tiny, run_folder, capsys):
    assert main(["fit", *tiny, "--trainer.enable_progress_bar=false"]) == 0
    out = capsys.readouterr().out
    assert "step 2" not in out
    last = run_folder / "checkpoints" / "last.ckpt"
    assert f"checkpoint  {last}" in out
    assert main(["test", *tiny, f"--ckpt_path={last}", "--trainer.enable_progress_bar=false"]) == 0
    assert re.fullmatch(r"test_loss 5\.\d+  test_bpb \d\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_another_progress_bar_takes_the_place_of_ours(tiny, run_folder, capsys, bar):
    assert main(["fit", *tiny, f"--trainer.callbacks+={bar}"]) == 0
    out = "".join(capsys.readouterr())
    assert "step 2/2" not in out
    assert "Epoch 0" in out
    assert load(run_folder)["global_step"] == 2


def test_checkpoints_can_be_turned_off(tiny, run_folder, capsys, monkeypatch):
    off = "--trainer.enable_checkpointing=false"
    assert main(["fit", *tiny, off]) == 0
    assert "ckpt" not in capsys.readouterr().out
    interrupt(monkeypatch, lambda trainer: trainer.global_step == 1, signal.SIGTERM)
    assert main(["fit", *tiny, off, "--trainer.max_steps=9"]) == 128 + signal.SIGTERM
    assert "stopped after step 2. trainer.enable_checkpointing=False left nothing" in capsys.readouterr().err
    assert not list(run_folder.parent.rglob("*.ckpt"))


def test_a_checkpoint_of_ones_own_lies_beside_the_others(tiny, run_folder, capsys):
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=1"]
    assert main(["fit", *tiny, *own]) == 0
    names = {file.name for file in run_folder.parents[1].rglob("*.ckpt")}
    assert names == {file.name for file in (run_folder / "checkpoints").iterdir()} > {"best.ckpt", "last.ckpt"}
    (name,) = names - {"best.ckpt", "last.ckpt"}
    assert main(["validate", f"--ckpt_path={run_folder / 'checkpoints' / name}"]) == 0
    assert f"the configuration is {run_folder / 'config.yaml'}" in capsys.readouterr().err


def test_a_checkpoint_of_ones_own_may_monitor_what_ours_does(tiny, run_folder):
    options = {"monitor": "val_loss", "save_top_k": 3, "filename": "{step}"}
    own = {"trainer": {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": options}]}}
    run = ["fit", *tiny, f"--config={json.dumps(own)}", "--trainer.val_check_interval=1"]
    assert main([*run, "--trainer.max_steps=3"]) == 0
    assert main([*run, "--trainer.max_steps=4", "--ckpt_path=last"]) == 0
    names = {file.stem for file in (run_folder / "checkpoints").iterdir()}
    assert names - {"best", "last"} == {"step=2", "step=3", "step=4"}
    savers = [state for state in load(run_folder)["callbacks"].values() if "monitor" in state]
    assert {Path(saver["best_model_path"]).stem for saver in savers} == {"best", "step=4"}


def test_the_simple_profiler_prints_its_table(tiny, caplog):
    assert main(["fit", *tiny, "--trainer.profiler=simple"]) == 0
    assert re.search(r"FIT Profiler Report.*run_training_epoch", caplog.text, re.S)


def test_early_stopping_says_why_and_how_to_resume(tiny, run_folder, capsys):
    stopping = [*EARLY_STOPPING, "--trainer.callbacks.patience=1", "--trainer.callbacks.min_delta=100"]
    assert main(["fit", *tiny, *stopping, "--trainer.max_steps=10"]) == 0
    said = "linrope: ended after step 4 of 10: EarlyStopping of val_loss, patience exhausted. To resume:"
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == said
    assert shlex.split(second)[-2:] == ["--ckpt_path", str(run_folder / "checkpoints" / "last.ckpt")]


@pytest.mark.exhaustive
def test_a_time_limit_says_how_to_resume_and_counts_anew_then(tiny, capsys):
    limited = [*tiny, "--trainer.max_steps=1000000", "--trainer.max_time=00:00:00:01"]
    steps = [0]
    for resume in ([], ["--ckpt_path=last"]):
        assert main(["fit", *limited, *resume]) == 0
        said = r"ended after step (\d+) of 1000000: the time limit is reached\. To resume:"
        steps.append(int(re.search(said, capsys.readouterr().err)[1]))
    assert steps == sorted(set(steps))


def test_a_time_limit_before_the_first_step_leaves_nothing_to_resume(tiny, run_folder, capsys):
    assert main(["fit", *tiny, "--trainer.max_time=00:00:00:00"]) == 0
    printed = capsys.readouterr()
    assert "ended after step 0 of 2: the time limit is reached. There is nothing to resume." in printed.err
    assert "last.ckpt" not in printed.out + printed.err
    assert not (run_folder / "checkpoints" / "last.ckpt").exists()


def test_gradients_are_clipped_by_their_norm_alone(tiny, error_of):
    err = error_of("fit", *tiny, "--trainer.gradient_clip_algorithm=value")
    assert "trainer.gradient_clip_algorithm='value' is not there: optimizer.clip_norm clips by the norm" in err


@pytest.mark.parametrize(("given", "name"), STRATEGIES.items())
def test_a_strategy_may_be_named_by_its_class_without_options(tiny, given, name):
    cli = ConfigCLI("plan", [*tiny, f"--trainer.strategy={given}"], PlanOptions)
    assert cli.config.trainer.strategy == cli.config_init.trainer.strategy == name


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint"])
def test_a_metric_that_no_run_logs_is_refused_before_training(tiny, error_of, run_folder, monkeypatch, name):
    batches = record_batches(monkeypatch)
    err = error_of("fit", *tiny, f"--trainer.callbacks+={name}", "--trainer.callbacks.monitor=vall_loss")
    assert f"{name}.monitor='vall_loss' is not logged by this run: choose one of grad_norm, lr, " in err
    assert ", train_loss, " in err
    assert "Did you mean 'val_loss'?" in err
    assert batches == []
    assert not run_folder.exists()


@pytest.mark.parametrize("monitor", ["los", "val_loss/part"])
def test_a_metric_that_is_found_missing_later_leaves_a_checkpoint(tiny, run_folder, error_of, monitor):
    run = [*tiny, "--trainer.max_steps=6", "--trainer.log_every_n_steps=2", "--trainer.val_check_interval=4"]
    err = error_of("fit", *run, "--trainer.callbacks+=EarlyStopping", f"--trainer.callbacks.monitor={monitor}")
    assert f"EarlyStopping.monitor={monitor!r} is not logged by this run" in err
    assert f"The run so far is in {run_folder / 'checkpoints' / 'last.ckpt'}: resume" in err
    assert load(run_folder)["global_step"] == 4  # that of the first validation
    assert main(["fit", *run, "--ckpt_path=last"]) == 0
    assert load(run_folder)["global_step"] == 6


@pytest.mark.parametrize("monitor", covering(["val_bpb", "tokens_per_second", "step"], ["tokens_per_second"]))
def test_what_is_monitored_changes_no_weights(tiny, run_folder, capsys, monitor):
    own = ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.monitor={monitor}"]
    run = [*tiny, "--trainer.max_steps=4", "--trainer.log_every_n_steps=1"]
    assert main(["fit", *run, *own]) == 0
    assert "step 0" not in capsys.readouterr().out
    assert main(["fit", *run]) == 0
    mine, plain = (load(version(run_folder, number)) for number in (0, 1))
    assert equal(mine["state_dict"], plain["state_dict"])
    (saver,) = (state for name, state in mine["callbacks"].items() if name.startswith("ModelCheckpoint"))
    assert saver["best_model_path"]
    assert main(["validate", f"--ckpt_path={run_folder / 'checkpoints' / 'last.ckpt'}"]) == 0


@pytest.mark.parametrize(
    ("callback", "options", "fix"),
    [
        ("GradientAccumulationScheduler", {"scheduling": {0: 2}}, "Set trainer.accumulate_grad_batches, "),
        ("BatchSizeFinder", {}, "Set data.batch_size; "),
        ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}, "Set run.ema_decay "),
        ("EMAWeightAveraging", {"decay": 0.9}, "Set run.ema_decay "),
        ("OnExceptionCheckpoint", {"dirpath": "here"}, "Set run.checkpoint_every_n_steps; "),
        ("Timer", {"duration": "00:01:00:00"}, "Set trainer.max_time, "),
        ("LearningRateFinder", {}, "Compare short runs with different optimizer.lr."),
    ],
)
def test_a_callback_that_would_change_the_run_silently_is_refused(tiny, error_of, run_folder, callback, options, fix):
    given = {"trainer": {"callbacks": [{"class_path": callback, "init_args": options}]}}
    err = error_of("fit", *tiny, f"--config={json.dumps(given)}")
    assert f"linrope: error: trainer.callbacks has a {callback}, and " in err
    assert fix in err
    assert not run_folder.parents[1].exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.callbacks+=Nope"], "trainer.callbacks='Nope' is no callback: choose one of BackboneFinetuning, "),
        (["--trainer.callbacks+=EarlyStoping"], "Did you mean 'EarlyStopping'?"),
        (["--trainer.callbacks+=my.Nope"], "trainer.callbacks='my.Nope' is no class (No module named 'my')"),
        (["--trainer.callbacks+=torch.Tensor"], "trainer.callbacks='torch.Tensor' is no callback"),
        (["--trainer.callbacks+=EarlyStopping"], "EarlyStopping needs monitor: give --trainer.callbacks.monitor"),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=val_loss"],
            "trainer.callbacks: EarlyStopping has no option 'monitr': choose one of monitor, min_delta, ",
        ),
        (["--config={trainer: {callbacks: [{class_path: ModelPrunin}]}}"], "Did you mean 'ModelPruning'?"),
        (["--trainer.precision=bananas"], "trainer.precision='bananas' is unknown: choose one of 'auto', "),
        (["--config={trainer: {precision: bf16-mxed}}"], "Did you mean 'bf16-mixed'?"),
        (["--trainer.barebones=true"], "trainer.barebones=True leaves out the logs and checkpoints"),
        (["--trainer.precision=fp16"], "trainer.precision='fp16' is unknown: Lightning's name is '16-mixed'."),
        (
            ["--trainer.strategy=ddp", "--trainer.strategy.timeout=300"],
            "--trainer.strategy.timeout needs the class of the strategy, not trainer.strategy=ddp: give "
            "--trainer.strategy DDPStrategy before it.",
        ),
        (
            ["--trainer.strategy=ddp", "--trainer.strategy.sequence_parallel_size=2"],
            "not trainer.strategy=ddp: give --trainer.strategy ShardedStrategy before it.",
        ),
        (
            ["--trainer.devices=2", "--trainer.strategy=single_device"],
            "trainer.devices=2 on trainer.num_nodes=1 are 2, and trainer.strategy=single_device runs on 1: set "
            "trainer.devices=1, or trainer.strategy=ddp.",
        ),
        (["--trainer.strategy.timeout=300"], "not trainer.strategy=auto: give --trainer.strategy DDPStrategy"),
        (
            ["--config={trainer: {strategy: fsdp2}}", "--trainer.strategy.sequence_parallel_size=2"],
            "not trainer.strategy=fsdp2: give --trainer.strategy ShardedStrategy",
        ),
        (["--trainer.strategy=ddp_spawn"], "trainer.strategy: 'ddp_spawn' starts processes as copies of this one"),
        (
            ["--trainer.strategy=DDPStrategy", "--trainer.strategy.start_method=fork"],
            "trainer.strategy: 'fork' starts processes as copies of this one",
        ),
        (["--trainer.strategy=fsdp"], "trainer.strategy='fsdp' does not know the norm of all gradients: set fsdp2"),
        (["--trainer.max_time=00:10"], "trainer.max_time='00:10' is no time: give DD:HH:MM:SS"),
        (["--config={trainer: {strategy: null}}"], "section trainer: You selected an invalid strategy name"),
        (["--trainer.precision=32-true", "--optimizer.lr=x"], "optimizer.lr"),  # another option is wrong
        (2 * ["--trainer.callbacks+=ModelCheckpoint"], "section trainer: Found more than one"),
    ],
)
def test_values_that_the_trainer_does_not_know_are_named_in_one_line(tiny, error_of, options, message):
    err = error_of("fit", *tiny, *options)
    assert message in err
    assert "lr=x" in options[-1] or err.count("\n") == 1


def test_a_device_that_is_not_there_is_named(tiny, error_of, monkeypatch):
    for one in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(one, "is_available", lambda: False)
    for name in ("gpu", "cuda", "mps"):
        message = f"trainer.accelerator='{name}': PyTorch finds no such device on this machine"
        assert message in error_of("fit", *tiny, f"--trainer.accelerator={name}")


@pytest.mark.parametrize(
    "given",
    [
        ["--trainer.logger=WandbLogger"],
        ["--config={trainer: {logger: [{class_path: lightning.pytorch.loggers.WandbLogger}]}}"],
        ["--trainer.logger=WandbLogger", "--trainer.logger.project=mine"],
    ],
)
def test_the_package_that_a_logger_needs_is_named(tiny, error_of, given):
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    err = error_of("fit", *tiny, *given)
    assert err == "linrope: error: trainer.logger=WandbLogger needs a package: pip install wandb.\n"


def test_an_error_that_a_callback_of_lightning_raises_when_set_up_names_it(tiny, run_folder, error_of, monkeypatch):
    def setup(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("psutil is not installed")

    monkeypatch.setattr(DeviceStatsMonitor, "setup", setup)
    err = error_of("fit", *tiny, "--trainer.callbacks+=DeviceStatsMonitor")
    assert err == "linrope: error: DeviceStatsMonitor of trainer.callbacks cannot be set up: psutil is not installed\n"
    assert not run_folder.exists()
    called = []
    callback = LambdaCallback(setup=lambda *args: called.append(args))
    name_setup_errors(callback)
    callback.setup(None, None, "fit")
    assert called == [(None, None, "fit")]


def test_a_run_that_ends_before_its_first_validation_says_so(tiny, capsys):
    assert main(["fit", *tiny, "--trainer.max_steps=3", "--trainer.val_check_interval=4"]) == 0
    assert "none: trainer.val_check_interval=4 is more than 3 batches" in capsys.readouterr().out
    assert main(["fit", *tiny, "--trainer.max_steps=4", "--trainer.val_check_interval=4"]) == 0
    assert "no best.ckpt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("val_check_interval=null", "trainer.val_check_interval is null, and training is one endless epoch"),
        ("limit_val_batches=0", "trainer.limit_val_batches is 0"),
    ],
)
def test_a_run_without_validation_says_so(tiny, capsys, option, why):
    assert main(["fit", *tiny, f"--trainer.{option}"]) == 0
    assert f"none: {why}; no best.ckpt is written" in " ".join(capsys.readouterr().out.split())


def test_validations_by_epoch_are_refused_for_data_without_epochs(tiny, run_folder, error_of):
    for options in ([f"{BY_EPOCH}=2"], [f"{BY_EPOCH}=1", "--trainer.val_check_interval=null"]):
        err = error_of("fit", *tiny, *options)
        assert "has no meaning here: training draws from an endless stream of samples. Remove it, and set" in err
        assert "trainer.val_check_interval to the training batches between two validations." in err
    assert "must be 1 or more, or null" in error_of("fit", *tiny, f"{BY_EPOCH}=0")
    assert not run_folder.exists()


def test_validations_of_every_epoch_keep_their_interval_in_an_endless_one(tiny, run_folder):
    assert main(["fit", *tiny, f"{BY_EPOCH}=1", "--trainer.val_check_interval=1"]) == 0
    assert losses(run_folder, "val_loss").keys() == {1, 2}


def test_a_run_is_validated_by_time(tiny, run_folder):
    assert main(["fit", *tiny, "--trainer.val_check_interval=00:00:00:00", *EARLY_STOPPING]) == 0
    assert losses(run_folder, "val_loss").keys() == {1, 2}


def test_a_validation_after_no_batch_is_refused(tiny, error_of, tmp_path):
    err = error_of("fit", *tiny, "--trainer.val_check_interval=0", f"--run.folder={tmp_path / 'none'}")
    assert "trainer.val_check_interval=0 must be above 0" in err
    assert "For none, set trainer.limit_val_batches=0." in err
    assert not (tmp_path / "none").exists()


def test_a_fast_dev_run_checks_a_curriculum_of_more_steps(tiny, monkeypatch):
    batches = record_batches(monkeypatch)
    stages = "--data.curriculum=[{tokens: 500, seq_len: 16, batch_size: 2}, {tokens: 1, seq_len: 32, batch_size: 2}]"
    assert main(["fit", *tiny, "--trainer.fast_dev_run=true", "--trainer.max_steps=20", stages]) == 0
    assert batches[-1]["inputs"].shape == (2, 16)


@pytest.mark.parametrize("n", ["true", "3"])
def test_a_fast_dev_run_saves_nothing(tiny, run_folder, tmp_path, monkeypatch, capsys, n):
    monkeypatch.chdir(tmp_path)
    batches = record_batches(monkeypatch)
    assert main(["fit", *tiny, f"--trainer.fast_dev_run={n}", "--trainer.max_steps=9", *EARLY_STOPPING]) == 0
    assert len(batches) == (1 if n == "true" else 3)
    captured = capsys.readouterr()
    assert "trainer.fast_dev_run: nothing is saved" in captured.out
    assert "val_loss 5." in captured.out
    assert captured.err == ""
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_fast_dev_run_resumes_no_run(trained_run, error_of):
    err = error_of("fit", *trained_run.resumed, "--trainer.max_steps=4", "--trainer.fast_dev_run=true")
    assert "trainer.fast_dev_run is a check, which resumes no run: drop --ckpt_path." in err


def test_a_measurement_takes_no_fast_dev_run_over_from_a_config(trained_run, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {fast_dev_run: true}")
    measure = ["validate", f"--config={config}", *trained_run.resumed]
    assert main(measure) == 0
    assert "batches were read" not in capsys.readouterr().err
    assert main([*measure, "--trainer.fast_dev_run=true"]) == 0
    assert "1 of 16 batches were read" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_few_batches_can_be_overfitted(tiny, run_folder, monkeypatch, capsys, error_of):
    batches = record_batches(monkeypatch)
    few = ["--trainer.overfit_batches=4", "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=6"]
    assert main(["fit", *tiny, *few]) == 0
    assert load(run_folder)["global_step"] == 6
    assert len(batches) == 12
    seen = [batch["inputs"].tolist() for batch in batches]
    assert seen[:4] == seen[4:8] == seen[8:]
    assert seen[0] != seen[1]
    for wrong, message in {
        "--trainer.overfit_batches=0.1": "overfit_batches=0.1 is a share of data that has no end",
        "--trainer.overfit_batches=3": "overfit_batches=3 must be a multiple of trainer.accumulate_grad_batches=2",
        "--data.contiguous=true": "and data.contiguous=True continues them",
        "--ckpt_path=last": "overfit_batches=4 is a check, which resumes no run",
    }.items():
        assert message in error_of("fit", *tiny, *few, "--trainer.max_steps=8", wrong)
    err = error_of("fit", *tiny, "--ckpt_path=last", few[1], "--trainer.max_steps=8")
    assert "trainer.overfit_batches: 4 in the checkpoint, None here" in err
    last = run_folder / "checkpoints" / "last.ckpt"
    assert main(["validate", f"--ckpt_path={last}", "--trainer.limit_val_batches=1.0"]) == 0
    assert "batches were read" not in capsys.readouterr().err  # the whole split


def test_a_model_learns_the_few_batches_that_it_overfits(tiny, monkeypatch):
    losses = []
    monkeypatch.setattr(
        LanguageModelingModule,
        "on_train_batch_end",
        lambda self, *args: losses.append(self.trainer.callback_metrics["train_loss"].item()),
    )
    fast = ["--trainer.max_steps=30", "--optimizer.lr=0.02", "--optimizer.warmup_steps=0"]
    assert main(["fit", *tiny, "--trainer.overfit_batches=1", *fast]) == 0
    assert losses[-1] < losses[0] - 2
