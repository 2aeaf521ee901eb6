"""`linrope test`: measure a checkpoint on the test split."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.cli.training import TrainingCLI


def test(args: Sequence[str]) -> None:
    """Measure a checkpoint on the test split."""
    cli = TrainingCLI("test", args, test.__doc__)
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=cli.ckpt_path, verbose=False, weights_only=True)
