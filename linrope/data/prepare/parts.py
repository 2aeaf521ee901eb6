"""A part: the tokens of one unit, in files of the folder `parts`, later joined to the files of the corpus."""

from __future__ import annotations

import hashlib
import json
from array import array
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

TOKENS_SUFFIX, BYTES_SUFFIX, RECORD_SUFFIX = ".tokens", ".bytes", ".npz"


def write_part(unit: Unit, part: Path, tokenizer: Tokenizer, config: PrepareConfig, count: Count) -> None:
    """Tokenize a unit and write its part (a path without suffix): tokens, bytes of text of each token, and last the
    record, which marks the part as complete. Raises InputError for a bad line that is not skipped, or text that the
    tokenizer cannot read; see `read_unit`.
    """
    n_bad = 0

    def bad_line(where: Callable[[], str], error: BadLine) -> None:
        nonlocal n_bad
        if not config.skip_bad_lines:
            raise InputError(f"{where()} {error}. Fix the line, or skip such lines with --skip_bad_lines.")
        n_bad += 1

    dtype, documents, most_bytes = np.dtype(token_dtype(tokenizer)).newbyteorder("<"), array("q"), 0
    separator = np.array([tokenizer.separator], dtype).tobytes()
    unfinished = [0, 0]  # tokens and bytes of the document that has not ended
    with (
        whole_file(part.with_suffix(TOKENS_SUFFIX)) as tokens_file,
        whole_file(part.with_suffix(BYTES_SUFFIX)) as bytes_file,
    ):
        for chunk in read_unit(unit, config.text_field, count, bad_line):
            tokens, n_bytes = _encode(tokenizer, chunk)
            tokens_file.write(tokens.astype(dtype).tobytes() + (separator if chunk.ends else b""))
            if n_bytes is not None:
                bytes_file.write(n_bytes.astype("<u4").tobytes() + (bytes(4) if chunk.ends else b""))
                most_bytes = max(most_bytes, int(n_bytes.max(initial=0)))
            unfinished = [unfinished[0] + len(tokens), unfinished[1] + len(chunk.data)]
            if chunk.ends:
                documents.extend((*unfinished, name_hash(chunk.name), True))
                unfinished = [0, 0]
        if any(unfinished):  # the document continues in the next part
            documents.extend((*unfinished, name_hash(chunk.name), False))
    with whole_file(record_of(part)) as file:
        np.savez(file, documents=np.array(documents).reshape(-1, 4), n_bad=n_bad, most_bytes=most_bytes)


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
    """The file that says what a part holds: documents (n, 4) of tokens, bytes, hash of the name, whether it ends here;
    the number of bad lines; the most bytes of a token."""
    return part.with_suffix(RECORD_SUFFIX)


def assemble(
    folder: Path, parts: list[Path], tokenizer: Tokenizer, origin: str, n_skipped_files: int, plan: dict[str, str]
) -> Manifest:
    """Join the parts and write the manifest, last. Raises InputError if no part holds a token."""
    records = []
    for part in parts:
        with np.load(record_of(part), allow_pickle=False) as record:
            records.append(dict(record))
    documents = _join_documents(np.concatenate([record["documents"] for record in records]))
    kept = documents[documents[:, 1] > 0]
    if not len(kept):
        raise InputError(f"{origin} holds no text: there is nothing to prepare.")
    digest = hashlib.blake2b((tokenizer.fingerprint or tokenizer.name).encode(), digest_size=16)
    with whole_file(folder / TOKENS) as file:
        for chunk in _chunks(parts, TOKENS_SUFFIX):
            digest.update(chunk)
            file.write(chunk)
    text_bytes_dtype = text_bytes_checksum = None
    if tokenizer.fingerprint is not None:
        smallest = np.min_scalar_type(max(int(record["most_bytes"]) for record in records))
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
        text_bytes_checksum=text_bytes_checksum,
    )
    with whole_file(folder / MANIFEST) as file:
        file.write(f"{json.dumps(asdict(manifest), indent=2)}\n".encode())
    return manifest


def _join_documents(rows: np.ndarray) -> np.ndarray:
    """From rows (tokens, bytes, hash, ends) of the parts to rows (start, tokens, bytes, hash) of whole documents.

    A document is a run of rows up to one that ends; a separator follows it.
    """
    ends = rows[:, 3]
    first = np.flatnonzero(np.concatenate([[True], ends[:-1] == 1])) if len(rows) else np.zeros(0, dtype=np.int64)
    sizes = np.add.reduceat(rows[:, :2], first, axis=0) if len(rows) else rows[:, :2]
    starts = np.cumsum(sizes[:, 0] + 1) - (sizes[:, 0] + 1)
    return np.column_stack([starts, sizes, rows[first, 2]])


def _chunks(parts: list[Path], suffix: str) -> Iterator[bytes]:
    """The contents of one file of each part."""
    for part in parts:
        with open(part.with_suffix(suffix), "rb") as file:
            while chunk := file.read(1 << 24):
                yield chunk
