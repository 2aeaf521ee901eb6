"""Options of the Trainer that count epochs, as numbers of steps and batches: training is one endless epoch, also on
data that has epochs."""

from __future__ import annotations

import math
from typing import Any

import torch
from jsonargparse import Namespace

from linrope.errors import InputError
from linrope.training.data_modules.base import ResumableDataModule, require_accumulation
from linrope.training.precision import is_nvidia
from linrope.training.sharding import ShardedStrategy, mesh_sizes


def count_steps(trainer: Namespace, data: ResumableDataModule) -> None:
    """Replace `trainer.max_epochs` by `trainer.max_steps`, for data that has epochs; of both the earlier end counts."""
    if (epochs := trainer.max_epochs) in (None, -1):
        return
    if (steps := _steps_per_epoch(trainer, data)) is None:
        raise InputError(
            f"trainer.max_epochs={epochs} has no meaning here: training draws from an endless stream of samples. "
            "Set trainer.max_steps."
        )
    last = epochs * steps if trainer.max_steps == -1 else min(trainer.max_steps, epochs * steps)
    trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches = last, -1, None


def count_validations(trainer: Namespace, data: ResumableDataModule, default_interval: int) -> None:
    """Replace `trainer.check_val_every_n_epoch` by `trainer.val_check_interval`, in batches; `default_interval` counts
    as not given. Data that has epochs is validated in each if nothing is given, and at the end of a run that is
    shorter than the interval. It comes before `count_steps`, which drops the size of an epoch."""
    if (epochs := trainer.check_val_every_n_epoch) is None:
        _limit_interval(trainer, data, default_interval)
        return
    if epochs < 1:
        raise InputError(f"trainer.check_val_every_n_epoch={epochs} must be 1 or more, or null.")
    steps, interval = _steps_per_epoch(trainer, data), _whole(trainer.val_check_interval)
    at_ends = interval is None or (isinstance(interval, float) and interval == 1)
    is_default = interval == default_interval
    trainer.check_val_every_n_epoch = None
    if epochs == 1 and not isinstance(interval, float | None) and (steps is None or not is_default):
        return  # at this interval in every epoch
    if steps is None:
        raise InputError(
            f"trainer.check_val_every_n_epoch={epochs} has no meaning here: training draws from an endless stream of "
            "samples. Remove it, and set trainer.val_check_interval to the training batches between two validations."
        )
    if not at_ends and not is_default:
        raise InputError(
            f"trainer.check_val_every_n_epoch={epochs} and trainer.val_check_interval={interval} exclude each other: "
            "set trainer.val_check_interval=null, or remove trainer.check_val_every_n_epoch."
        )
    trainer.val_check_interval = epochs * steps * trainer.accumulate_grad_batches


def _limit_interval(trainer: Namespace, data: ResumableDataModule, default_interval: int) -> None:
    """Lower an interval of validations that is longer than the run; the default one also if longer than an epoch."""
    if type(data).steps_per_epoch_for is ResumableDataModule.steps_per_epoch_for:
        return  # without epochs; it is not opened before it must be
    steps, interval = _steps_per_epoch(trainer, data), _whole(trainer.val_check_interval)
    if steps is None or not isinstance(interval, int):
        return
    ends = [steps] if interval == default_interval else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        ends.append(trainer.max_epochs * steps)
    if trainer.max_steps > 0:
        ends.append(trainer.max_steps)
    trainer.val_check_interval = min([interval, *(end * trainer.accumulate_grad_batches for end in ends)])


def _steps_per_epoch(trainer: Namespace, data: ResumableDataModule) -> int | None:
    """Optimizer steps of an epoch, perhaps shortened by `trainer.limit_train_batches`; None for data without epochs."""
    require_accumulation(per_step := trainer.accumulate_grad_batches)
    data.open()
    steps = data.steps_per_epoch_for(per_step * n_data_parallel(trainer))
    if steps is None or (limit := _whole(trainer.limit_train_batches)) is None:
        return steps
    if limit <= 0 or (isinstance(limit, float) and limit > 1):
        raise InputError(
            f"trainer.limit_train_batches={limit} must be the batches of an epoch, 1 or more, or a share of them, up "
            "to 1.0."
        )
    return min(steps, math.ceil(limit * steps if isinstance(limit, float) else limit / per_step))


def _whole(value: Any) -> Any:
    """A number above 1 as an int: the parser may read a whole number as a float, where the option's type has both."""
    return int(value) if isinstance(value, float) and value > 1 and value.is_integer() else value


def n_data_parallel(trainer: Namespace) -> int:
    """Number of devices of a run that read different batches."""
    n, strategy = n_devices(trainer), trainer.strategy
    return mesh_sizes(n, *strategy.sizes)[0] if isinstance(strategy, ShardedStrategy) else n


def require_devices(trainer: Namespace, world_size: int) -> None:
    """Raise InputError if the Trainer that was made of these options runs on another number of devices."""
    if (n := n_devices(trainer)) != world_size:
        raise InputError(
            f"trainer.devices={trainer.devices} on trainer.num_nodes={trainer.num_nodes} are {n}, and "
            f"trainer.strategy={trainer.strategy} runs on {world_size}: set trainer.devices={world_size}, or "
            "trainer.strategy=ddp."
        )


def n_devices(trainer: Namespace) -> int:
    """Number of devices of a run, on all nodes; "auto" counts those of this machine."""
    devices = trainer.devices
    if isinstance(devices, list):
        of_a_node = len(devices)
    elif str(devices).isdecimal():
        of_a_node = int(devices)
    elif "," in str(devices):  # their numbers, "0,1"
        of_a_node = len([number for number in devices.split(",") if number.strip()])
    else:
        of_a_node = max(1, torch.cuda.device_count()) if is_nvidia(trainer.accelerator) else 1
    if of_a_node * trainer.num_nodes < 1:
        raise InputError(f"trainer.devices={devices} on trainer.num_nodes={trainer.num_nodes} is no device: give one.")
    return of_a_node * trainer.num_nodes
