"""Two devices train every shipped config whose data the tests have, with overrides on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import tiny_options
from tests.processes import Run

ELSEWHERE = ("glue-mrpc", "cail-scm", "lm-sequence-parallel", "lm-sequence-parallel-cpu")
ELSEWHERE += ("convert-align", "convert-distill")
"""Files of users, and configs that test_sequence_parallel.py and test_convert.py (those with a teacher) train."""
OTHER_TASKS = ["--trainer.max_epochs=-1", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
OTHER_TASKS += ["--trainer.limit_val_batches=2", "--trainer.accelerator=cpu", "--model.d_model=16"]
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def small(config: Path, text_file: Path, folder: Path) -> list[str]:
    """Options that make a run of two steps of a config."""
    task = yaml.safe_load(config.read_text()).get("task", "language_modeling")
    options = tiny_options(text_file, folder)
    if task == "language_modeling":
        return [*options, "--model.n_layers=4", "--model.d_model=128", "--run.start_from=null", "--data.test_stride=16"]
    if task == "masked_lm":
        options = [option for option in options if not option.startswith("--sample")]
        return [*options, "--data.curriculum=null", "--model.vocab_size=261", "--model.d_ff=64"]
    return [*OTHER_TASKS, f"--run.folder={folder / 'runs'}"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("config", [path for path in CONFIGS if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_two_devices_train_every_shipped_config(config, strategy, text_file, tmp_path):
    devices = ["--trainer.precision=32-true", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    args = ["fit", f"--config={config}", *small(config, text_file, tmp_path), *devices]
    code, out, err = Run(args, tmp_path, ranks=2).wait()
    assert code == 0, err
    assert "\nstep 2/2  loss " in out
    assert "\nstep 2  val_loss " in out
