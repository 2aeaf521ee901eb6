"""Text tokenized once, into a folder to train from.

Each unit of text becomes a part, named by a hash of the unit and of the options: an interrupted preparation continues
with the units that are missing or have changed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from linrope.data.corpus.opening import open_text
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.manifest import LOCK, MANIFEST, PARTS, Manifest
from linrope.data.prepare.parts import RECORD_SUFFIX, assemble
from linrope.data.prepare.units import Unit, dataset_units, file_units
from linrope.data.prepare.workers import Progress, write_missing_parts
from linrope.data.tokenizers.base import open_tokenizer
from linrope.errors import DISK_IS_FULL, DocumentChanged, InputError
from linrope.utils.files import claim, remove_partial_files, require_writable


def prepare(config: PrepareConfig, progress: Progress = lambda done, total: None) -> Manifest:
    """Write the folder, or what is missing of it; nothing if it is complete. A folder with damaged files is written
    again. `progress`: see `Progress`.

    Raises:
        InputError: no text, a damaged line or archive, text that the tokenizer cannot read, or an output folder with
            other files. Finished parts are kept for the next try.
        DocumentChanged: a source changed meanwhile, or a file of the output.
        OSError: the disk is full.
    """
    try:
        return _prepare(config, progress)
    except OSError as error:
        if error.errno in DISK_IS_FULL:
            raise
        raise DocumentChanged(
            f"--output={config.output!r} was not finished: {error.filename or 'a file'} cannot be read or written "
            f"({error.strerror}). Run the same command again to continue, or name another folder."
        ) from error


def _prepare(config: PrepareConfig, progress: Progress) -> Manifest:
    tokenizer, folder = open_tokenizer(config.tokenizer, "--tokenizer"), Path(config.output).expanduser()
    if config.path is not None and folder.resolve().is_relative_to(Path(config.path).expanduser().resolve()):
        raise InputError(f"--output={config.output!r} lies within --path={config.path!r}: name a folder elsewhere.")
    if config.dataset is None:
        units, origin, n_skipped = file_units(config.path)
    else:
        units, n_skipped = dataset_units(config.dataset, config.dataset_config, config.dataset_split), 0
        origin = f"dataset {config.dataset} ({config.dataset_split})"
    plan = {
        "sources": _digest(*map(_identity, units)),
        "tokenizer": tokenizer.fingerprint or tokenizer.name,
        "text_field": config.text_field,
    }
    parts = [folder / PARTS / _digest(plan["tokenizer"], plan["text_field"], _identity(unit)) for unit in units]
    if (manifest := _finished(folder, plan, parts)) is None:
        require_writable(folder, "--output")
        with _claimed(folder):
            if (manifest := _finished(folder, plan, parts)) is not None:  # by another process meanwhile
                return manifest
            (folder / MANIFEST).unlink(missing_ok=True)  # of a damaged folder
            write_missing_parts(units, parts, tokenizer, config, progress)
            manifest = assemble(folder, parts, tokenizer, origin, n_skipped, plan)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    if manifest.n_skipped_lines and not config.skip_bad_lines:
        raise InputError(
            f"--output={config.output!r} was prepared with --skip_bad_lines, and {manifest.n_skipped_lines:,} lines "
            "were skipped: give --skip_bad_lines again, or name another folder."
        )
    return manifest


def _identity(unit: Unit) -> str:
    """A unit without the paths of its files."""
    return repr([[getattr(source, field.name) for field in fields(source) if field.name != "path"] for source in unit])


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()


def _finished(folder: Path, plan: dict[str, str], parts: list[Path]) -> Manifest | None:
    """The manifest of a folder that holds this preparation, complete; None if it is incomplete or damaged."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output={str(folder)!r} is a file: name a folder.")
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        if differing := [name for name in sorted(plan) if plan[name] != manifest.plan.get(name)]:
            raise InputError(
                f"--output={str(folder)!r} holds another corpus (different: {', '.join(differing)}): name another "
                "folder, or remove it."
            )
        return manifest if _is_whole(folder) else None
    if (folder / PARTS / LOCK).is_file():
        existing = {file.stem for file in (folder / PARTS).glob(f"*{RECORD_SUFFIX}")}
        if existing and existing.isdisjoint(part.name for part in parts):
            raise InputError(
                f"--output={str(folder)!r} holds an unfinished preparation of other text, of text that has changed "
                "since, or with another tokenizer or text_field: name another folder, or remove it."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--output={str(folder)!r} exists and holds other files: name another folder.")
    return None


def _is_whole(folder: Path) -> bool:
    """Whether a prepared folder can be opened, which compares its files with their checksums. An error of the disk is
    none of the files."""
    try:
        open_text(folder, (1.0, 0.0, 0.0))
    except InputError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        return False
    return True


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Create the folder, and keep other processes from preparing into it."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    with open(folder / PARTS / LOCK, "w") as lock:
        if not claim(lock):
            raise InputError(
                f"--output={str(folder)!r} is being prepared by another process: wait for it, or name another folder."
            )
        for place in (folder, folder / PARTS):
            remove_partial_files(place)
        yield
