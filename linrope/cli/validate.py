"""`linrope validate`: measure a checkpoint on the validation split."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.cli.output import _command_line
from linrope.cli.training import TrainingCLI
from linrope.evaluation.length_report import read_lengths
from linrope.evaluation.length_report import show as show_lengths
from linrope.evaluation.length_report import write as write_lengths
from linrope.evaluation.reports import make_folder, name_of, print_written
from linrope.evaluation.row_lengths import LengthReading


def validate(args: Sequence[str]) -> None:
    """Measure a checkpoint on the validation split: by position in the row, and in longer rows (--lengths)."""
    cli = TrainingCLI("validate", args, validate.__doc__)
    data, checkpoint = cli.datamodule, cli.checkpoint_given
    if cli.report.report is not None or cli.report.lengths:  # now, so that a mistake costs no validation
        data.open()
        cli.report.require_bytes(data.tokenizer)
    folder = None if cli.report.report is None else make_folder("--report", cli.report.report)
    if cli.report.lengths:
        corpus = data.open()["val"]
        lengths, text = cli.report.text_of(corpus, data.context, data.documents, cli.trainer.world_size)
    cli.trainer.validate(cli.model, data, ckpt_path=cli.ckpt_path, verbose=False, weights_only=True)
    if not cli.trainer.is_global_zero:
        return
    readings = [LengthReading.of_rows(data.context, cli.model.loss_by_position)]
    if cli.report.lengths:
        with cli.trainer.precision_plugin.val_step_context():
            model = cli.model.model.to(cli.trainer.strategy.root_device)
            readings = read_lengths(cli.console, model, text, lengths, data.context)
    show_lengths(cli.console, readings, data.context, at_lengths=bool(cli.report.lengths))
    if folder is not None:
        details = {"command": _command_line("validate", args), "checkpoint": checkpoint, "context": data.context}
        written = write_lengths(folder, readings, details, f"{name_of(checkpoint)}, trained at {data.context:,}")
        print_written(cli.console, written)
