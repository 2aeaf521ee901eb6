"""What a run of a task costs, from training steps on its first batch on this machine's CPU: any `TrainingTask`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from linrope.profiling.memory_estimate import WORKSPACE, StorageMeter, kept_by_optimizer, size_of
from linrope.training.task import Batch, TrainingTask
from linrope.utils.formatting import COUNTS, bytes_text, duration_text, scaled

TIMED_STEPS = 3


@dataclass(frozen=True)
class TaskStep:
    """One micro-batch of training, forward and backward."""

    n_targets: int
    flops: int
    """Of matrix products and convolutions."""
    memory: int
    """Bytes of weights, gradients, the optimizer's moments and activations, in addition to a process that has imported
    PyTorch."""
    seconds: float
    """The fastest of a few, on this machine's CPU."""


def measure_step(task: TrainingTask, batch: Batch, autocast: torch.dtype | None) -> TaskStep:
    """Run training steps of `task` on one batch. The weights stay as they are."""

    def run() -> int:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = task.batch_loss(batch)
        loss.total.backward()
        task.zero_grad()
        return int(loss.n_targets)

    with FlopCounterMode(display=False) as counter:
        n_targets = run()
    with StorageMeter("cpu") as meter:
        run()
    seconds = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    # the meter sees gradients and activations; the weights are there already, moments come with the first step
    of_moments = size_of(kept_by_optimizer(task.model, task.optimizer_config.name))
    memory = meter.peak + size_of(task.parameters()) + of_moments + WORKSPACE
    return TaskStep(n_targets, counter.get_total_flops(), memory, min(seconds))


def show(console: Console, task: TrainingTask, step: TaskStep, max_steps: int, accumulated: int, devices: int) -> None:
    """Print the plan of a run of `max_steps` optimizer steps of `accumulated` micro-batches on each device."""
    n_batches = accumulated * devices
    flops = scaled(step.flops * n_batches, [f"{unit}FLOP" for unit in COUNTS], 1000)
    duration = duration_text(max_steps * accumulated * step.seconds)
    run = f"{max_steps:,} steps: {duration} at the speed of this CPU"
    for name, value in (
        ("parameters", f"{sum(p.numel() for p in task.parameters()):,}"),
        ("a step", f"{step.n_targets * n_batches:,} targets, {flops}"),
        ("memory", f"{bytes_text(step.memory)} on one device"),
        ("the run", run if max_steps >= 1 else "trainer.max_steps is not set"),
    ):
        console.print(f"{name:<16}{value}", highlight=False, markup=False, soft_wrap=True)
    console.print("From the first batch; other batches may be larger or smaller.", highlight=False, soft_wrap=True)
