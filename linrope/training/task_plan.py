"""What a run of a task costs, from training steps on its first batch on this machine's CPU: any `TrainingTask`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from linrope.profiling.memory_estimate import WORKSPACE, StorageMeter, kept_by_optimizer, size_of
from linrope.training.task import Batch, TrainingTask
from linrope.training.tasks.conversion import WithTeacher
from linrope.utils.formatting import COUNTS, bytes_text, duration_text, scaled

TIMED_STEPS = 3


@dataclass(frozen=True)
class TaskStep:
    """One micro-batch of training, forward and backward."""

    n_parameters: int
    n_targets: int
    flops: int
    """Of matrix products and convolutions."""
    memory: int
    """Bytes of weights and their moving average, a teacher, gradients, the optimizer's moments and activations, in
    addition to a process that has imported PyTorch."""
    seconds: float
    """The fastest of a few, on this machine's CPU."""


def measure_step(task: TrainingTask, batch: Batch, autocast: torch.dtype | None, averaged: bool = False) -> TaskStep:
    """Run training steps of `task` on one batch. The weights stay as they are. `averaged`: the run keeps their moving
    average."""

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
    # the meter sees gradients and activations; weights are there already, moments come with the first step
    held = [*task.parameters(), *task.buffers(), *kept_by_optimizer(task.model, task.optimizer_config.name)]
    held += task.model.parameters() if averaged else []
    held += task.teacher.parameters() if isinstance(task, WithTeacher) else []
    n_parameters = sum(parameter.numel() for parameter in task.parameters())
    memory = meter.peak + size_of(held) + WORKSPACE
    return TaskStep(n_parameters, n_targets, counter.get_total_flops(), memory, min(seconds))


def show(console: Console, step: TaskStep, max_steps: int, accumulated: int, devices: int, remark: str) -> None:
    """Print the plan of a run of `max_steps` optimizer steps of `accumulated` micro-batches on each device."""
    n_batches = accumulated * devices
    flops = scaled(step.flops * n_batches, [f"{unit}FLOP" for unit in COUNTS], 1000)
    duration = duration_text(max_steps * accumulated * step.seconds)
    run = f"{max_steps:,} steps: {duration} at the speed of this CPU"
    for name, value in (
        ("parameters", f"{step.n_parameters:,}"),
        ("a step", f"{step.n_targets * n_batches:,} targets, {flops}"),
        ("memory", f"{bytes_text(step.memory)} on one device"),
        ("the run", run if max_steps >= 1 else "trainer.max_steps is not set"),
    ):
        console.print(f"{name:<16}{value}", highlight=False, markup=False, soft_wrap=True)
    console.print(remark, highlight=False, markup=False, soft_wrap=True)
