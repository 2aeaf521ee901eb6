"""Training, validation and test splits of a corpus."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linrope.data.corpus.files import Sources
from linrope.data.corpus.sequences import Corpus, Document
from linrope.errors import InputError

SPLITS = ("train", "val", "test")
SPLIT_WAYS = ("document", "position")
HASH_BITS = 48
"""Bits of the hash of a document's name."""
FEW = 20
"""Fewer documents are cut by position: by name, the splits would be far from their fractions, and often empty."""


@dataclass(frozen=True)
class Pieces:
    """Tokens `first … last` of the documents `numbers`, each int64 (n,)."""

    numbers: np.ndarray
    first: np.ndarray
    last: np.ndarray


def split_corpus(
    sources: Sources, fractions: Sequence[float], split: str | None = None
) -> tuple[dict[str, Corpus], str | None]:
    """The train, val and test corpora, and why documents were cut: see `split_documents`, which has the errors."""
    documents = sources.documents
    sizes = np.array([document.size for document in documents], dtype=np.int64)
    hashes = np.array([name_hash(document.name) for document in documents])
    parts, why = split_documents(sizes, hashes, fractions, split)
    corpora = {}
    for name, pieces in zip(SPLITS, parts, strict=True):
        rows = zip(pieces.numbers.tolist(), pieces.first.tolist(), pieces.last.tolist(), strict=True)
        corpora[name] = Corpus([_piece_of(documents[number], first, last) for number, first, last in rows])
    return corpora, why


def _piece_of(document: Document, first: int, last: int) -> Document:
    whole = last - first == document.size
    return document if whole else replace(document, start=document.start + first, size=last - first)


def split_documents(
    sizes: np.ndarray, hashes: np.ndarray, fractions: Sequence[float], split: str | None = None
) -> tuple[list[Pieces], str | None]:
    """The train, val and test pieces of documents of `sizes` tokens, and why several documents were cut (None if not).

    A hash of its name assigns each document to a split, so a new file moves no other. That leaves splits of few
    documents empty: then all documents, one after another, are cut by position, train first, as is usual for enwik8 and
    text8 ([0.9, 0.05, 0.05]). A single document is always cut.

    Args:
        sizes: tokens of each document, int64 (n,), n at least 1.
        hashes: `name_hash` of their names, int64 (n,).
        fractions: of train, val and test.
        split: "document" or "position" for either way; None: by document unless there are fewer than FEW, or a split
            with a fraction above 0 would have none.

    Raises InputError unless `fractions` are three numbers of at least 0 that sum to 1.
    """
    bounds = split_bounds(fractions)
    assigned = assign_documents(hashes, bounds)
    why = None if len(sizes) == 1 else _why_cut(assigned, fractions, split)
    if why is not None or len(sizes) == 1:
        return list(_cut_documents(sizes, bounds)), why
    return [Pieces(numbers, np.zeros_like(numbers), sizes[numbers]) for numbers in assigned], None


def _why_cut(assigned: list[np.ndarray], fractions: Sequence[float], split: str | None) -> str | None:
    """Why several documents are cut by position, as people read it; None if each goes to one split as a whole."""
    if split is not None:
        return "data.split=position" if split == "position" else None
    if (n := sum(map(len, assigned))) < FEW:
        return f"{n} documents are too few to split by name"
    parts = zip(SPLITS, assigned, fractions, strict=True)
    if empty := [name for name, numbers, fraction in parts if fraction > 0 and not len(numbers)]:
        return f"by name, {' and '.join(empty)} would have no text"
    return None


def _cut_documents(sizes: np.ndarray, bounds: tuple[float, float, float]) -> Iterator[Pieces]:
    """The pieces of each split, where all documents are cut as one text."""
    starts = np.cumsum(sizes) - sizes
    for start, stop in cut_by_position(int(sizes.sum()), bounds):
        first, last = np.clip(start - starts, 0, sizes), np.clip(stop - starts, 0, sizes)
        numbers = np.flatnonzero(last > first)
        yield Pieces(numbers, first[numbers], last[numbers])


def split_bounds(fractions: Sequence[float]) -> tuple[float, float, float]:
    """The cumulative fractions at which train, val and test end. Raises InputError as `split_documents`."""
    values = [float(fraction) for fraction in fractions]
    if len(values) != len(SPLITS) or not min(values) >= 0 or values[0] == 0 or not abs(sum(values) - 1) <= 1e-6:
        raise InputError(
            f"data.fractions={list(fractions)} must be three numbers, of train, val and test, that sum to 1, "
            "train above 0 and none negative: for example [0.9, 0.05, 0.05]."
        )
    return min(values[0], 1.0), min(values[0] + values[1], 1.0), 1.0  # their sum may be rounded


def cut_by_position(size: int, bounds: tuple[float, float, float]) -> Iterator[tuple[int, int]]:
    """The start and stop of each split of `size` tokens."""
    return itertools.pairwise([0, *(round(bound * size) for bound in bounds)])


def assign_documents(hashes: np.ndarray, bounds: tuple[float, float, float]) -> list[np.ndarray]:
    """The indices of each split's documents, from `name_hash` of their names, int64 (n_documents,)."""
    split = np.searchsorted(np.array(bounds), hashes.astype(np.float64) / 2**HASH_BITS, side="right")
    return [np.flatnonzero(split == number) for number in range(len(bounds))]


def name_hash(name: str) -> int:
    """A hash of the name with HASH_BITS bits, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=HASH_BITS // 8).digest()
    return int.from_bytes(digest, "big")
