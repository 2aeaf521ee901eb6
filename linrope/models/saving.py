"""Files with a trained model: the folders of `save_pretrained` and `linrope export`, the checkpoints of `linrope fit`.

Only tensors and plain values are unpickled (`weights_only`), never code.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.models.sharded_files import is_sharded_checkpoint
from linrope.utils.checksums import CHECKSUMS_FILE, verify_checksums, write_checksums
from linrope.utils.files import load_plain, sync

CONFIG_FILE, WEIGHTS_FILE, SAFETENSORS_FILE = "config.json", "model.pt", "model.safetensors"
SHARDS_FILE = "model.safetensors.index.json"
"""Names the files of weights that were saved in several, as transformers does above a given size."""
TOKENIZER_FILE, EXPORTED_TOKENIZER_FILE = "tokenizer.json", "linrope_tokenizer.json"
"""The tokenizer of a model in linrope's format; the tokenizer.json of an export has that of transformers."""
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, SAFETENSORS_FILE, SHARDS_FILE, "model-[0-9]*-of-[0-9]*.safetensors",
               CHECKSUMS_FILE, EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE, "tokenizer_config.json",
               "special_tokens_map.json", "generation_config.json", "modeling_linrope.py")  # fmt: skip
"""Patterns of all files that a saved or an exported model may have."""
ENTRIES = ("task", "order", "tokenizer", "precision", "optimizer", "optimizer_class", "optimizer_changes")
"""What a checkpoint says of its run beside the model's configuration, `TrainingTask.on_save_checkpoint`."""


class SavedModel(NamedTuple):
    """A trained model, as plain values."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: dict[str, str] | None
    """Serialized; None without one."""
    labels: list[str] | None
    """Names of what its head tells apart; None if they are not known."""


def write_folder(folder: Path, model: SavedModel) -> None:
    """Write a model: see `LanguageModel.save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model.partial-") as partial:
        new, config = Path(partial), dict(model.config)
        if model.labels is not None:
            config["labels"] = model.labels
        if (kind := write_tokenizer(model.tokenizer, new / TOKENIZER_FILE)) is not None:
            config["tokenizer"] = kind
        torch.save(model.weights, new / WEIGHTS_FILE)
        (new / CONFIG_FILE).write_text(f"{json.dumps(config, indent=2)}\n")
        write_checksums(new, [file.name for file in new.iterdir()])
        replace_model(new, folder)


def replace_model(new: Path, folder: Path) -> None:
    """`move_files` of a model into a folder, which loses the files of one that was saved or exported there before."""
    mode = (new / CONFIG_FILE).stat().st_mode  # safetensors makes its file readable for the owner only
    names = {file.name for file in new.iterdir()}
    for name in names:
        (new / name).chmod(mode)
    move_files(new, folder)
    for old in (old for pattern in MODEL_FILES for old in folder.glob(pattern)):
        if old.is_file() and old.name not in names:
            old.unlink()


def move_files(source: Path, folder: Path) -> None:
    """Move the finished files of a model into a folder, where they replace those of the same names.

    All of them are on the disk before. If the process is killed in between, the folder has the new checksums and old
    files, which a reader refuses.
    """
    files = sorted(source.iterdir(), key=lambda file: (file.name != CHECKSUMS_FILE, file.name == CONFIG_FILE))
    for place in (*files, source):
        sync(place)
    for file in files:
        file.replace(folder / file.name)
        sync(folder)  # or a crash of the machine could change the order


def read_model(path: Path, verify: bool = True) -> SavedModel:
    """The model in a folder or a checkpoint: see `LanguageModel.from_pretrained`."""
    if (path / CONFIG_FILE).is_file():
        if verify:
            verify_checksums(path)
        config = read_config(path / CONFIG_FILE)
        model_type = config.get("model_type")
        if model_type not in (None, "linrope"):  # before its weights are read
            raise InputError(
                f"{str(path)!r} is a model of transformers, model_type={model_type!r}: `linrope convert` makes a "
                "hybrid of a Llama, Mistral or Qwen, and linrope.interop reads one as it is."
            )
        weights = _weights_in(path)
        if model_type == "linrope":  # an export for transformers, with our configuration inside
            kind = config.get("linrope_tokenizer")
            tokenizer = tokenizer_in(path / EXPORTED_TOKENIZER_FILE, kind)
            return SavedModel(config.get("linrope"), _of_model(weights), tokenizer, None)
        kind, labels = config.pop("tokenizer", None), config.pop("labels", None)
        return SavedModel(config, weights, tokenizer_in(path / TOKENIZER_FILE, kind), labels)
    checkpoint = open_checkpoint(path, weights=True)
    ours = checkpoint["linrope"]
    return SavedModel(ours["config"], _of_model(checkpoint["state_dict"]), ours.get("tokenizer"), ours.get("labels"))


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in a config.json. InputError if it cannot be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}): name the folder of a saved model.") from error
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no JSON object: save the model again.")
    return values


def model_type_of(path: str | Path) -> Any:
    """`model_type` in the config.json of a folder; None if there is none."""
    try:
        return read_config(Path(path, CONFIG_FILE)).get("model_type")
    except InputError:
        return None


def tokenizer_in(file: Path, kind: str | None) -> dict[str, str] | None:
    """The serialized tokenizer of a folder, of the type in its configuration."""
    if kind != "tokenizers":
        return None if kind is None else {"kind": kind}
    try:
        return {"kind": kind, "json": file.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): save the model again, or copy it there.") from error


def write_tokenizer(tokenizer: dict[str, str] | None, file: Path) -> str | None:
    """Write the file of a serialized tokenizer, if its type needs one; the type, for the configuration."""
    if tokenizer is None:
        return None
    if "json" in tokenizer:
        file.write_text(tokenizer["json"], encoding="utf-8")
    return tokenizer["kind"]


def _of_model(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights among those of a LightningModule or of a model of transformers, by the model's names."""
    return {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}


def _weights_in(folder: Path) -> dict[str, Tensor]:
    plain, safe = folder / WEIGHTS_FILE, folder / SAFETENSORS_FILE
    if plain.is_file() and safe.is_file():
        raise InputError(f"{str(folder)!r} holds both {plain.name} and {safe.name}: remove the older one.")
    return load_plain(plain) if plain.is_file() else load_exported(folder)


def load_exported(folder: Path) -> dict[str, Tensor]:
    """The tensors that transformers saved in a folder, in one file or in several with an index. As in transformers, the
    one file counts where both are there. InputError if there are none, or damaged ones."""
    if (folder / SAFETENSORS_FILE).is_file():
        return load_safetensors(folder / SAFETENSORS_FILE)
    if (folder / SHARDS_FILE).is_file():
        return load_shards(folder / SHARDS_FILE)
    raise InputError(
        f"{str(folder)!r} has no {SAFETENSORS_FILE}, {SHARDS_FILE} or {WEIGHTS_FILE}: save the model in it again."
    )


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. InputError if it is damaged, or the package is not installed."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(f'{str(file)!r} needs safetensors to be read: pip install "linrope[hf]".') from error
    try:
        return load_file(file)
    except SafetensorError as error:
        raise InputError(f"{str(file)!r} is damaged or not a safetensors file ({error}): export it again.") from error


def load_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of the safetensors files that an index of transformers names. InputError if it names none, or one
    that is missing or damaged."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} has no weight_map of names: save the model again.") from error
    weights: dict[str, Tensor] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise InputError(f"{index} names {name!r}, which is not in the folder: copy it there.")
        weights |= load_safetensors(index.parent / name)
    return weights


def save_safetensors(weights: dict[str, Tensor], file: Path) -> None:
    """Write tensors, none of which shares its memory with another, as transformers reads them."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise InputError(f'{str(file)!r} needs safetensors to be written: pip install "linrope[hf]".') from error
    save_file(weights, file, metadata={"format": "pt"})


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path leads to a file, or to the folder of a sharded checkpoint."""
    return Path(path).is_file() or is_sharded_checkpoint(path)


def open_checkpoint(path: str | Path, weights: bool = False) -> dict[str, Any]:
    """A checkpoint of `linrope fit`, its tensors memory-mapped. Raises InputError if there is none.

    Of a sharded checkpoint the weights are read with `weights` only, and the state of the optimizers is left empty.
    """
    path = Path(path)
    sharded = is_sharded_checkpoint(path)
    if path.is_dir() and not sharded:
        last = max(path.rglob("last.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
        hint = f" Did you mean '{last}'?" if last else ""
        raise InputError(f"checkpoint {str(path)!r} is a folder without {CONFIG_FILE}: name a .ckpt file.{hint}")
    if sharded:
        # only here: torch.distributed takes time to import
        from linrope.models.sharded_checkpoint import read_sharded_checkpoint

        checkpoint = read_sharded_checkpoint(path, weights, optimizers=False)
    else:
        checkpoint = load_plain(path)
    ours = isinstance(checkpoint, dict) and isinstance(checkpoint.get("linrope"), dict) and "state_dict" in checkpoint
    if not (ours and "config" in checkpoint["linrope"]):
        raise InputError(f"checkpoint {str(path)!r} was not written by linrope: give a .ckpt file of `linrope fit`.")
    if missing := [name for name in ENTRIES if name not in checkpoint["linrope"]]:
        raise InputError(
            f"checkpoint {str(path)!r} is of another version of linrope: it does not hold {', '.join(missing)}. Read "
            "it with that version, or train again."
        )
    return checkpoint
