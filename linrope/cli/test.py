"""`linrope test`: measure a checkpoint on the test split."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.cli.checkpoint import with_run_config
from linrope.cli.ranks import errors_printed_once
from linrope.cli.training import CheckpointOptions, TrainingCLI


@errors_printed_once()
def run(args: Sequence[str]) -> None:
    """Run `linrope test` with the command line `args`."""
    TrainingCLI("test", with_run_config(args), CheckpointOptions).run(verbose=False)
