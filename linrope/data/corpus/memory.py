"""Documents in memory as a corpus: for text that is in no file, a database or a data set for example."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from linrope.data.corpus.opening import OpenedText
from linrope.data.corpus.sequences import DocumentSequence
from linrope.data.corpus.splits import SPLITS
from linrope.data.tokenizers.base import Tokenizer
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError


class MemoryCorpus(DocumentSequence):
    """Documents as tokens of a tokenizer; empty ones are left out.

    Raises:
        InputError: a document that is neither a string nor bytes, or that the tokenizer cannot take; one string in
            place of documents.
    """

    def __init__(self, documents: Iterable[str | bytes], tokenizer: Tokenizer) -> None:
        if isinstance(documents, str | bytes):
            raise InputError("documents are one string: give a list of strings.")
        encoded = [_encode(number, document, tokenizer) for number, document in enumerate(documents)]
        encoded = [(tokens, n_bytes) for tokens, n_bytes in encoded if len(tokens)]
        self._documents = [tokens for tokens, _ in encoded]
        self._text_bytes = [n_bytes for _, n_bytes in encoded if n_bytes is not None]
        super().__init__(np.array([len(tokens) for tokens in self._documents], dtype=np.int64), tokenizer.separator)
        self.n_bytes = sum(int(n.sum()) for n in self._text_bytes) if self._text_bytes else len(self) - self.n_documents

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._gather(start, stop, lambda d, first, last: self._documents[d][first:last], self.separator)

    def text_bytes(self, start: int, stop: int) -> Tensor | None:
        if not self._text_bytes:
            return None
        return torch.from_numpy(self._gather(start, stop, lambda d, first, last: self._text_bytes[d][first:last], 0))

    def fingerprint(self) -> str:
        """A hash of all tokens and of where documents end."""
        digest = hashlib.blake2b(self.offsets.tobytes(), digest_size=16)
        for tokens in self._documents:
            digest.update(tokens.astype(np.int64).tobytes())
        return digest.hexdigest()


def _encode(number: int, document: str | bytes, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    if not isinstance(document, str | bytes):
        raise InputError(f"document {number} is a {type(document).__name__}: give strings or bytes.")
    try:
        return tokenizer.encode_document(document.encode() if isinstance(document, str) else document)
    except ValueError as error:  # not UTF-8, or with the separator as text
        raise InputError(f"document {number} cannot be tokenized: {error}.") from error


def text_of_documents(
    train: Iterable[str | bytes],
    val: Iterable[str | bytes] = (),
    test: Iterable[str | bytes] = (),
    *,
    tokenizer: Tokenizer | None = None,
    origin: str = "documents in memory",
) -> OpenedText:
    """What `TextDataModule.read` returns, of documents in memory: strings, or bytes, for each split.

    Args:
        train, val, test: the documents of each split, in order.
        tokenizer: of the tokens; None is bytes (see `linrope.data.tokenizers.base.open_tokenizer`).
        origin: where the text comes from, for the run's summary.

    Raises:
        InputError: see `MemoryCorpus`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    corpora = {split: MemoryCorpus(part, tokenizer) for split, part in zip(SPLITS, (train, val, test), strict=True)}
    return OpenedText(corpora, tokenizer, tokenizer.vocab_size, f"the tokenizer {tokenizer.name}", origin, 0)
