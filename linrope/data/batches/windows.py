"""Windows: the samples of `context` tokens that training and evaluation read from a corpus.

The order is arithmetic, not a stored shuffle: sample `i` of a run follows from the seed and `i` alone. So a run can
start at any sample, ranks and workers need no communication, and shuffling takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from linrope.data.batches.curriculum import Sample
from linrope.data.batches.shuffling import mix, permute
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError
from linrope.losses import IGNORE


def segment_ids_of(tokens: Tensor, separator: int = SEPARATOR) -> Tensor:
    """The number of each token's document in its row, int64 (..., T): 0 for the first document, then 1, 2, …

    A separator of `tokens` (..., T) belongs to the document that it ends.
    """
    ends = (tokens == separator).long()
    return ends.cumsum(-1) - ends


def window(corpus: TokenSequence, start: int, context: int, document_mask: bool) -> dict[str, Tensor]:
    """`inputs` and `targets` (the inputs' next tokens), with a document mask `segment_ids`, each int64 (context,).

    Where a token is not one byte, also `n_bytes`, int64 (context,): the bytes of each target.
    """
    tokens = corpus.tokens(start, start + context + 1)
    found = {"inputs": tokens[:-1], "targets": tokens[1:]}
    if (n_bytes := corpus.text_bytes(start + 1, start + context + 1)) is not None:
        found["n_bytes"] = n_bytes
    return {**found, "segment_ids": segment_ids_of(tokens[:-1], corpus.separator)} if document_mask else found


class _Windows(Dataset[dict[str, Tensor]]):
    """Samples of `context` tokens of a split of a corpus; `option` is the option that sets `context`, for errors.

    `start_of(i)` of a subclass is the first token of sample `i`.
    """

    def __init__(self, corpus: TokenSequence, context: int, split: str, document_mask: bool, option: str) -> None:
        if context < 1:
            raise InputError(f"{option}={context} must be at least 1: it is the number of tokens of one sample.")
        if len(corpus) <= context:
            without = " To train without validation, set its share to 0." if split == "val" else ""
            raise InputError(
                f"the {split} split holds {len(corpus):,} tokens, too few for one sample of {option}={context} + 1: "
                f"lower {option}, raise its share in data.fractions, give more text, or set data.split=position (by "
                f"default each of several documents goes to one split as a whole).{without}"
            )
        self.corpus, self.context, self.document_mask = corpus, context, document_mask

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return window(self.corpus, self.start_of(i), self.context, self.document_mask)


class TrainingWindows(_Windows):
    """The endless training samples of a corpus: sample `i` for every `i ≥ 0`.

    Samples come in epochs of `n_windows`. Within an epoch no sample repeats and no two overlap (except that the last
    target of one can be the first input of the next). Each epoch has a new shuffle and a new offset of all windows, so
    that windows do not always start at the same tokens.

    Args:
        corpus: the tokens to read, at least `context + 1`.
        context: tokens of one sample.
        seed: decides the order.
        document_mask: whether samples have `segment_ids`, int64 (context,): see `segment_ids_of`.
        option: the option that sets `context`, for the error message.

    Raises InputError if the corpus is shorter than one sample, or if a document mask finds no separator in it.
    """

    def __init__(
        self,
        corpus: TokenSequence,
        context: int,
        seed: int = 0,
        document_mask: bool = False,
        option: str = "data.context",
    ) -> None:
        super().__init__(corpus, context, "train", document_mask, option)
        if document_mask:
            corpus.require_documents()
        self.seed = seed
        # One window fewer than fit, so that there is room to shift them by up to a whole window.
        self.n_windows = max(1, (len(corpus) - 1) // context - 1)
        self._max_offset = min(context - 1, len(corpus) - 1 - self.n_windows * context)

    def start_of(self, i: int) -> int:
        epoch, index = divmod(i, self.n_windows)
        offset = mix(self.seed, epoch) % (self._max_offset + 1)
        return offset + permute(index, self.n_windows, self.seed, epoch) * self.context


class CurriculumWindows(Dataset[dict[str, Tensor]]):
    """The training batches of several lengths, by lists of samples: `(seq_len, i)` is sample `i` of that length."""

    def __init__(self, windows: Iterable[TrainingWindows]) -> None:
        self.by_length = {each.context: each for each in windows}

    def __getitem__(self, samples: list[Sample]) -> dict[str, Tensor]:
        return default_collate([self.by_length[seq_len][i] for seq_len, i in samples])


class EvaluationWindows(_Windows):
    """The windows of validation and test: they cover a split once, without overlap.

    The order is shuffled and always the same, so that the first batches are an even sample of the whole split. The
    last `(tokens - 1) mod context` targets, less than one window, are omitted. Arguments and errors are those of
    `TrainingWindows`. `OverlappingWindows` omit none.
    """

    def __init__(self, corpus: TokenSequence, context: int, split: str = "val", document_mask: bool = False) -> None:
        super().__init__(corpus, context, split, document_mask, "data.context")
        if document_mask:
            corpus.require_separator()

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self.context

    def start_of(self, i: int) -> int:
        return permute(i, len(self), 0) * self.context


class OverlappingWindows(EvaluationWindows):
    """Windows that start `stride` tokens after each other, and count each target once: where it has most context.

    All targets but those of the first window are predicted with at least `context - stride` tokens before them. The
    others in a window are IGNORE. The last window ends where the split does.

    `stride` is from 1 to `context`.
    """

    def __init__(
        self, corpus: TokenSequence, context: int, split: str = "test", document_mask: bool = False, *, stride: int
    ) -> None:
        super().__init__(corpus, context, split, document_mask)
        self.stride = stride
        self._last_start = len(corpus) - 1 - context

    def __len__(self) -> int:
        return 1 + -(-self._last_start // self.stride)

    def start_of(self, i: int) -> int:
        return min(permute(i, len(self), 0) * self.stride, self._last_start)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        found, start = super().__getitem__(i), self.start_of(i)
        if start > 0:
            before = (start - 1) // self.stride * self.stride  # where the window before starts
            known = self.context - (start - before)
            found["targets"] = found["targets"].clone()
            found["targets"][:known] = IGNORE
        return found
