"""A run that is killed at random hooks and between the steps of writing files, and started again until it is done."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from linrope.cli.fit import FitCLI
from linrope.cli.main import main
from tests.processes import Run
from tests.training.test_resume import TRAINED, equal, exact_options, load

HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_save_checkpoint",
    "on_load_checkpoint", "on_validation_start", "on_validation_batch_end", "on_validation_end", "on_train_end",
    "on_fit_end", "teardown",
)  # fmt: skip


class Clock:
    """Kills this process at the event of that number."""

    def __init__(self, last: int) -> None:
        self.left = last

    def tick(self, *args, **options) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def install(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let hooks of Lightning, and calls that end the writing of a file, be events."""
    killer = type("Killer", (Callback,), {name: lambda self, *args, **options: clock.tick() for name in HOOKS})()
    callbacks = FitCLI.callbacks
    patch.setattr(FitCLI, "callbacks", lambda self: [*callbacks(self), killer])
    for place, name in ((os, "fsync"), (Path, "replace"), (os, "replace")):
        patch.setattr(place, name, with_events(getattr(place, name), clock))


def with_events(call: Callable, clock: Clock) -> Callable:
    def between(*args, **options):
        clock.tick()
        result = call(*args, **options)
        clock.tick()
        return result

    return between


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_anywhere_ends_with_the_weights_of_one_that_was_not(seed, tiny, tmp_path):
    options = [*exact_options(tiny), "--trainer.max_steps=24", "--run.checkpoint_every_n_steps=2"]
    options += ["--trainer.val_check_interval=6"]
    assert main(["fit", *options, "--run.name=whole"]) == 0
    draw, runs, kills = random.Random(seed), tmp_path / "runs", 0
    while True:
        resume = ["--ckpt_path=last"] if list((runs / "tiny").rglob("last.ckpt")) else []
        with pytest.MonkeyPatch.context() as patch:
            install(patch, Clock(draw.randint(1, 150)))
            code, out, err = Run(["fit", *options, *resume], tmp_path).wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, out + err
        kills += 1
    assert kills > 2
    ended = max((runs / "tiny").rglob("last.ckpt"), key=lambda file: file.stat().st_mtime_ns).parents[1]
    whole = load(runs / "whole" / "version_0")
    assert all(equal(whole[key], load(ended)[key]) for key in TRAINED)
    assert main(["fit", *options, "--trainer.max_steps=2"]) == 0  # another run of that name removes what is left
    assert not list(runs.rglob("*.partial*"))
