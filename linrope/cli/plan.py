"""`linrope plan`: memory, FLOPs and time of a run, before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jsonargparse import Namespace

from linrope.cli.epochs import n_data_parallel, n_devices
from linrope.cli.training import ConfigCLI
from linrope.data.batches.curriculum import TrainingPlan
from linrope.errors import InputError
from linrope.profiling.fake_tensors import shapes_only
from linrope.profiling.run_plan import AUTOCAST, Setting, measure_rate
from linrope.profiling.run_plan import show as show_plan
from linrope.segmented import require_segments
from linrope.training.data_modules.text import TextDataModule
from linrope.training.optimizer import fused_on
from linrope.training.precision import AUTO, automatic_precision, is_nvidia
from linrope.training.task import Batch, TrainingTask
from linrope.training.task_plan import measure_step
from linrope.training.task_plan import show as show_task_plan
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.utils.formatting import parse_bytes
from linrope.utils.memory import keep_freed_memory


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the run is compared with."""

    memory: str | None = None
    """A device's memory, 24GiB for example: print the longest row that fits."""
    tokens_per_second: float | None = None
    """A known rate: print how long the run takes."""
    measure: bool = False
    """Measure the rate in a few training steps on this machine, on random tokens."""

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and not 0 < self.tokens_per_second < math.inf:
            raise InputError(f"--tokens_per_second={self.tokens_per_second} must be above 0.")
        if self.measure and self.tokens_per_second is not None:
            raise InputError("--measure and --tokens_per_second exclude each other: give one of them.")
        if self.memory is not None:
            parse_bytes(self.memory, "--memory=")


def run(args: Sequence[str]) -> None:
    """Run `linrope plan` with the command line `args`."""
    cli = ConfigCLI("plan", args, PlanOptions)
    config, options = cli.config_init, cli.options
    require_whole_rows(config.trainer)
    cli.count_steps()
    if cli.task.batch_loss is not LanguageModelingModule.batch_loss:
        return plan_task(cli)
    if config.segment_length is not None:
        require_segments(shapes_only(config.model), config.segment_length)
    setting = planned(config)
    rate = options.tokens_per_second
    if options.measure:
        keep_freed_memory()  # as `linrope fit` does
        fused = fused_on(setting.device)
        rate = measure_rate(setting, lambda model: config.optimizer.optimizer_of(model, fused)) * setting.devices
        if setting.devices > 1:
            cli.console.print(f"measured on one device, and counted {setting.devices} times")
    show_plan(cli.console, setting, options.memory, rate)


def require_whole_rows(trainer: Namespace) -> None:
    """Raise InputError for a run whose devices share rows."""
    if (groups := n_data_parallel(trainer)) != n_devices(trainer):
        raise InputError(
            f"trainer.strategy.sequence_parallel_size={n_devices(trainer) // groups}: `linrope plan` knows runs whose "
            "devices read whole rows. Set it to 1 for the plan; each device then has that share of a row's activations."
        )


def plan_task(cli: ConfigCLI) -> None:
    """Print the plan of a task with a loss of its own, from its first batch."""
    config, given = cli.config_init, cli.options
    if given.memory is not None or given.tokens_per_second is not None:
        name = "memory" if given.memory is not None else "tokens_per_second"
        raise InputError(f"--{name} is for language models: the plan of task={cli.config.task!r} measures a step.")
    data, trainer = config.data, config.trainer
    max_steps, remark = trainer.max_steps, "From the first batch; other batches may be larger or smaller."
    if isinstance(data, TextDataModule) and data.curriculum is not None:
        plan = stages_of(config)
        if len(plan.stages) > 1:
            max_steps, remark = plan.stages[0].n_steps, _other_stages(plan)
    step = measure_step(*first_step(cli), averaged=config.run.ema_decay is not None)
    show_task_plan(cli.console, step, max_steps, trainer.accumulate_grad_batches, n_devices(trainer), remark)


def _other_stages(plan: TrainingPlan) -> str:
    others = ", ".join(f"{s.batch_size} rows of {s.seq_len:,} from step {s.first_step:,}" for s in plan.stages[1:])
    return (
        f"Of the first stage of data.curriculum. The others are {others}: for one of them give --data.curriculum null "
        "--data.context TOKENS --data.batch_size ROWS."
    )


def first_step(cli: ConfigCLI) -> tuple[TrainingTask, Batch, torch.dtype | None]:
    """The task of a run with new weights, its first training batch, and the dtype of its mixed precision."""
    task, data = cli.build_task(), cli.config_init.data
    data.setup("fit")
    task.require_data(data)
    batch = next(iter(data.train_dataloader()))
    precision = precision_of(cli.config_init)
    if precision not in AUTOCAST:
        raise InputError(f"trainer.precision={precision!r} is unknown to `linrope plan`: try {', '.join(AUTOCAST)}.")
    return task, batch, AUTOCAST[precision]


def precision_of(config: Namespace) -> str:
    """`trainer.precision`, or what "auto" stands for."""
    trainer = config.trainer
    if trainer.precision == AUTO:
        return automatic_precision(trainer.accelerator)[0]
    return str(trainer.precision or "32-true")


def stages_of(config: Namespace) -> TrainingPlan:
    """The samples of each optimizer step. InputError if the run ends before its curriculum."""
    data, trainer = config.data, config.trainer
    plan = data.plan_for(trainer.accumulate_grad_batches * n_devices(trainer))
    if trainer.max_steps >= 1:
        data.require_steps(plan, trainer.max_steps)
    return plan


def planned(config: Namespace) -> Setting:
    """The part of a run's configuration that its costs depend on."""
    data, trainer = config.data, config.trainer
    gpu = is_nvidia(trainer.accelerator)
    devices = n_devices(trainer)
    data.require_positions(config.model.positions)
    return Setting(
        model=config.model,
        plan=stages_of(config),
        devices=devices,
        max_steps=trainer.max_steps,
        segment_length=config.segment_length,
        document_mask=data.document_mask,
        precision=precision_of(config),
        averaged=config.run.ema_decay is not None,
        optimizer=config.optimizer.name,
        device="cuda" if gpu else "cpu",
    )
