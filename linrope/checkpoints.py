"""Files that hold a trained model: the checkpoints of `linrope fit`, and the folders of `save_pretrained`.

Reading is always `weights_only`: tensors and plain values, no code.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from linrope.errors import InputError, suggest

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.pt", "tokenizer.json"


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: dict[str, str] | None = None
) -> None:
    """Write a model's configuration, weights and tokenizer; the folder is made where missing, each file replaced whole.

    `tokenizer` is one of `linrope.data.tokenizer` in its plain form: the configuration tells its kind, a tokenizer.json
    lies beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        config = {**config, "tokenizer": tokenizer["kind"]}
        if "json" in tokenizer:
            with whole_file(folder / TOKENIZER_FILE) as file:
                file.write(tokenizer["json"].encode())
    with whole_file(folder / WEIGHTS_FILE) as file:
        torch.save(weights, file)
    with whole_file(folder / CONFIG_FILE) as file:
        file.write(f"{json.dumps(config, indent=2)}\n".encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` once all of it is on the disk.

    Whatever goes wrong before that, the process's own end among it, `path` is as it was. What is then left over, a
    `….partial` beside it, the next attempt overwrites.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine could leave the new name with nothing in it
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where its file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str] | None]:
    """(configuration, weights, tokenizer) of a `save_pretrained` folder or a `linrope fit` checkpoint.

    The tokenizer is one of `linrope.data.tokenizer` in its plain form, or None where nothing is said of it.

    Raises:
        InputError: nothing there, or something that holds no linrope model.
    """
    if (path / CONFIG_FILE).is_file():
        try:
            config = json.loads((path / CONFIG_FILE).read_text())
        except json.JSONDecodeError as error:
            raise InputError(f"{path / CONFIG_FILE} is not valid JSON: {error}.") from error
        return config, _load(path / WEIGHTS_FILE), _take_tokenizer(path, config)
    checkpoint = open_checkpoint(path)
    inside = {name.removeprefix("model."): name for name in checkpoint["state_dict"] if name.startswith("model.")}
    weights = {name: checkpoint["state_dict"][full] for name, full in inside.items()}
    return checkpoint["linrope"]["config"], weights, checkpoint["linrope"].get("tokenizer")


def _take_tokenizer(folder: Path, config: Any) -> dict[str, str] | None:
    """The plain form of a folder's tokenizer; what its configuration says of it is taken out."""
    if not isinstance(config, dict) or (kind := config.pop("tokenizer", None)) is None:
        return None
    if kind != "tokenizers":
        return {"kind": kind}
    try:
        return {"kind": kind, "json": (folder / TOKENIZER_FILE).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder / TOKENIZER_FILE} cannot be read ({error}): save the model again, or copy it there."
        ) from error


def open_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint that `linrope fit` wrote, its tensors still on disk.

    Raises:
        InputError: no such file, or a file that is no checkpoint of linrope's.
    """
    path = Path(path)
    if path.is_dir():
        last = next(iter(sorted(path.rglob("last.ckpt"))), None)
        hint = f" Did you mean '{last}'?" if last else ""
        raise InputError(f"checkpoint {str(path)!r} is a folder without {CONFIG_FILE}: name a .ckpt file.{hint}")
    checkpoint = _load(path)
    ours = isinstance(checkpoint, dict) and isinstance(checkpoint.get("linrope"), dict) and "state_dict" in checkpoint
    if not (ours and "config" in checkpoint["linrope"]):
        raise InputError(f"checkpoint {str(path)!r} was not written by linrope: give a .ckpt file of `linrope fit`.")
    return checkpoint


def _load(path: Path) -> Any:
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"checkpoint {str(path)!r} does not exist.{suggest(path.name, siblings)}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums that torch.save wrote
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own for a file that is something else
        others = sorted(file.name for file in path.parent.glob("*.ckpt") if file.name != path.name)
        raise InputError(
            f"checkpoint {str(path)!r} is damaged or no checkpoint: it cannot be read safely. Give another"
            + (f", perhaps one of those beside it: {', '.join(others)}." if others else ".")
        ) from error
