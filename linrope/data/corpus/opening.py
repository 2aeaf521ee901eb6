"""What `data.path` names, opened: text files, a folder that `linrope prepare` wrote, or a flat file of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.corpus.splits import SPLITS, cut_by_position, split_bounds, split_corpus
from linrope.data.corpus.token_files import NumberFile, PreparedCorpus, TokenRun, deal_documents, sum_of, survey
from linrope.data.prepare.manifest import (
    DOCUMENTS,
    LOCK,
    MANIFEST,
    PARTS,
    TEXT_BYTES,
    TOKENIZER,
    TOKENS,
    Manifest,
    read_manifest,
)
from linrope.data.tokenizers.base import Tokenizer, open_tokenizer
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError


@dataclass(frozen=True)
class OpenedText:
    """A corpus for each split, and how its tokens are text."""

    corpora: dict[str, TokenSequence]
    tokenizer: Tokenizer | None
    """None where nobody has told."""
    vocab_size: int
    """How many tokens a model must know."""
    reason: str
    """Why so many, for error messages."""
    origin: str
    """Where the text comes from, for people to read."""
    n_skipped: int
    """Files left out: binary, empty or unreadable."""


def open_text(
    path: str | Path | None, fractions: Sequence[float], tokenizer: str | None = None, token_dtype: str = "uint16"
) -> OpenedText:
    """The train, val and test corpora under a path: see `find_sources`, `prepare` and `token_files`.

    Args:
        path: text, a prepared folder, or a flat file whose name ends in ".bin".
        fractions: of train, val and test: see `split_corpus`.
        tokenizer: "bytes" or the path of a tokenizer.json. None: bytes of text, a prepared folder's own, and none for a
            flat file.
        token_dtype: of a flat file, uint16 or uint32.

    Raises:
        InputError: nothing to read there, something damaged, or a tokenizer that is not that of the tokens.
    """
    given = None if tokenizer is None else open_tokenizer(tokenizer, "data.tokenizer")
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and (folder / MANIFEST).is_file():
        return _open_prepared(folder, fractions, given)
    if folder is not None and (folder / PARTS / LOCK).is_file():
        raise InputError(
            f"data.path={str(folder)!r} is not prepared to its end: run the same `linrope prepare` again, which goes "
            "on where it stopped."
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
    manifest, bounds = read_manifest(folder), split_bounds(fractions)
    own = open_tokenizer("bytes" if manifest.tokenizer == "bytes" else str(folder / TOKENIZER), f"{folder}: tokenizer")
    if (own.fingerprint or own.name) != manifest.plan.get("tokenizer"):
        raise InputError(f"{folder / TOKENIZER} is not the one that {folder} was prepared with: prepare it again.")
    if given is not None and given.fingerprint != own.fingerprint:
        raise InputError(
            f"data.tokenizer is another one than data.path={str(folder)!r} was prepared with: leave it out, or prepare "
            "the text again with it."
        )
    documents, tokens, text_bytes = _prepared_files(folder, manifest)
    starts, sizes, n_bytes, shares = documents.T
    if len(documents) == 1:
        parts = [
            _part_of_one(tokens, text_bytes, int(starts[0]), cut) for cut in cut_by_position(int(sizes[0]), bounds)
        ]
    else:
        dealt = deal_documents(shares, bounds)
        parts = [(starts[numbers], sizes[numbers], int(n_bytes[numbers].sum())) for numbers in dealt]
    corpora = {
        split: PreparedCorpus(tokens, text_bytes, *part, own.separator, manifest.fingerprint)
        for split, part in zip(SPLITS, parts, strict=True)
    }
    reason = f"the tokenizer of {folder}"
    return OpenedText(corpora, own, own.vocab_size, reason, f"{folder}, of {manifest.origin}", manifest.n_skipped_files)


def _prepared_files(folder: Path, manifest: Manifest) -> tuple[np.ndarray, NumberFile, NumberFile | None]:
    """The table of documents, the tokens, and how many bytes each stands for. InputError where they are damaged."""
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


def _part_of_one(
    tokens: NumberFile, text_bytes: NumberFile | None, start: int, cut: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, int]:
    """A split of the only document: where it starts, its size and its bytes; no document where it is empty."""
    first, last = start + cut[0], start + cut[1]
    n_bytes = last - first if text_bytes is None else sum_of(text_bytes, first, last)
    there = slice(None if last > first else 0)
    return np.array([first])[there], np.array([last - first])[there], n_bytes


def _open_flat(path: Path, fractions: Sequence[float], tokenizer: Tokenizer | None, token_dtype: str) -> OpenedText:
    file = NumberFile.of_size(path, token_dtype, None if tokenizer is None else tokenizer.vocab_size)
    found = survey(file)
    cuts = cut_by_position(file.n, split_bounds(fractions))
    runs = [TokenRun(file, first, last, tokenizer, found.digest) for first, last in cuts]
    corpora = dict(zip(SPLITS, runs, strict=True))
    if tokenizer is not None:
        return OpenedText(corpora, tokenizer, tokenizer.vocab_size, "data.tokenizer", str(path), 0)
    reason = f"{path} holds {found.highest:,} at position {found.position:,}"
    return OpenedText(corpora, None, found.highest + 1, reason, str(path), 0)
