"""Training, validation and test splits of a corpus."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from linrope.data.corpus.files import Sources
from linrope.data.corpus.sequences import Corpus
from linrope.errors import InputError

SPLITS = ("train", "val", "test")
HASH_BITS = 48
"""Bits of the hash of a document's name."""


def split_corpus(sources: Sources, fractions: Sequence[float]) -> dict[str, Corpus]:
    """The train, val and test corpora.

    A hash of its name assigns each document to a split, so a new file moves no other. A single document is cut by
    position, train first, as is usual for enwik8 and text8 ([0.9, 0.05, 0.05]). Raises InputError unless `fractions`,
    of train, val and test, are three numbers of at least 0 that sum to 1.
    """
    bounds, documents = split_bounds(fractions), sources.documents
    if len(documents) == 1:
        (whole,) = documents
        cuts = cut_by_position(whole.size, bounds)
        parts = [[replace(whole, start=start, size=stop - start)] if stop > start else [] for start, stop in cuts]
    else:
        hashes = np.array([name_hash(document.name) for document in documents])
        parts = [[documents[index] for index in indices] for indices in assign_documents(hashes, bounds)]
    return {split: Corpus(part) for split, part in zip(SPLITS, parts, strict=True)}


def split_bounds(fractions: Sequence[float]) -> tuple[float, float, float]:
    """The cumulative fractions at which train, val and test end. Raises InputError as `split_corpus`."""
    values = [float(fraction) for fraction in fractions]
    if len(values) != len(SPLITS) or not min(values) >= 0 or values[0] == 0 or not abs(sum(values) - 1) <= 1e-6:
        raise InputError(
            f"data.fractions={list(fractions)} must be three numbers, of train, val and test, that sum to 1, "
            "train above 0 and none negative: for example [0.9, 0.05, 0.05]."
        )
    return values[0], values[0] + values[1], 1.0


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
