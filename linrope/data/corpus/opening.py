"""Open `data.path`: text files, a folder that `linrope prepare` wrote, or a flat file of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.corpus.splits import SPLITS, assign_documents, cut_by_position, split_bounds, split_corpus
from linrope.data.corpus.token_files import NumberFile, PreparedCorpus, TokenRun, survey
from linrope.data.prepare.manifest import DOCUMENTS, LOCK, MANIFEST, PARTS, TEXT_BYTES, TOKENIZER, TOKENS, Manifest
from linrope.data.tokenizers.base import Tokenizer, open_tokenizer
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError


@dataclass(frozen=True)
class OpenedText:
    """A corpus for each split, and its tokenizer."""

    corpora: dict[str, TokenSequence]
    tokenizer: Tokenizer | None
    """None if unknown."""
    vocab_size: int
    """The smallest vocabulary of a model for this text."""
    reason: str
    """What determines `vocab_size`, for error messages."""
    origin: str
    """Where the text comes from, as people read it."""
    n_skipped: int
    """Number of skipped files: binary, empty or unreadable."""


def open_text(
    path: str | Path | None, fractions: Sequence[float], tokenizer: str | None = None, token_dtype: str = "uint16"
) -> OpenedText:
    """The train, val and test corpora under a path.

    Args:
        path: text (see `find_sources`), a prepared folder, or a flat file whose name ends in ".bin".
        fractions: of train, val and test (see `split_corpus`).
        tokenizer: "bytes" or the path of a tokenizer.json. None: bytes for text, its own tokenizer for a prepared
            folder, unknown for a flat file.
        token_dtype: dtype of a flat file, uint16 or uint32.

    Raises InputError for no text there, a damaged file, or a tokenizer other than that of the tokens.
    """
    given = None if tokenizer is None else open_tokenizer(tokenizer, "data.tokenizer")
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and (folder / MANIFEST).is_file():
        return _open_prepared(folder, fractions, given)
    if folder is not None and (folder / PARTS / LOCK).is_file():
        raise InputError(
            f"data.path={str(folder)!r} is not completely prepared: run the same `linrope prepare` again; it continues "
            "where it stopped."
        )
    if folder is not None and folder.suffix == ".bin" and folder.is_file():
        return _open_flat(folder, fractions, given, token_dtype)
    if given is not None and given.fingerprint is not None:
        raise InputError(
            f"data.tokenizer={tokenizer!r} tokenizes text once, before training: linrope prepare --path "
            f"{'PATH' if path is None else path} --tokenizer {tokenizer} --output FOLDER, then data.path: FOLDER."
        )
    sources, tokens = find_sources(path), ByteTokenizer()
    corpora = split_corpus(sources, fractions)
    return OpenedText(corpora, tokens, tokens.vocab_size, "bytes and a separator", sources.origin, sources.n_skipped)


def _open_prepared(folder: Path, fractions: Sequence[float], given: Tokenizer | None) -> OpenedText:
    manifest, bounds = Manifest.read(folder), split_bounds(fractions)
    own = open_tokenizer("bytes" if manifest.tokenizer == "bytes" else str(folder / TOKENIZER), f"{folder}: tokenizer")
    if (own.fingerprint or own.name) != manifest.plan.get("tokenizer"):
        raise InputError(f"{folder / TOKENIZER} is not the one that {folder} was prepared with: prepare it again.")
    if given is not None and given.fingerprint != own.fingerprint:
        raise InputError(
            f"data.tokenizer is another one than data.path={str(folder)!r} was prepared with: omit it, or prepare the "
            "text again with it."
        )
    documents, tokens, text_bytes = _prepared_files(folder, manifest)
    starts, sizes, n_bytes, hashes = documents.T
    if len(documents) == 1:
        cuts = cut_by_position(int(sizes[0]), bounds)
        parts = [_part_of_one(text_bytes, int(starts[0]) + first, int(starts[0]) + last) for first, last in cuts]
    else:
        assigned = assign_documents(hashes, bounds)
        parts = [(starts[numbers], sizes[numbers], int(n_bytes[numbers].sum())) for numbers in assigned]
    corpora = {
        split: PreparedCorpus(tokens, text_bytes, *part, own.separator, manifest.fingerprint)
        for split, part in zip(SPLITS, parts, strict=True)
    }
    reason = f"the tokenizer of {folder}"
    return OpenedText(corpora, own, own.vocab_size, reason, f"{folder}, of {manifest.origin}", manifest.n_skipped_files)


def _prepared_files(folder: Path, manifest: Manifest) -> tuple[np.ndarray, NumberFile, NumberFile | None]:
    """The table of documents, the tokens, and the tokens' bytes of text. InputError if they are damaged."""
    try:
        documents = np.load(folder / DOCUMENTS, allow_pickle=False)
        tokens = NumberFile.of_size(folder / TOKENS, manifest.token_dtype, manifest.vocab_size)
        dtype = manifest.text_bytes_dtype
        text_bytes = None if dtype is None else NumberFile.of_size(folder / TEXT_BYTES, dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"data.path={str(folder)!r} is damaged ({error}): prepare it again.") from error
    expected = manifest.n_tokens + manifest.n_documents + manifest.n_empty  # each document has a separator
    whole = documents.shape == (manifest.n_documents, 4) and documents[:, 1].sum() == manifest.n_tokens
    if not (whole and tokens.n == expected and (text_bytes is None or text_bytes.n == expected)):
        raise InputError(
            f"data.path={str(folder)!r} is damaged: it holds {tokens.n:,} tokens and {len(documents):,} documents, "
            f"where {MANIFEST} says {expected:,} and {manifest.n_documents:,}. Prepare it again."
        )
    return documents, tokens, text_bytes


def _part_of_one(text_bytes: NumberFile | None, first: int, last: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens `first … last` of a single document: start, size and bytes, as for several; no document if it is empty."""
    if text_bytes is None:
        n_bytes = last - first
    else:
        n_bytes = sum(int(numbers.sum(dtype=np.int64)) for _, numbers in text_bytes.chunks(first, last))
    there = slice(None if last > first else 0)
    return np.array([first])[there], np.array([last - first])[there], n_bytes


def _open_flat(path: Path, fractions: Sequence[float], tokenizer: Tokenizer | None, token_dtype: str) -> OpenedText:
    file = NumberFile.of_size(path, token_dtype, None if tokenizer is None else tokenizer.vocab_size)
    digest, highest, position = survey(file)
    cuts = cut_by_position(file.n, split_bounds(fractions))
    corpora = {split: TokenRun(file, *cut, tokenizer, digest) for split, cut in zip(SPLITS, cuts, strict=True)}
    vocab_size, reason = highest + 1, f"{path} holds {highest:,} at position {position:,}"
    if tokenizer is not None:
        vocab_size, reason = tokenizer.vocab_size, "data.tokenizer"
    return OpenedText(corpora, tokenizer, vocab_size, reason, str(path), 0)
