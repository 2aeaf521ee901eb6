"""The parts of a preparation, joined to the files of the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from linrope.data.prepare.manifest import DOCUMENTS, FORMAT, MANIFEST, TEXT_BYTES, TOKENIZER, TOKENS, Manifest
from linrope.data.prepare.parts import BYTES_SUFFIX, TOKENS_SUFFIX, record_of, token_dtype
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.utils.files import whole_file


def assemble(
    folder: Path, parts: list[Path], tokenizer: Tokenizer, origin: str, n_skipped_files: int, plan: dict[str, Any]
) -> Manifest:
    """Join the parts and write the manifest, last.

    Raises:
        InputError: no part holds a token.
    """
    records = [_read_record(part) for part in parts]
    documents = join_documents(np.concatenate([record["documents"] for record in records]))
    kept = documents[documents[:, 1] > 0]
    if not len(kept):
        raise InputError(f"{origin} holds no text: there is nothing to prepare.")
    digest = hashlib.blake2b((tokenizer.fingerprint or tokenizer.name).encode(), digest_size=16)
    _concatenate([part.with_suffix(TOKENS_SUFFIX) for part in parts], folder / TOKENS, digest.update)
    text_bytes_dtype = None
    if tokenizer.fingerprint is not None:
        text_bytes_dtype = np.min_scalar_type(max(int(record["most_bytes"]) for record in records)).name
        _narrow([part.with_suffix(BYTES_SUFFIX) for part in parts], folder / TEXT_BYTES, text_bytes_dtype)
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
        token_dtype=token_dtype(tokenizer),
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
    with whole_file(folder / MANIFEST) as file:
        file.write(f"{json.dumps(asdict(manifest), indent=2)}\n".encode())
    return manifest


def _read_record(part: Path) -> dict[str, np.ndarray]:
    with np.load(record_of(part), allow_pickle=False) as record:
        return dict(record)


def join_documents(rows: np.ndarray) -> np.ndarray:
    """From rows (tokens, bytes, hash, ends) of the parts to rows (start, tokens, bytes, hash) of whole documents.

    A document is a run of rows up to one that ends; a separator follows it.
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
    """Concatenate files of uint32 numbers, converted to a dtype that holds them all."""
    with whole_file(to) as out:
        for path in files:
            for chunk in _chunks(path):
                out.write(np.frombuffer(chunk, "<u4").astype(np.dtype(dtype).newbyteorder("<")).tobytes())


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            yield chunk
