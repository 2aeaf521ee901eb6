"""Models that are divided among devices: FSDP2 through Lightning's ModelParallelStrategy."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from linrope.distributed.group import SequenceGroup
from linrope.errors import InputError
from linrope.models.base import Model
from linrope.models.sharded_checkpoint import load_plainly, read_index
from linrope.models.sharded_files import (
    META_FILE,
    folder_of_link,
    is_sharded_checkpoint,
    make_replaceable,
    new_folder,
    remove_others,
)
from linrope.training.checkpoint import os_error, require_same_optimizer, unwritten
from linrope.utils.files import load_plain, sync
from linrope.utils.options import class_path_of

NAME = "fsdp2"
"""What `trainer.strategy` calls `ShardedStrategy`."""


def shard(model: Model, mesh: DeviceMesh, activation_checkpointing: bool = False) -> None:
    """Divide a model's weights among all devices of a mesh, in place (FSDP2).

    Each of `blocks_to_shard` is gathered for its own forward and backward pass; all other weights are gathered
    together. Every rank must hold the same weights before. Nothing happens to a model that is sharded already. With
    `activation_checkpointing` only the inputs of blocks are kept for the backward pass, which computes the rest again.
    """
    if isinstance(model, FSDPModule):
        return
    # The cache would keep a bfloat16 copy of all gathered weights until the end of the forward pass.
    torch.set_autocast_cache_enabled(False)
    if activation_checkpointing:
        for block in model.blocks_to_shard:
            block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    # Devices that share a sequence hold the same weights, as those with different rows do: one dimension for all.
    of_all = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("shards",))
    for module in (*model.blocks_to_shard, model):
        fully_shard(module, mesh=of_all)
        for name in getattr(module, "forward_methods", ()):
            register_fsdp_forward_method(module, name)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for FSDP2: weights, gradients and optimizer states are divided among devices.

    `trainer.strategy: fsdp2`, or `class_path: ShardedStrategy` with options. It differs in

    - the mesh: data × sequence. The devices of a sequence group read the same rows, each a slice of their tokens;
    - `activation_checkpointing`;
    - the checkpoint folder: a new one is written beside the old, and PATH, a link, leads to the old one until the new
      one is on the disk. A process that is killed while it saves loses nothing.
    - what it loads: the checkpoint of any number of devices, and files of runs that were not sharded. Only tensors and
      plain values are unpickled.

    Args:
        data_parallel_size: groups of devices that read different batches; "auto" is as many as there are.
        sequence_parallel_size: devices that share each row of a batch (language models and linear masked LM); "auto" is
            all devices of a data-parallel group, and of one group if `data_parallel_size` is "auto" too.
        tensor_parallel_size: must be 1, or "auto".
        activation_checkpointing: keep only the inputs of blocks for the backward pass, which computes the rest again.
        options: `save_distributed_checkpoint` (False writes one file, whose weights rank 0 collects),
            `process_group_backend` and `timeout`, as in Lightning.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        activation_checkpointing: bool = False,
        sequence_parallel_size: Literal["auto"] | int = 1,
        **options: Any,
    ) -> None:
        if tensor_parallel_size not in (1, "auto"):
            raise InputError(f"trainer.strategy.tensor_parallel_size={tensor_parallel_size} must be 1.")
        super().__init__(data_parallel_size, 1, **options)
        self.activation_checkpointing = activation_checkpointing
        self.sizes = data_parallel_size, sequence_parallel_size

    def setup_environment(self) -> None:
        backends = self.process_group_backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        for backend in backends.split(","):  # or cpu:gloo,cuda:nccl
            if not torch.distributed.is_backend_available(backend.rpartition(":")[2]):
                raise InputError(
                    f"trainer.strategy.process_group_backend={backend!r}: this PyTorch has none. Set another."
                )
        # Lightning has no public way to decide its mesh late; its second dimension has devices with the same batches
        sizes = mesh_sizes(self.num_nodes * self.num_processes, *self.sizes)
        self._data_parallel_size, self._tensor_parallel_size = sizes
        super().setup_environment()

    @property
    def writes_parts(self) -> bool:
        """Whether each rank writes a part of a checkpoint, so that all need one folder."""
        return self._save_distributed_checkpoint

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The devices that share the rows of this one; None if each reads whole rows."""
        mesh = self.device_mesh["tensor_parallel"]
        return SequenceGroup(mesh) if mesh.size() > 1 else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if not self.writes_parts:  # one file, which replaces a link to a folder
            ParallelStrategy.save_checkpoint(self, checkpoint, path, storage_options)
        else:
            self._write_shards(checkpoint, path, storage_options)
        if self.is_global_zero:
            remove_others(path)

    def _write_shards(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None) -> None:
        folder = self.broadcast(new_folder(path) if self.is_global_zero else None)
        problem = None
        try:
            super().save_checkpoint(checkpoint, folder, storage_options)
            if self.is_global_zero:
                _require_parts(folder)
        except CheckpointException as error:  # of any rank
            problem, (reason, _) = error, next(iter(error.failures.values()))
        except (OSError, RuntimeError) as error:  # only rank 0 writes what is no part
            problem, reason = error, os_error(error) or error
        if self.reduce_boolean_decision(problem is not None, all=False):  # and all ranks have written their parts
            if self.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)
            reason = "another rank could not write" if problem is None else getattr(reason, "strerror", None) or reason
            raise unwritten(path, str(reason)) from problem
        if self.is_global_zero:
            _link(path, folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if is_sharded_checkpoint(path):
            return self._load_shards(self.broadcast(folder_of_link(path) or path))  # it may move while ranks read
        checkpoint, whole = load_plain(path), StateDictOptions(full_state_dict=True)
        self._require_same_optimizer(checkpoint, path)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=whole)
        for optimizer, saved in zip(self.optimizers, checkpoint.pop("optimizer_states", [])):
            set_optimizer_state_dict(self.model, optimizer, _by_name(saved, optimizer, self.model), options=whole)
        return checkpoint

    def _load_shards(self, path: Path) -> dict[str, Any]:
        checkpoint = load_plain(path / META_FILE)
        self._require_same_optimizer(checkpoint, path)
        state = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        load_plainly(state, path)
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        return checkpoint

    def _require_same_optimizer(self, checkpoint: dict[str, Any], path: Path) -> None:
        """As the task does, which sees a checkpoint only after its states are restored."""
        if self.optimizers and not self.lightning_module.makes_optimizer:
            require_same_optimizer(checkpoint, self.lightning_module.optimizer_config, path)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        path = Path(filepath)
        if not path.is_symlink():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            path.unlink()
            remove_others(path)


def require_shareable(mesh: DeviceMesh, stage: str | None, scales_gradients: bool) -> None:
    """Raise InputError for a run whose model devices cannot share."""
    if scales_gradients:
        raise InputError(
            "trainer.precision='16-mixed' scales the loss, which is not possible with a sharded model: set bf16-mixed, "
            "bf16-true or 32-true."
        )
    if stage == "predict" and mesh.size() > 1:
        raise InputError(
            "devices that share a model must call it equally often, and predictions of each are of its own rows: "
            f"predict on one device (trainer.devices=1), or with trainer.strategy=ddp instead of {NAME}."
        )


def mesh_sizes(n_devices: int, data: Literal["auto"] | int, sequence: Literal["auto"] | int) -> tuple[int, int]:
    """The sizes (data, sequence) of a mesh of so many devices. InputError unless their product is `n_devices`."""
    options = f"trainer.strategy.data_parallel_size={data} × sequence_parallel_size={sequence}"
    for value in (data, sequence):
        if value != "auto" and not (type(value) is int and value >= 1):
            raise InputError(f"{options} must be numbers of devices, 1 or more, or auto.")
    if sequence == "auto":
        sequence = n_devices if data == "auto" else max(1, n_devices // data)
    if data == "auto":
        data = max(1, n_devices // sequence)
    if data * sequence != n_devices:
        alone = ", or trainer.strategy to auto" if n_devices == 1 else ""
        raise InputError(f"{options} must make {n_devices}, the number of devices: change one of them{alone}.")
    return data, sequence


StrategyRegistry.register(NAME, ShardedStrategy, description="FSDP2: weights divided among all devices")
CLASSES = {"ddp": "DDPStrategy", NAME: ShardedStrategy.__name__}
"""Strategies by their registered names."""
NAMES = {**{kind: name for name, kind in CLASSES.items()}, ModelParallelStrategy.__name__: NAME}
"""Registered names of strategies, by their classes."""


def own_strategy(strategy: Any) -> Any:
    """The option `trainer.strategy`, with `ShardedStrategy` in place of Lightning's ModelParallelStrategy, and the same
    options. A class without options is replaced by its registered name: Lightning knows no other.

    Raises:
        InputError: a strategy whose processes are copies of this one, and no commands of their own; Lightning's older
            FSDP and DeepSpeed, as `require_supported_strategy` says.
    """
    options = getattr(strategy, "init_args", None)
    method = strategy if isinstance(strategy, str) else getattr(options, "start_method", None)
    if any(copied in str(method) for copied in ("spawn", "fork", "notebook")):
        raise InputError(
            f"trainer.strategy: {method!r} starts processes as copies of this one, which is for notebooks: set ddp, or "
            f"{NAME}."
        )
    if isinstance(strategy, str) and strategy != NAME and strategy.startswith(("fsdp", "deepspeed")):
        raise InputError(
            f"trainer.strategy={strategy!r} does not know the norm of all gradients: set {NAME}, which divides the "
            "model among devices too."
        )
    if isinstance(strategy, str):
        return NAMES.get(strategy.rpartition(".")[2], strategy)
    if getattr(strategy, "class_path", "").endswith(f".{ModelParallelStrategy.__name__}"):
        strategy.class_path = class_path_of(ShardedStrategy)
    return strategy


def require_supported_strategy(strategy: Strategy) -> None:
    """Raise InputError for a strategy that does not clip gradients by the norm of all of them."""
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy)):
        raise InputError(
            f"trainer.strategy is a {type(strategy).__name__}, in which devices do not know the norm of all gradients: "
            f"set {NAME}, which divides the model among devices too."
        )


def _by_name(saved: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state of an optimizer by the names of its parameters, of one by their numbers.

    Parameters are numbered in any order; those of a group are in the order of this optimizer's group."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, own, strict=True))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": {name_of[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def _require_parts(folder: Path) -> None:
    """Raise OSError unless the folder has all parts that its index names."""
    for part in {place.relative_path for place in read_index(folder).storage_data.values()}:
        if not (folder / part).is_file():
            raise FileNotFoundError(errno.ENOENT, f"it has no part {part}, so the ranks do not share its folder")


def _link(path: Path, folder: Path) -> None:
    """Let `path` lead to a folder that has been written, in place of what was there before."""
    for place in (folder / META_FILE, folder):  # torch has synced the other files
        sync(place)
    link = path.with_name(f"{path.name}.partial")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    make_replaceable(path)
    os.replace(link, path)
    sync(path.parent)
