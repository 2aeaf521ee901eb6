"""Recall by row length and by depth, the place of the information in the row: a table and a heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from linrope.data.synthetic.recall_task import RecallTask
from linrope.errors import InputError
from linrope.evaluation.reports import write_csv, write_json, write_picture
from linrope.evaluation.row_lengths import segment_logits
from linrope.losses import IGNORE
from linrope.models.language_model import LanguageModel
from linrope.utils.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAP = 4
"""First number of the seeds of recall maps; `linrope.data.synthetic.recall_task` uses the smaller ones."""


@dataclass(frozen=True)
class Recalled:
    """One length and depth: the share of rows with all answers right, and the share of tokens of answers."""

    length: int
    depth: int
    """Place of the information, in percent of the row: 0 at its start, 100 right before the question."""
    rows: int
    answered: float
    tokens_right: float


def recall_by_depth(
    model: LanguageModel,
    task: RecallTask,
    lengths: Sequence[int],
    depths: Sequence[int],
    n_rows: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[Recalled]:
    """Measure the recall in `n_rows` rows of each length and depth; `tick` is called after each of these cases.

    Rows are read in segments, so with linear attention memory does not grow with the length. InputError, before the
    first row is read, if the task cannot make such rows.
    """
    require_cases(task, lengths, depths, n_rows)
    for length, depth in product(lengths, depths):
        inputs, targets = task.rows(n_rows, (length, depth), (_MAP, seed, length, depth))
        right, asked = answers(model, inputs, targets), targets != IGNORE
        tokens_right = (right & asked).sum() / asked.sum()
        yield Recalled(length, depth, n_rows, (right | ~asked).all(1).double().mean().item(), tokens_right.item())
        tick()


def require_cases(task: RecallTask, lengths: Sequence[int], depths: Sequence[int], n_rows: int) -> None:
    """Raise InputError unless the task can make rows of each length and depth."""
    if n_rows < 1 or not lengths or not depths:
        raise InputError(f"--rows={n_rows}, --lengths={list(lengths)}, --depths={list(depths)}: give at least one.")
    for case in product(lengths, depths):
        try:
            task.require(case)
        except InputError as error:
            raise InputError(f"--lengths and --depths: {error}") from error


@torch.inference_mode()
def answers(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Booleans (B, T): whether the likeliest token is the target."""
    right = torch.zeros_like(targets, dtype=torch.bool)
    for rows, positions, logits in segment_logits(model, inputs):
        right[rows, positions] = logits.argmax(-1).cpu() == targets[rows, positions]
    return right


def table_of(found: Sequence[Recalled], title: str) -> Table:
    """The shares of rows answered, with a row for each depth and a column for each length."""
    lengths = sorted({case.length for case in found})
    table = new_table(title, "depth", *(f"{length:,}" for length in lengths))
    for depth in sorted({case.depth for case in found}):
        shares = {case.length: case.answered for case in found if case.depth == depth}
        table.add_row(f"{depth} %", *(f"{shares[length]:.0%}" if length in shares else "" for length in lengths))
    return table


def write(folder: Path, found: Sequence[Recalled], details: dict[str, Any], title: str) -> list[Path]:
    """Write `recall.csv`, `recall.json` with the details, and the heat map `recall.png`."""
    rows = [asdict(case) for case in found]
    return [
        write_csv(folder / "recall.csv", rows),
        write_json(folder / "recall.json", {**details, "cases": rows}),
        *write_picture(folder / "recall.png", lambda: figure_of(found, title)),
    ]


def figure_of(found: Sequence[Recalled], title: str, trained_to: int | None = None) -> Figure:
    """The heat map; a case that was not measured stays white. A line marks the longest row of training, if known."""
    from matplotlib.figure import Figure

    lengths, depths = sorted({case.length for case in found}), sorted({case.depth for case in found})
    shares = {(case.depth, case.length): 100 * case.answered for case in found}
    grid = [[shares.get((depth, length), math.nan) for length in lengths] for depth in depths]
    width, height = 2.5 + 0.8 * len(lengths), 1.8 + 0.35 * len(depths)
    figure = Figure(figsize=(max(6.5, width), max(3.0, height)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (depth, length), share in shares.items():
        axes.text(lengths.index(length), depths.index(depth), f"{share:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xlabel("length of the row (tokens)")
    if trained_to is not None and lengths[0] <= trained_to < lengths[-1]:
        axes.axvline(sum(length <= trained_to for length in lengths) - 0.5, color="black", linestyle="--")
        axes.set_xlabel("length of the row (tokens); trained to the left of the dashes")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axes.set_ylabel("depth (0 %: at the start)")
    figure.colorbar(image, label="rows answered (%)")
    figure.suptitle(title, fontsize="medium", wrap=True)
    return figure
