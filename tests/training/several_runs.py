"""Several runs of the command line, one after the other in the same processes: those of two devices take long to start.

python -m tests.training.several_runs FILE reads a JSON list of runs, each {"args": the command line, "observed": bool}.
In observed runs some targets count nothing, and every rank writes what it has exchanged to FILE.RANK.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from linrope.cli.main import main
from linrope.losses import IGNORE
from linrope.training.data_modules.text import TextDataModule
from linrope.training.tasks.language_modeling import LanguageModelingModule


def ask_for_some(self: TextDataModule, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
    """Leaves out all targets of every row whose tokens sum to an odd number, and some of each other row."""
    odd = batch["inputs"].sum(1, keepdim=True) % 2 == 1
    return {**batch, "targets": batch["targets"].masked_fill(odd | (batch["inputs"] % 5 == 0), IGNORE)}


def exchanges(patch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of every bucket of gradients that the run to come exchanges: (optimizer steps before, micro-batch, numbers)."""
    found: list[tuple[int, int, int]] = []

    def on_train_start(self: LanguageModelingModule) -> None:
        def exchange(_, bucket):  # torch refuses all but its own annotations, spelt its own way
            found.append((self.trainer.global_step, self.trainer.fit_loop.batch_idx, bucket.buffer().numel()))
            done = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return done.then(lambda future: future.value()[0])

        before(self)
        self.trainer.strategy.model.register_comm_hook(None, exchange)

    before = LanguageModelingModule.on_train_start
    patch.setattr(LanguageModelingModule, "on_train_start", on_train_start)
    return found


def run_all(file: Path) -> int:
    """The highest exit code."""
    codes = []
    for run in json.loads(file.read_text()):
        with pytest.MonkeyPatch.context() as patch:
            if run["observed"]:
                patch.setattr(TextDataModule, "on_after_batch_transfer", ask_for_some)
                found = exchanges(patch)
            codes.append(main(run["args"]))
        if run["observed"]:
            file.with_name(f"{file.name}.{torch.distributed.get_rank()}").write_text(json.dumps(found))
    return max(codes)


if __name__ == "__main__":
    sys.exit(run_all(Path(sys.argv[1])))
