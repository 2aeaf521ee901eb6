"""`linrope plan`: parameters, state, FLOPs, memory by length and duration of a run, before it starts."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table
from torch.optim import Optimizer

from linrope.data.batches.curriculum import PlannedStage, TrainingPlan
from linrope.errors import InputError
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.profiling.fake_tensors import shapes_only
from linrope.profiling.flops import step_flops
from linrope.profiling.memory_estimate import estimate_training_memory, step_loss
from linrope.segmented import require_segments
from linrope.utils.formatting import BYTES, COUNTS, bytes_text, duration_text, in_one_unit, parse_bytes, scaled
from linrope.utils.terminal import new_table, progress_bar

DEFAULT_SEGMENT = 4096
"""Segment length of the table's variant in segments."""
MEASURED_STEPS = 3
LONGEST = 2**24
"""The longest length that is tried against a memory."""
AUTOCAST = {"32-true": None, "32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast by Lightning's precision."""
MULTIPLES = (1, 4, 16, 64)
"""The table's lengths, as multiples of the context."""


@dataclass(frozen=True)
class Setting:
    """The options of a run that decide its costs."""

    model: LanguageModelConfig
    plan: TrainingPlan
    devices: int
    max_steps: int
    segment_length: int | None
    document_mask: bool
    precision: str
    averaged: bool
    optimizer: str
    device: str

    def __post_init__(self) -> None:
        if self.precision not in AUTOCAST:
            raise InputError(
                f"trainer.precision={self.precision!r} is unknown to `linrope plan`: it estimates the memory "
                f"of {', '.join(AUTOCAST)}."
            )

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that is tried: the model may have positions for so many only."""
        return LONGEST if self.document_mask else self.model.positions.longest_row or LONGEST

    @property
    def largest(self) -> PlannedStage:
        """The stage with the largest batches, of `batch_size` rows of `seq_len` tokens on one device."""
        return max(self.plan.stages, key=lambda stage: (stage.batch_size * stage.seq_len, stage.seq_len))


@dataclass(frozen=True)
class Variant:
    """A model, and whether it reads its rows in segments."""

    name: str
    config: LanguageModelConfig
    segment_length: int | None = None

    def memory(self, setting: Setting, length: int, rows: int) -> int:
        """Bytes of a training step on one device."""
        return estimate_training_memory(
            self.config,
            rows,
            length,
            self.segment_length,
            document_mask=setting.document_mask,
            autocast=AUTOCAST[setting.precision],
            averaged=setting.averaged,
            optimizer=setting.optimizer,
            device=setting.device,
        ).total

    def flops(self, length: int, rows: int) -> int:
        """Operations of a training step."""
        return step_flops(shapes_only(self.config), rows, length, self.segment_length)


def variants(setting: Setting) -> list[Variant]:
    """The model as configured, with softmax attention instead, and with or without segments if it can be read so."""
    softmax = replace(setting.model, attention="softmax", window=None)
    found = [Variant("this model", setting.model, setting.segment_length), Variant("with softmax", softmax)]
    if setting.segment_length is not None:
        return [*found, Variant("without segments", setting.model)]
    try:
        require_segments(shapes_only(setting.model), DEFAULT_SEGMENT)
    except InputError:  # the state grows with the length, or the window exceeds a segment
        return found
    return [*found, Variant("in segments", setting.model, DEFAULT_SEGMENT)]


def longest_that_fits(total: Callable[[int], int], memory: int) -> int:
    """The longest length, 1024 times a power of two, with `total(length)` ≤ `memory`; 0 if there is none."""
    lengths = [1024 << n for n in range((LONGEST // 1024).bit_length())]
    n_fit = bisect_left(lengths, True, key=lambda length: total(length) > memory)
    return lengths[n_fit - 1] if n_fit else 0


def measure_rate(setting: Setting, optimizer_of: Callable[[LanguageModel], Optimizer]) -> float:
    """Tokens per second on one device, from a few steps on random rows of the largest stage; without loading, logging
    and validation. `optimizer_of` makes the optimizer of the model."""
    device = torch.device(setting.device)
    model = setting.model.build().to(device)
    optimizer = optimizer_of(model)
    rows, length = setting.largest.batch_size, setting.largest.seq_len
    tokens = torch.randint(min(256, setting.model.vocab_size), (rows, length + 1), device=device)
    ids = torch.zeros_like(tokens[:, :-1]) if setting.document_mask else None

    def step() -> None:
        optimizer.zero_grad()
        autocast = AUTOCAST[setting.precision]
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = step_loss(model, tokens, setting.segment_length, ids)
        (loss / tokens.numel()).backward()
        optimizer.step()
        loss.item()  # waits for the device

    step()
    began = time.perf_counter()
    for _ in range(MEASURED_STEPS):
        step()
    return MEASURED_STEPS * rows * length / (time.perf_counter() - began)


def show(console: Console, setting: Setting, memory: str | None, rate: float | None) -> None:
    """Print the plan: parameters, state, steps, duration, the table by length, and what fits the memory ("24GiB")."""
    model, context = shapes_only(setting.model), setting.largest.seq_len
    for name, value in (
        ("parameters", f"{model.n_parameters:,}"),
        ("decoding state", f"{bytes_text(model.state_bytes(context))} at {context:,} tokens"),
        *_stage_texts(setting),
        ("the run", _run_text(setting, rate)),
    ):
        console.print(f"{name:<16}{value}", highlight=False, markup=False, soft_wrap=True)
    found = variants(setting)
    console.print()
    console.print(_table(console, setting, found))
    console.print(_caption(setting), highlight=False, markup=False, soft_wrap=True)
    if memory is not None:
        for variant in found:
            longest = longest_that_fits(lambda length, v=variant: v.memory(setting, length, 1), parse_bytes(memory))
            longest = min(longest, setting.longest_row)
            beyond = " or more" if longest == LONGEST else ""
            text = f"a row of {longest:,} tokens{beyond}" if longest else "not even a row of 1,024 tokens"
            console.print(f"fits {memory}: {variant.name}: {text}", highlight=False, soft_wrap=True)


def _stage_texts(setting: Setting) -> list[tuple[str, str]]:
    """Name and cost of a step; for a curriculum, of each stage's step."""
    stages, texts = setting.plan.stages, []
    for stage in stages:
        flops = Variant("", setting.model, setting.segment_length).flops(stage.seq_len, 1) / stage.seq_len
        of_step = f"{_flop(flops * stage.tokens_per_step)} ({_flop(flops)} a token)"
        texts.append(f"{stage.tokens_per_step:,} tokens, {of_step}")
    if len(stages) == 1:
        return [("a step", texts[0])]
    return [(f"from step {s.first_step:,}", f"rows of {s.seq_len:,}: {text}") for s, text in zip(stages, texts)]


def _flop(count: float) -> str:
    return scaled(count, [f"{unit}FLOP" for unit in COUNTS], 1000)


def _run_text(setting: Setting, rate: float | None) -> str:
    if setting.max_steps < 1:
        return "trainer.max_steps is not set"
    tokens = setting.plan.tokens_at(setting.max_steps)
    text = f"{setting.max_steps:,} steps, {tokens:,} tokens"
    if rate is None:
        return f"{text}; give --tokens_per_second N or --measure for its duration"
    return f"{text}: {duration_text(tokens / rate)} at {rate:,.0f} tokens per second"


def _table(console: Console, setting: Setting, found: list[Variant]) -> Table:
    multiples = [multiple for multiple in MULTIPLES if multiple * setting.largest.seq_len <= setting.longest_row]
    lengths = [multiple * setting.largest.seq_len for multiple in multiples]
    rows = [max(1, setting.largest.batch_size // multiple) for multiple in multiples]  # tokens of the run's batch
    memory: list[list[float]] = []  # by length and variant
    flops: list[list[float]] = []
    with progress_bar(console, BarColumn()) as bar:
        for shape in bar.track(list(zip(lengths, rows)), description="estimating"):
            memory.append([variant.memory(setting, *shape) for variant in found])
            flops.append([variant.flops(*shape) / math.prod(shape) for variant in found])
    unit, memory_cells = _in_one_unit(memory, BYTES, 1024)
    flops_unit, flops_cells = _in_one_unit(flops, COUNTS, 1000)
    columns = [column for variant in found for column in (f"{variant.name}\n{unit}", f"{flops_unit}FLOP/\ntoken")]
    table = new_table("a training step on one device, by the length of its rows", "length", "rows", *columns)
    for length, n_rows, *cells in zip(lengths, rows, memory_cells, flops_cells):
        table.add_row(f"{length:,}", str(n_rows), *(cell for pair in zip(*cells) for cell in pair))
    return table


def _in_one_unit(numbers: list[list[float]], units: list[str], base: int) -> tuple[str, list[list[str]]]:
    """A unit for a whole table of numbers, and the numbers in it."""
    if not numbers:
        return units[0], []
    unit, cells = in_one_unit([number for row in numbers for number in row], units, base)
    width = len(numbers[0])
    return unit, [cells[first : first + width] for first in range(0, len(cells), width)]


def _caption(setting: Setting) -> str:
    segments = "" if setting.segment_length is not None else f"A segment has {DEFAULT_SEGMENT:,} tokens. "
    if setting.device == "cpu":
        return f"{segments}Memory is in addition to a process that has imported PyTorch; runs took within 15 % of it."
    return f"{segments}Memory is that of tensors plus 10 % (a guess) for the GPU's allocator, without the CUDA context."
