"""`linrope validate`: measure a checkpoint on the validation split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from linrope.cli.checkpoint import with_run_config
from linrope.cli.output import command_line
from linrope.cli.ranks import errors_printed_once
from linrope.cli.training import CheckpointOptions, TrainingCLI, writes_text
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.evaluation.length_report import show as show_lengths
from linrope.evaluation.length_report import write as write_lengths
from linrope.evaluation.reports import make_folder, name_of, print_written
from linrope.evaluation.row_lengths import LengthReading, excerpt_for, parse_lengths, read_at_lengths
from linrope.utils.terminal import progress_bar


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(CheckpointOptions):
    """The checkpoint, rows longer than data.context, and files for the results."""

    lengths: list[str] | None = None
    report: str | None = None
    """Folder for the tables as CSV and JSON and, with matplotlib, a picture."""
    report_tokens: int = 262_144
    """Tokens of text that --lengths reads; at least the longest length."""

    def __post_init__(self) -> None:
        if self.report_tokens < 1:
            raise InputError(f"--report_tokens={self.report_tokens} must be 1 or more.")

    def require_bytes(self, tokenizer: Tokenizer | None) -> None:
        """Raise InputError if a report is asked for and the tokens' bytes are unknown."""
        if tokenizer is None:
            option = "--lengths" if self.lengths else "--report"
            raise InputError(
                f"{option} counts bits per byte, and the tokens' byte counts are unknown: set data.tokenizer."
            )


LENGTHS = {
    "nargs": "+",
    "type": str,
    "default": None,
    "help": "Measure rows of these lengths too, at the beginning of the validation split: in tokens, or as multiples "
    "of data.context: 1x 4x 16x 64x. Rows are read in segments, so any length fits in memory.",
}


@errors_printed_once()
def run(args: Sequence[str]) -> None:
    """Run `linrope validate` with the command line `args`."""
    cli = TrainingCLI("validate", with_run_config(args), ValidateOptions, lengths=LENGTHS)
    data, options = cli.datamodule, cli.options
    if not writes_text(cli.task):
        if options.lengths or options.report is not None:
            raise InputError(f"--lengths and --report read language models only, not task={cli.config.task!r}.")
        return cli.run(verbose=False)
    if options.report is not None or options.lengths:  # checked before the validation, which takes long
        data.open()
        options.require_bytes(data.tokenizer)
    folder = None if options.report is None else make_folder("--report", options.report)
    if options.lengths:
        lengths = parse_lengths(options.lengths, data.context)
        if cli.trainer.world_size > 1:
            raise InputError(
                f"--lengths reads on one device, not on {cli.trainer.world_size}: set trainer.devices=1 and "
                "trainer.strategy=auto."
            )
        cli.model.model_config.positions.require_row("--lengths", max(lengths))
        excerpt = excerpt_for(data.open()["val"], lengths, options.report_tokens, data.document_mask)
    cli.run(verbose=False)
    if not cli.trainer.is_global_zero:
        return
    readings = [LengthReading.of_rows(data.context, cli.model.loss_by_position)]
    if options.lengths:
        model = cli.model.model.to(cli.trainer.strategy.root_device).eval()
        with cli.trainer.precision_plugin.val_step_context(), progress_bar(cli.console) as bar:
            task = bar.add_task("reading rows of each length", total=len(lengths) * (len(excerpt.tokens) - 1))
            tick = partial(bar.advance, task)
            readings = list(read_at_lengths(model, excerpt, lengths, data.context, tick))
    show_lengths(cli.console, readings, data.context, at_lengths=bool(options.lengths))
    if folder is not None:
        details = {"command": command_line("validate", args), "checkpoint": cli.checkpoint, "context": data.context}
        written = write_lengths(folder, readings, details, f"{name_of(cli.checkpoint)}, data.context={data.context:,}")
        print_written(cli.console, written)
