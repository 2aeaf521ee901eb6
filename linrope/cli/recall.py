"""`linrope recall`: what a model recalls, by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn

from linrope.cli.checkpoint import ModelOptions
from linrope.cli.output import command_line
from linrope.cli.parser import parse_command
from linrope.data.corpus.files import find_sources
from linrope.data.corpus.splits import split_corpus
from linrope.data.synthetic.copying import Induction
from linrope.data.synthetic.passkey import Passkey
from linrope.data.synthetic.recall_task import RecallTask
from linrope.data.tokenizers.bytes import VOCAB_SIZE
from linrope.errors import InputError
from linrope.evaluation.recall_map import recall_by_depth, table_of
from linrope.evaluation.recall_map import write as write_recall
from linrope.evaluation.reports import make_folder, name_of, print_written
from linrope.utils.terminal import progress_bar


@dataclass(frozen=True, kw_only=True)
class RecallConfig(ModelOptions):
    """The model and the task."""

    task: Literal["passkey", "induction"] = "passkey"
    """passkey: five digits stated in real text; induction: which token followed a mark, in random tokens."""
    lengths: list[int]
    depths: list[int]
    rows: int = 20
    """Rows of each length and depth."""
    text: str | None = None
    """Text around pass keys: a file, a folder or a glob; null is the built-in corpus."""
    fractions: list[float] = field(default_factory=lambda: [0.9, 0.05, 0.05])
    """Fractions of the text for train, val and test; val is used. Give those of the model's training."""
    seed: int = 0
    """Seed of the rows."""
    report: str | None = None
    """Folder for the table as CSV and JSON and, with matplotlib, a heat map."""

    def make_task(self, vocab_size: int) -> RecallTask:
        """The task, for a model of `vocab_size` tokens. InputError if pass keys cannot be written in them."""
        if self.task == "induction":
            return Induction(vocab_size)
        if vocab_size != VOCAB_SIZE:
            raise InputError(
                f"--ckpt_path: its model has vocab_size={vocab_size}, pass keys are written in bytes ({VOCAB_SIZE})."
            )
        corpora, _ = split_corpus(find_sources(self.text, "--text"), self.fractions)
        return Passkey(corpora["val"])


LENGTHS = {"nargs": "+", "type": int, "default": [256, 512, 1024, 2048, 4096], "help": "Tokens of the rows."}
DEPTHS_HELP = "Where the answer is stated, in percent of the row: 0 at its start, 100 right before the question."
DEPTHS = {"nargs": "+", "type": int, "default": [0, 25, 50, 75, 100], "help": DEPTHS_HELP}


def run(args: Sequence[str]) -> None:
    """Run `linrope recall` with the command line `args`."""
    usage = "--ckpt_path FILE [--lengths N N ...] [options]"
    config = parse_command("recall", RecallConfig, args, usage, lengths=LENGTHS, depths=DEPTHS)
    console = Console(highlight=False)
    folder = None if config.report is None else make_folder("--report", config.report)
    model = config.load()
    model.config.positions.require_row("--lengths", max(config.lengths))
    task = config.make_task(model.config.vocab_size)
    with progress_bar(console, BarColumn()) as bar:
        number = bar.add_task("asking", total=len(config.lengths) * len(config.depths))
        cases = config.lengths, config.depths, config.rows, config.seed
        found = list(recall_by_depth(model, task, *cases, tick=lambda: bar.advance(number)))
    title = f"{config.task}: rows answered, {name_of(config.checkpoint)}"
    console.print(table_of(found, title))
    if folder is not None:
        print_written(console, write_recall(folder, found, {"command": command_line("recall", args)}, title))
