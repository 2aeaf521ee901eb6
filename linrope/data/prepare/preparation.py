"""A corpus tokenized once, by several processes, into a folder to train from.

The folder holds `tokens.bin`, flat uint16 or uint32 tokens, each document's followed by the separator (nanoGPT's
format), `documents.npy`, what is known of each, for tokens that are no bytes `text_bytes.bin`, how many bytes each
token stands for, and `tokenizer.json`; and `linrope-corpus.json`, which is written last. Until then `parts/` holds what
each unit came to, written whole and named by what it was made of, so that an interrupted preparation goes on with the
units that are missing or have changed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from linrope.data.corpus.splits import name_hash
from linrope.data.prepare.jsonlines import BadLine
from linrope.data.prepare.units import Piece, Reading, Span, Unit, dataset_units, file_units, read_unit
from linrope.data.tokenizers.base import Tokenizer, open_tokenizer, tokenizer_from_serialized
from linrope.errors import InputError
from linrope.utils.files import claim, whole_file

FORMAT = 1


MANIFEST, PARTS, LOCK = "linrope-corpus.json", "parts", "linrope-lock"


TOKENS, TEXT_BYTES, DOCUMENTS, TOKENIZER = "tokens.bin", "text_bytes.bin", "documents.npy", "tokenizer.json"


RECORD = ".npz"


PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to tokenize, how, and where to."""

    output: str
    """Folder to write; data.path then names it. It must not hold anything else."""
    path: str | None = None
    """A file, a folder or a glob of text and of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst). Without it and --dataset:
    the built-in corpus."""
    dataset: str | None = None
    """A dataset of Hugging Face's `datasets` instead, by its name or folder; it is read as a stream. Whether it has
    changed since, another run does not notice."""
    dataset_config: str | None = None
    """Which configuration of the dataset, where it has several."""
    dataset_split: str = "train"
    """Which split of the dataset to read."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    text_field: str = "text"
    """Field that holds the text, in JSON lines and datasets."""
    skip_bad_lines: bool = False
    """Leave out lines that hold no text where they should, and count them; without it they are an error."""
    workers: int | None = None
    """Processes to work with; null for one for each CPU core."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"--workers={self.workers} must be 1 or more, or null for one for each CPU core.")
        if self.path is not None and self.dataset is not None:
            raise InputError(f"--path={self.path!r} and --dataset={self.dataset!r} exclude each other: give one.")


@dataclass(frozen=True)
class Manifest:
    """What `linrope-corpus.json` says."""

    format: int
    origin: str
    """Where the text comes from, for people to read."""
    tokenizer: str
    """"bytes" or "tokenizer.json"."""
    vocab_size: int
    separator: int
    token_dtype: str
    text_bytes_dtype: str | None
    n_documents: int
    n_tokens: int
    """Separators apart."""
    n_bytes: int
    """Of text."""
    n_skipped_files: int
    """Binary, empty or unreadable ones."""
    n_skipped_lines: int
    """Lines without text where it should be, left out as asked."""
    n_empty: int
    """Documents without a token, left out."""
    fingerprint: str
    """A hash of all tokens, of the documents and of the tokenizer."""
    plan: dict[str, Any]
    """What decides the result: see `_plan`."""


Progress = Callable[[int, int | None], None]


def prepare(config: PrepareConfig, progress: Progress = lambda done, total: None) -> Manifest:
    """Writes the folder, or what of it is missing; where it is complete, nothing.

    Args:
        progress: is told the bytes of the sources that were read so far, and of all (None where nobody knows).

    Raises:
        InputError: nothing to read, a damaged line or archive, text that the tokenizer cannot read, or an output that
            holds something else. What was done so far stays, for another try.
        DocumentChanged: a source changed meanwhile.
    """
    tokenizer = open_tokenizer(config.tokenizer, "--tokenizer")
    if config.dataset is None:
        units, origin, n_skipped = file_units(config.path)
    else:
        units, n_skipped = dataset_units(config.dataset, config.dataset_config, config.dataset_split), 0
        origin = f"dataset {config.dataset} ({config.dataset_split})"
    folder, plan = Path(config.output).expanduser(), _plan(config, tokenizer, units)
    if config.path is not None and folder.resolve().is_relative_to(Path(config.path).expanduser().resolve()):
        raise InputError(f"--output={config.output!r} lies within --path={config.path!r}: name a folder elsewhere.")
    parts = [folder / PARTS / _digest(plan["tokenizer"], plan["text_field"], _identity(unit)) for unit in units]
    if (manifest := _finished(folder, plan, parts)) is None:
        with _claimed(folder):
            _tokenize(units, parts, tokenizer, config, progress)
            manifest = _assemble(folder, parts, tokenizer, origin, n_skipped, plan)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    if manifest.n_skipped_lines and not config.skip_bad_lines:
        raise InputError(
            f"--output={config.output!r} was prepared with --skip_bad_lines, and {manifest.n_skipped_lines:,} were "
            "left out: say so again, or name another folder."
        )
    return manifest


def _plan(config: PrepareConfig, tokenizer: Tokenizer, units: list[Unit]) -> dict[str, Any]:
    """All that decides the result, as plain values by the names of their options."""
    return {
        "sources": _digest(*map(_identity, units)),
        "tokenizer": tokenizer.fingerprint or tokenizer.name,
        "text_field": config.text_field,
    }


def _identity(unit: Unit) -> str:
    """What a unit is: all of it but where its files lie."""
    return repr([[getattr(part, field.name) for field in fields(part) if field.name != "path"] for part in unit])


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()


def _finished(folder: Path, plan: dict[str, Any], parts: list[Path]) -> Manifest | None:
    """What a folder holds, where it is this very preparation, complete. InputError where it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output={str(folder)!r} is a file: name a folder.")
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        _require_same_plan(folder, manifest.plan, plan)
        return manifest
    if (folder / PARTS / LOCK).is_file():
        begun = {file.stem for file in (folder / PARTS).glob(f"*{RECORD}")}
        if begun and begun.isdisjoint(part.name for part in parts):
            raise InputError(
                f"--output={str(folder)!r} holds an unfinished preparation of something else, or with another "
                "tokenizer or text_field: name another folder, or remove it."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"--output={str(folder)!r} exists and holds other files, which would lie beside the corpus: name another "
            "folder."
        )
    return None


def _require_same_plan(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    if differing := sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)):
        raise InputError(
            f"--output={str(folder)!r} holds a corpus that was prepared otherwise (not the same: "
            f"{', '.join(differing)}): name another folder, or remove it."
        )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other processes from preparing into it."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    with open(folder / PARTS / LOCK, "w") as lock:
        if not claim(lock):
            raise InputError(
                f"--output={str(folder)!r} is being prepared by another process: wait for it, or name another folder."
            )
        yield


def read_manifest(folder: Path) -> Manifest:
    """What a prepared folder says of itself.

    Raises:
        InputError: it is damaged, or of a later version.
    """
    values = _read_json(folder / MANIFEST)
    if values.get("format") != FORMAT:
        raise InputError(f"{folder / MANIFEST} is of format {values.get('format')!r}, this linrope reads {FORMAT}.")
    try:
        return Manifest(**values)
    except TypeError as error:
        raise InputError(f"{folder / MANIFEST} is damaged ({error}): prepare the corpus again.") from error


def document_sizes(folder: str | Path) -> np.ndarray:
    """How many tokens each document of a prepared folder has, int64 (n_documents,)."""
    return np.load(Path(folder).expanduser() / DOCUMENTS, allow_pickle=False)[:, 1]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): remove the folder and prepare the corpus again.") from error
    return values if isinstance(values, dict) else {}


def _tokenize(
    units: list[Unit], parts: list[Path], tokenizer: Tokenizer, config: PrepareConfig, progress: Progress
) -> None:
    """Writes the parts that are missing."""
    sizes = [sum(part.stop - part.start if isinstance(part, Span) else 0 for part in unit) for unit in units]
    missing = [number for number, part in enumerate(parts) if not _record(part).is_file()]
    before = sum(sizes) - sum(sizes[number] for number in missing)
    total = None if config.dataset is not None else sum(sizes)
    n_workers = min(config.workers or os.cpu_count() or 1, len(missing))
    progress(before, total)
    if n_workers > 1:
        _in_processes(n_workers, [(units[n], parts[n]) for n in missing], tokenizer, config, before, total, progress)
        return
    read = before

    def count(n: int) -> None:
        nonlocal read
        read += n
        progress(read, total)

    for number in missing:
        write_part(units[number], parts[number], tokenizer, config, count)


def _in_processes(
    n_workers: int,
    work: list[tuple[Unit, Path]],
    tokenizer: Tokenizer,
    config: PrepareConfig,
    before: int,
    total: int | None,
    progress: Progress,
) -> None:
    context = multiprocessing.get_context("forkserver")  # a fork of this process would lack the threads that it has
    context.set_forkserver_preload(["__main__", __name__])  # workers are forks of a process that has them imported
    read = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(n_workers, context, _start_worker, (tokenizer.to_serialized(), config, read))
    try:
        pending = {pool.submit(_write_part_here, *item) for item in work}
        while pending:
            done, pending = wait(pending, PROGRESS_SECONDS)
            for future in done:
                future.result()
            progress(before + read.value, total)
    except BrokenProcessPool as error:
        raise InputError(
            "a process that was preparing the corpus was ended from outside, perhaps because memory ran out: lower "
            "--workers and run the same line again, which goes on from there."
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # nothing is left to do, or no longer wanted: parts are written whole or not at all
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: dict[str, str], config: PrepareConfig, read: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def count(n: int) -> None:
        with read.get_lock():
            read.value += n

    _worker.update(tokenizer=tokenizer_from_serialized(tokenizer), config=config, count=count)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # a parent that was killed could not end its workers


def _write_part_here(unit: Unit, part: Path) -> None:
    write_part(unit, part, **_worker)


def write_part(
    unit: Unit, part: Path, tokenizer: Tokenizer, config: PrepareConfig, count: Callable[[int], None]
) -> None:
    """Tokenizes a unit: its tokens, how many bytes they stand for, and, as the sign that all is there, its record."""
    n_bad = 0

    def bad(where: Callable[[], str], line: BadLine) -> None:
        nonlocal n_bad
        if not config.skip_bad_lines:
            raise InputError(f"{where()} {line}. Mend it, or leave such lines out with --skip_bad_lines.")
        n_bad += 1

    token_dtype, documents, most_bytes = np.dtype(_token_dtype(tokenizer)).newbyteorder("<"), array("q"), 0
    separator = np.array([tokenizer.separator], token_dtype).tobytes()
    begun = [0, 0]  # tokens and bytes of the document that has not ended
    with whole_file(part.with_suffix(".tokens")) as tokens_file, whole_file(part.with_suffix(".bytes")) as bytes_file:
        for piece in read_unit(unit, Reading(config.text_field, count, bad)):
            tokens, n_bytes = _encode(tokenizer, piece)
            tokens_file.write(tokens.astype(token_dtype).tobytes() + (separator if piece.ends else b""))
            if n_bytes is not None:
                bytes_file.write(n_bytes.astype("<u4").tobytes() + (bytes(4) if piece.ends else b""))
                most_bytes = max(most_bytes, int(n_bytes.max(initial=0)))
            begun = [begun[0] + len(tokens), begun[1] + len(piece.data)]
            if piece.ends:
                documents.extend((*begun, name_hash(piece.name), True))
                begun = [0, 0]
        if any(begun):  # the next part goes on with it
            documents.extend((*begun, name_hash(piece.name), False))
    with whole_file(_record(part)) as file:
        np.savez(file, documents=np.array(documents).reshape(-1, 4), n_bad=n_bad, most_bytes=most_bytes)


def _encode(tokenizer: Tokenizer, piece: Piece) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        return tokenizer.encode_document(piece.data)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{piece.where} is not UTF-8 (byte {error.start} from there), which --tokenizer needs: convert it, or use "
            "the tokenizer bytes."
        ) from error
    except ValueError as error:
        raise InputError(f"{piece.where} cannot be tokenized: {error}. Leave it out.") from error


def _token_dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def _record(part: Path) -> Path:
    return part.with_suffix(RECORD)


def _read_record(part: Path) -> dict[str, np.ndarray]:
    with np.load(_record(part), allow_pickle=False) as record:
        return dict(record)


def _assemble(
    folder: Path, parts: list[Path], tokenizer: Tokenizer, origin: str, n_skipped_files: int, plan: dict[str, Any]
) -> Manifest:
    """Lays the parts end to end and writes the manifest, last."""
    records = [_read_record(part) for part in parts]
    documents = _whole_documents(np.concatenate([record["documents"] for record in records]))
    kept = documents[documents[:, 1] > 0]
    most_bytes = max(int(record["most_bytes"]) for record in records)
    plain = tokenizer.fingerprint is None
    text_bytes_dtype = None if plain else np.min_scalar_type(most_bytes).name
    digest = hashlib.blake2b((tokenizer.fingerprint or tokenizer.name).encode(), digest_size=16)
    _concatenate([part.with_suffix(".tokens") for part in parts], folder / TOKENS, digest.update)
    if not plain:
        _narrow([part.with_suffix(".bytes") for part in parts], folder / TEXT_BYTES, text_bytes_dtype)
        with whole_file(folder / TOKENIZER) as file:
            file.write(tokenizer.to_serialized()["json"].encode())
    with whole_file(folder / DOCUMENTS) as file:
        np.save(file, kept)
    digest.update(kept.tobytes())
    manifest = Manifest(
        format=FORMAT,
        origin=origin,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        token_dtype=_token_dtype(tokenizer),
        text_bytes_dtype=text_bytes_dtype,
        n_documents=len(kept),
        n_tokens=int(kept[:, 1].sum()),
        n_bytes=int(kept[:, 2].sum()),
        n_skipped_files=n_skipped_files,
        n_skipped_lines=sum(int(record["n_bad"]) for record in records),
        n_empty=len(documents) - len(kept),
        fingerprint=digest.hexdigest(),
        plan=plan,
    )
    if not manifest.n_documents:
        raise InputError(f"{origin} holds no text: there is nothing to prepare.")
    with whole_file(folder / MANIFEST) as file:
        file.write(f"{json.dumps(asdict(manifest), indent=2)}\n".encode())
    return manifest


def _whole_documents(rows: np.ndarray) -> np.ndarray:
    """From (tokens, bytes, name's hash, ends) of the parts' documents to (start, tokens, bytes, hash) of whole ones.

    A document is the rows up to one that ends; a separator lies after it.
    """
    ends = rows[:, 3]
    first = np.flatnonzero(np.concatenate([[True], ends[:-1] == 1])) if len(rows) else np.zeros(0, dtype=np.int64)
    sizes = np.add.reduceat(rows[:, :2], first, axis=0) if len(rows) else rows[:, :2]
    starts = np.cumsum(sizes[:, 0] + 1) - (sizes[:, 0] + 1)
    return np.column_stack([starts, sizes, rows[first, 2]])


def _concatenate(files: list[Path], to: Path, update: Callable[[bytes], None]) -> None:
    with whole_file(to) as out:
        for path in files:
            for chunk in _chunks(path):
                update(chunk)
                out.write(chunk)


def _narrow(files: list[Path], to: Path, dtype: str) -> None:
    """The same of uint32 numbers, as another dtype that holds them all."""
    with whole_file(to) as out:
        for path in files:
            for chunk in _chunks(path):
                out.write(np.frombuffer(chunk, "<u4").astype(np.dtype(dtype).newbyteorder("<")).tobytes())


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            yield chunk
