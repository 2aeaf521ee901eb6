"""`linrope test`: measure a checkpoint on the test split."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.cli.checkpoint import with_run_config
from linrope.cli.ranks import errors_printed_once
from linrope.cli.training import CheckpointOptions, TrainingCLI


@errors_printed_once()
def run(args: Sequence[str]) -> None:
    """Run `linrope test` with the command line `args`."""
    cli = TrainingCLI("test", with_run_config(args), CheckpointOptions)
    cli.run(verbose=False)
    stride = getattr(cli.datamodule, "test_stride", None)
    if stride is not None and cli.trainer.is_global_zero:
        before = f"after {cli.datamodule.context - stride:,} others or more, as far as its "
        before += "document" if cli.datamodule.document_mask else "text"
        told = f"each token was predicted once, {before} has them (data.test_stride={stride})"
        cli.console.print(told, highlight=False, soft_wrap=True)
