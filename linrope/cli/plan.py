"""`linrope plan`: what a run will take, before it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jsonargparse import Namespace

from linrope.cli.training import TrainingCLI
from linrope.profiling.fake_tensors import shapes_only
from linrope.profiling.run_plan import Setting, measure_rate
from linrope.profiling.run_plan import show as show_plan
from linrope.segmented import require_segments
from linrope.utils.formatting import parse_bytes


def plan(args: Sequence[str]) -> None:
    """Say what a run will take before it runs: memory against length, operations, time."""
    cli = TrainingCLI("plan", args, plan.__doc__)
    config, wanted = cli.config_init, cli.plan
    memory = None if wanted.memory is None else parse_bytes(wanted.memory)
    if config.segment_length is not None:
        require_segments(shapes_only(config.model), config.segment_length)
    setting = planned(config)
    rate = wanted.tokens_per_second
    if wanted.measure:
        rate = measure_rate(setting) * setting.devices
        if setting.devices > 1:
            cli.console.print(f"measured on one device, and counted {setting.devices} times")
    show_plan(cli.console, setting, memory, rate)


def planned(config: Namespace) -> Setting:
    """What a run's costs follow from, of its configuration."""
    data, trainer = config.data, config.trainer
    gpu = trainer.accelerator in ("gpu", "cuda") or (trainer.accelerator == "auto" and torch.cuda.is_available())
    devices = _n_devices(trainer.devices, gpu) * trainer.num_nodes
    plan = data.plan_for(trainer.accumulate_grad_batches * devices)
    if trainer.max_steps >= 1:
        data.require_steps(plan, trainer.max_steps)
    return Setting(
        model=config.model,
        plan=plan,
        devices=devices,
        max_steps=trainer.max_steps,
        segment_length=config.segment_length,
        document_mask=data.documents == "apart",
        precision=str(trainer.precision or "32-true"),
        averaged=config.run.ema_decay is not None,
        device="cuda" if gpu else "cpu",
    )


def _n_devices(devices: int | str | list[int], gpu: bool) -> int:
    """How many a run would have; where it takes all there are, those of this machine."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal():
        return int(devices)
    return max(1, torch.cuda.device_count()) if gpu else 1
