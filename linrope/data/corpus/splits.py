"""Training, validation and test splits of a corpus."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

from linrope.data.corpus.files import Sources
from linrope.data.corpus.sequences import Corpus, Document
from linrope.errors import InputError

SPLITS = ("train", "val", "test")


HASH_BITS = 48
"""Bits of the hash of a document's name."""


def split_corpus(sources: Sources, fractions: Sequence[float]) -> dict[str, Corpus]:
    """The train, val and test corpora.

    A hash of its name assigns each document to a split, so a new file moves no other. A single document is cut by
    position, train first, as is usual for enwik8 and text8 ([0.9, 0.05, 0.05]).

    Args:
        sources: the documents.
        fractions: of train, val and test: three numbers of at least 0 that sum to 1.

    Raises:
        InputError: fractions of other values.
    """
    bounds = split_bounds(fractions)
    if len(sources.documents) == 1:
        return dict(zip(SPLITS, _split_by_position(sources.documents[0], bounds), strict=True))
    assigned: list[list[Document]] = [[] for _ in SPLITS]
    for document in sources.documents:
        share = name_hash(document.name) / 2**HASH_BITS
        assigned[next(split for split, bound in enumerate(bounds) if share < bound)].append(document)
    return {split: Corpus(documents) for split, documents in zip(SPLITS, assigned, strict=True)}


def split_bounds(fractions: Sequence[float]) -> tuple[float, float, float]:
    """The cumulative fractions at which train, val and test end. Raises InputError as `split_corpus`."""
    values = [float(fraction) for fraction in fractions]
    if len(values) != len(SPLITS) or not min(values) >= 0 or values[0] == 0 or not abs(sum(values) - 1) <= 1e-6:
        raise InputError(
            f"data.fractions={list(fractions)} must be three numbers, of train, val and test, that sum to 1, "
            "train above 0 and none negative: for example [0.9, 0.05, 0.05]."
        )
    return values[0], values[0] + values[1], 1.0


def _split_by_position(document: Document, bounds: tuple[float, float, float]) -> Iterator[Corpus]:
    for start, stop in cut_by_position(document.size, bounds):
        part = Document(document.name, document.path, document.file_size, document.start + start, stop - start)
        yield Corpus([part] if part.size else [])


def cut_by_position(size: int, bounds: tuple[float, float, float]) -> Iterator[tuple[int, int]]:
    """The start and stop of each split of `size` tokens."""
    return itertools.pairwise([0, *(round(bound * size) for bound in bounds)])


def name_hash(name: str) -> int:
    """A hash of the name with HASH_BITS bits, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=HASH_BITS // 8).digest()
    return int.from_bytes(digest, "big")
