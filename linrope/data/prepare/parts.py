"""A part: the tokens of one unit, in files of the folder `parts`, later joined to the files of the corpus.

Nothing is held in memory for all documents: there may be many millions of short ones.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from linrope.data.corpus.splits import name_hash
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.jsonlines import BadLine
from linrope.data.prepare.manifest import DOCUMENTS, FORMAT, MANIFEST, TEXT_BYTES, TOKENIZER, TOKENS, Manifest
from linrope.data.prepare.units import Count, TextChunk, Unit, read_unit
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.utils.files import whole_file

TOKENS_SUFFIX, BYTES_SUFFIX, ROWS_SUFFIX, RECORD_SUFFIX = ".tokens", ".bytes", ".rows", ".json"
ROW = struct.Struct("<4q")
READ_BYTES = 1 << 24
"""Bytes of one read of a part; a multiple of a row's."""


def write_part(unit: Unit, part: Path, tokenizer: Tokenizer, config: PrepareConfig, count: Count) -> None:
    """Tokenize a unit and write its part (a path without suffix): tokens, bytes of text of each token, a row for
    each document (int64: tokens, bytes, hash of its name, whether it ends here), and last the record, which marks the
    part as complete. Raises InputError for a bad line that is not skipped, or text that the
    tokenizer cannot read; see `read_unit`.
    """
    n_bad = 0

    def bad_line(where: Callable[[], str], error: BadLine) -> None:
        nonlocal n_bad
        if not config.skip_bad_lines:
            raise InputError(f"{where()} {error}. Fix the line, or skip such lines with --skip_bad_lines.")
        n_bad += 1

    dtype, most_bytes = np.dtype(token_dtype(tokenizer)).newbyteorder("<"), 0
    separator = np.array([tokenizer.separator], dtype).tobytes()
    unfinished = [0, 0]  # tokens and bytes of the document that has not ended
    with (
        whole_file(part.with_suffix(TOKENS_SUFFIX)) as tokens_file,
        whole_file(part.with_suffix(BYTES_SUFFIX)) as bytes_file,
        whole_file(part.with_suffix(ROWS_SUFFIX)) as rows_file,
    ):
        for chunk in read_unit(unit, config.text_field, count, bad_line):
            tokens, n_bytes = _encode(tokenizer, chunk)
            tokens_file.write(tokens.astype(dtype).tobytes() + (separator if chunk.ends else b""))
            if n_bytes is not None:
                bytes_file.write(n_bytes.astype("<u4").tobytes() + (bytes(4) if chunk.ends else b""))
                most_bytes = max(most_bytes, int(n_bytes.max(initial=0)))
            unfinished = [unfinished[0] + len(tokens), unfinished[1] + len(chunk.data)]
            if chunk.ends:
                rows_file.write(ROW.pack(*unfinished, name_hash(chunk.name), True))
                unfinished = [0, 0]
        if any(unfinished):  # the document continues in the next part
            rows_file.write(ROW.pack(*unfinished, name_hash(chunk.name), False))
    with whole_file(record_of(part)) as file:
        file.write(json.dumps({"n_bad": n_bad, "most_bytes": most_bytes}).encode())


def _encode(tokenizer: Tokenizer, chunk: TextChunk) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        return tokenizer.encode_document(chunk.data)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{chunk.where} is not UTF-8 (byte {error.start} from there), which --tokenizer needs: convert it, or use "
            "the tokenizer bytes."
        ) from error
    except ValueError as error:
        raise InputError(f"{chunk.where} cannot be tokenized: {error}. Remove it, or use another tokenizer.") from error


def token_dtype(tokenizer: Tokenizer) -> str:
    """The smallest dtype of tokens: "uint16" or "uint32"."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def record_of(part: Path) -> Path:
    """The file that says that a part is complete, its number of bad lines, and the most bytes of a token."""
    return part.with_suffix(RECORD_SUFFIX)


def assemble(
    folder: Path, parts: list[Path], tokenizer: Tokenizer, origin: str, n_skipped_files: int, plan: dict[str, str]
) -> Manifest:
    """Join the parts and write the manifest, last. Raises InputError if no part holds a token."""
    records = [json.loads(record_of(part).read_text()) for part in parts]
    n_documents = n_tokens = n_bytes = n_empty = 0
    for documents in _documents(parts):
        kept = documents[documents[:, 1] > 0]
        n_documents, n_empty = n_documents + len(kept), n_empty + len(documents) - len(kept)
        n_tokens, n_bytes = n_tokens + int(kept[:, 1].sum()), n_bytes + int(kept[:, 2].sum())
    if not n_documents:
        raise InputError(f"{origin} holds no text: there is nothing to prepare.")
    digest = hashlib.blake2b((tokenizer.fingerprint or tokenizer.name).encode(), digest_size=16)
    with whole_file(folder / TOKENS) as file:
        for chunk in _chunks(parts, TOKENS_SUFFIX):
            digest.update(chunk)
            file.write(chunk)
    text_bytes_dtype = text_bytes_checksum = None
    if tokenizer.fingerprint is not None:
        smallest = np.min_scalar_type(max(record["most_bytes"] for record in records))
        text_bytes_dtype = smallest.name
        with whole_file(folder / TEXT_BYTES) as file:
            text_bytes_digest = hashlib.blake2b(digest_size=16)
            for chunk in _chunks(parts, BYTES_SUFFIX):
                data = np.frombuffer(chunk, "<u4").astype(smallest.newbyteorder("<")).tobytes()
                text_bytes_digest.update(data)
                file.write(data)
            text_bytes_checksum = text_bytes_digest.hexdigest()
        with whole_file(folder / TOKENIZER) as file:
            file.write(tokenizer.to_serialized()["json"].encode())
    with whole_file(folder / DOCUMENTS) as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (n_documents, 4)}
        np.lib.format.write_array_header_1_0(file, header)
        for documents in _documents(parts):
            data = documents[documents[:, 1] > 0].tobytes()
            digest.update(data)
            file.write(data)
    manifest = Manifest(
        format=FORMAT,
        origin=origin,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        token_dtype=token_dtype(tokenizer),
        text_bytes_dtype=text_bytes_dtype,
        n_documents=n_documents,
        n_tokens=n_tokens,
        n_bytes=n_bytes,
        n_skipped_files=n_skipped_files,
        n_skipped_lines=sum(record["n_bad"] for record in records),
        n_empty=n_empty,
        fingerprint=digest.hexdigest(),
        plan=plan,
        text_bytes_checksum=text_bytes_checksum,
    )
    with whole_file(folder / MANIFEST) as file:
        file.write(f"{json.dumps(asdict(manifest), indent=2)}\n".encode())
    return manifest


def _documents(parts: list[Path]) -> Iterator[np.ndarray]:
    """Rows (start, tokens, bytes, hash) of whole documents, int64 (n, 4), from the rows of the parts.

    A document is a run of rows up to one that ends; a separator follows it.
    """
    position, begun = 0, np.zeros((0, 4), dtype=np.int64)
    for chunk in _chunks(parts, ROWS_SUFFIX):
        rows = np.concatenate([begun, np.frombuffer(chunk, "<i8").reshape(-1, 4)])
        ends = np.flatnonzero(rows[:, 3])
        n_whole = ends[-1] + 1 if len(ends) else 0
        begun = rows[n_whole:]
        if len(begun) > 1:  # parts in the middle of a document
            begun = np.array([[*begun[:, :2].sum(axis=0), begun[0, 2], 0]])
        if not n_whole:
            continue
        first = np.concatenate([[0], ends[:-1] + 1])
        sizes = np.add.reduceat(rows[:n_whole, :2], first, axis=0)
        stops = position + np.cumsum(sizes[:, 0] + 1)
        yield np.column_stack([stops - (sizes[:, 0] + 1), sizes, rows[first, 2]])
        position = int(stops[-1])


def _chunks(parts: list[Path], suffix: str) -> Iterator[bytes]:
    """The contents of one file of each part."""
    for part in parts:
        with open(part.with_suffix(suffix), "rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk
