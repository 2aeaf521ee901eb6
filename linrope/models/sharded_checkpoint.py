"""Checkpoints of sharded models: folders of torch.distributed.checkpoint, read by any number of processes.

The folder has `.metadata` (names, shapes, and where each part lies), the parts of each rank, and `meta.pt`, all that is
no weight and no state of an optimizer.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from linrope.errors import InputError
from linrope.models.sharded_files import INDEX_FILE, META_FILE
from linrope.utils.files import load_plain

WEIGHTS, OPTIMIZER = "state_dict", "optimizer_"
"""Where Lightning keeps the weights and the state of each optimizer."""


def read_sharded_checkpoint(path: str | Path, weights: bool = True, optimizers: bool = True) -> dict[str, Any]:
    """A sharded checkpoint as that of one process: `state_dict` and `optimizer_states` are whole, on the CPU.

    Args:
        path: the folder.
        weights, optimizers: without them `state_dict` and each state of an optimizer are empty. A large model's file is
            then not read.

    Raises:
        InputError: a folder that is damaged, or whose index holds other objects than torch writes.
    """
    folder = Path(path).resolve()
    try:
        return _read(folder, weights, optimizers)
    except InputError:
        if Path(path).resolve() == folder:
            raise
    return _read(Path(path).resolve(), weights, optimizers)  # its run has saved the next one and removed this one


def _read(path: Path, weights: bool, optimizers: bool) -> dict[str, Any]:
    checkpoint, index = load_plain(path / META_FILE), read_index(path)
    paths = index.planner_data  # the nested keys of each name
    wanted = {
        name: place
        for name, place in index.state_dict_metadata.items()
        if (weights if name.startswith(f"{WEIGHTS}.") else optimizers)
    }
    values = {
        name: None if isinstance(place, BytesStorageMetadata) else torch.empty(place.size, dtype=place.properties.dtype)
        for name, place in wanted.items()
    }
    if values:
        load_plainly(values, path, no_dist=True)
    tree: dict[Any, Any] = {WEIGHTS: {}}
    for name, value in values.items():
        _put(tree, paths[name], value)
    n_optimizers = len({keys[0] for keys in paths.values() if str(keys[0]).startswith(OPTIMIZER)})
    states = [tree.get(f"{OPTIMIZER}{number}", {}) for number in range(n_optimizers)]
    return {**checkpoint, WEIGHTS: tree[WEIGHTS], "optimizer_states": [_by_number(state) for state in states]}


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _by_number(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer whose parameters have names, by their numbers, as torch's optimizers keep it."""
    if not state:
        return state
    groups = state["param_groups"]
    groups = [groups[number] for number in sorted(groups)] if isinstance(groups, dict) else groups
    numbers: dict[str, int] = {}
    for group in groups:
        numbers |= {name: len(numbers) + i for i, name in enumerate(group["params"])}
    return {
        "state": {numbers[name]: values for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def load_plainly(state: dict[str, Any], path: Path, no_dist: bool = False) -> None:
    """Load what `state` names from a sharded checkpoint, in place: tensors and plain values, no other objects.

    Every rank must call it, unless with `no_dist` one process loads all. InputError if the folder is damaged or holds
    other objects.
    """
    read_index(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled.*")
        try:
            dcp.load(state, checkpoint_id=path, planner=_PlainLoadPlanner(), no_dist=no_dist)
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            message = str(reason).strip().partition("\n")[0] or f"a part is damaged ({type(reason).__name__})"
            raise InputError(f"checkpoint {str(path)!r} cannot be loaded: {message}. Give another.") from error


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Unpickles tensors and plain values: other objects could be code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _IndexUnpickler(pickle.Unpickler):
    """Makes the records of torch's index, and nothing else."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    OTHERS: ClassVar[set[tuple[str, str]]] = {
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_type = module in self.MODULES and "." not in name
        found = super().find_class(module, name) if is_type or (module, name) in self.OTHERS else None
        if (is_type and isinstance(found, type) and found.__module__ == module) or (module, name) in self.OTHERS:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


def read_index(path: Path) -> Metadata:
    """The index of a sharded checkpoint. InputError if it is damaged or holds other objects than torch writes."""
    try:
        with open(path / INDEX_FILE, "rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:  # pickle has many for damaged files
        raise InputError(
            f"checkpoint {str(path)!r}: {INDEX_FILE} is damaged or cannot be read safely ({error}). Give another."
        ) from error
    if not isinstance(index, Metadata):
        raise InputError(f"checkpoint {str(path)!r}: {INDEX_FILE} is no index of a checkpoint. Give another.")
    return index
