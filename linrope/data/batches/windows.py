"""What training and evaluation see of a corpus: windows of `context` tokens, in an order that needs no memory.

The order is arithmetic, not a stored shuffle: sample `i` of a run follows from the seed and `i` alone. A run can
start anywhere, ranks and workers need not talk, and a corpus of any size costs nothing to shuffle.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.data import Dataset

from linrope.data.batches.curriculum import Sample
from linrope.data.batches.shuffling import mix, permute
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError, require_choice

DOCUMENTS = ("flow", "apart")
"""How documents stand in a window: as one text, or each by itself."""


def document_numbers(tokens: Tensor, separator: int = SEPARATOR) -> Tensor:
    """The document of each token, int64 of the shape of tokens (..., T): 0 for a row's first, then 1, 2, …

    A separator belongs to the document that it ends.
    """
    ends = (tokens == separator).long()
    return ends.cumsum(-1) - ends


def _window(corpus: TokenSequence, start: int, context: int, documents: str) -> dict[str, Tensor]:
    """`inputs` and `targets`, each int64 (context,): targets are the inputs' next tokens. Apart: `segment_ids` too.

    Where tokens are no bytes, `n_bytes`, int64 (context,): how many each target stands for.
    """
    tokens = corpus.tokens(start, start + context + 1)
    window = {"inputs": tokens[:-1], "targets": tokens[1:]}
    if (n_bytes := corpus.text_bytes(start + 1, start + context + 1)) is not None:
        window["n_bytes"] = n_bytes
    return window if documents == "flow" else {**window, "segment_ids": document_numbers(tokens[:-1], corpus.separator)}


def require_documents(corpus: TokenSequence, documents: str) -> None:
    """Raise InputError unless `documents` is one of DOCUMENTS, and the corpus knows where documents end if need be."""
    require_choice("data.documents", documents, DOCUMENTS)
    if documents == "apart" and corpus.separator is None:
        raise InputError(
            "data.documents='apart' needs to know which token ends a document: set data.tokenizer to the tokens' own."
        )


def _require_one_window(corpus: TokenSequence, context: int, split: str, option: str = "data.context") -> None:
    if context < 1:
        raise InputError(f"{option}={context} must be at least 1: it is the number of tokens of one sample.")
    if len(corpus) <= context:
        raise InputError(
            f"the {split} split holds {len(corpus):,} tokens, too few for one sample of {option}={context} + 1: "
            f"lower {option}, raise its share in data.fractions, or give more text "
            f"(several documents are dealt out whole; a single file is cut by position)."
        )


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """The endless training samples of a corpus: sample `i` for every `i ≥ 0`.

    Samples come in epochs of `n_windows`. Within an epoch none repeats and none overlaps another (but for the one token
    that is the last target of one and the first input of the next). Each epoch shuffles anew and shifts all windows by
    an offset of its own, so that they do not always start at the same places.

    Args:
        corpus: what to read, at least `context + 1` tokens.
        context: tokens of one sample.
        seed: names the order.
        documents: "flow", or "apart" for samples with `segment_ids`, int64 (context,): see `document_numbers`.
        option: where `context` comes from, for the error message.

    Raises:
        InputError: the corpus is shorter than one sample; `documents` is neither.
    """

    def __init__(
        self, corpus: TokenSequence, context: int, seed: int = 0, documents: str = "flow", option: str = "data.context"
    ) -> None:
        _require_one_window(corpus, context, "train", option)
        require_documents(corpus, documents)
        self.corpus, self.context, self.seed, self.documents = corpus, context, seed, documents
        # One window fewer than fit, so that there is room to shift them by up to a whole window.
        self.n_windows = max(1, (len(corpus) - 1) // context - 1)
        self._max_offset = min(context - 1, len(corpus) - 1 - self.n_windows * context)

    def start_of(self, i: int) -> int:
        """The first token of sample `i`."""
        epoch, index = divmod(i, self.n_windows)
        offset = mix(self.seed, epoch) % (self._max_offset + 1)
        return offset + permute(index, self.n_windows, self.seed, epoch) * self.context

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return _window(self.corpus, self.start_of(i), self.context, self.documents)


class CurriculumWindows(Dataset[dict[str, Tensor]]):
    """The training samples of several lengths: `(seq_len, i)` is sample `i` of the windows of that length."""

    def __init__(self, windows: Iterable[TrainingWindows]) -> None:
        self._of_length = {each.context: each for each in windows}

    def __getitem__(self, sample: Sample) -> dict[str, Tensor]:
        seq_len, i = sample
        return self._of_length[seq_len][i]


class EvaluationWindows(Dataset[dict[str, Tensor]]):
    """The windows that cover a split once, without overlap, for validation and test.

    The order is shuffled but always the same, so that the first batches are an even sample of the whole split. The
    last `(tokens - 1) mod context` targets, less than one window, are left out. `documents` is `TrainingWindows`'.

    Raises:
        InputError: the corpus is shorter than one sample; `documents` is neither.
    """

    def __init__(self, corpus: TokenSequence, context: int, split: str = "val", documents: str = "flow") -> None:
        _require_one_window(corpus, context, split)
        require_documents(corpus, documents)
        self.corpus, self.context, self.documents = corpus, context, documents
        self.n_windows = (len(corpus) - 1) // context

    def __len__(self) -> int:
        return self.n_windows

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return _window(self.corpus, permute(i, self.n_windows, 0) * self.context, self.context, self.documents)
