"""Every family of models trains divided among two devices as on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linrope.cli.main import main
from tests.conftest import write_text_file
from tests.processes import Run
from tests.training.tasks import test_classification, test_masked_lm, test_translation
from tests.training.test_fsdp import ALONE, SHARDED, checkpoint_of

CHECKPOINTED = ["--trainer.devices=2", "--trainer.strategy=linrope.training.ShardedStrategy"]
CHECKPOINTED += ["--trainer.strategy.activation_checkpointing=true"]


def masked_lm(folder: Path) -> list[str]:
    return [*test_masked_lm.OPTIONS, f"--data.path={write_text_file(folder)}"]


def classification(folder: Path) -> list[str]:
    test_classification.write_pairs(folder)
    columns = ["--data.text=first", "--data.pair=second", "--data.label=answer"]
    return [*test_classification.OPTIONS, f"--data.path={folder}", *columns]


def translation(folder: Path) -> list[str]:
    for split in ("train", "val", "test"):
        for language, lines in (("en", test_translation.ENGLISH), ("de", test_translation.GERMAN)):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return [*test_translation.OPTIONS, f"--data.path={folder}"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "precision", "tolerance"),
    [(SHARDED, "64-true", 1e-9), (CHECKPOINTED, "32-true", 1e-5)],  # Lightning refuses float64 with options
    ids=["fsdp2", "activation_checkpointing"],
)
@pytest.mark.parametrize("task", [masked_lm, classification, translation])
def test_a_model_is_trained_as_on_one_device(
    task: Callable[[Path], list[str]], strategy: list[str], precision: str, tolerance: float, tmp_path, monkeypatch
):
    """With dropout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    options = ["fit", *task(tmp_path / "text"), "--trainer.max_steps=4", f"--trainer.precision={precision}"]
    process = Run([*options, *strategy, "--trainer.val_check_interval=4", "--run.name=ours"], tmp_path, ranks=2)
    code, out, err = process.wait()
    assert code == 0, out + err
    assert main([*options, *ALONE, "--run.name=alone"]) == 0
    ours, alone = (checkpoint_of(tmp_path / "runs" / name / "version_0") for name in ("ours", "alone"))
    torch.testing.assert_close(ours["state_dict"], alone["state_dict"], rtol=tolerance, atol=tolerance)


@pytest.mark.exhaustive
def test_translations_of_a_model_on_two_devices_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    options = [*translation(tmp_path / "text"), "--run.name=ours"]
    assert main(["fit", *options, "--trainer.max_steps=1"]) == 0
    sharded = [*SHARDED, "--ckpt_path=runs/ours/version_0/checkpoints/last.ckpt"]
    code, _, err = Run(["test", *options, *sharded], tmp_path, ranks=2).wait()
    assert code == 2
    assert "translations end at different steps" in err
