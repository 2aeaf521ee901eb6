"""Text as tokens: what is read (`corpus`), how bytes become tokens (`tokenizer`), how training sees it (`windows`)."""

from linrope.data.corpus import SPLITS, Corpus, Document, DocumentChanged, Sources, find_sources, split_corpus
from linrope.data.tokenizer import SEPARATOR, VOCAB_SIZE, TextDecoder, decode, encode, encode_prompt
from linrope.data.windows import EvaluationWindows, TrainingBatches, TrainingWindows, permute

__all__ = [
    "SEPARATOR",
    "SPLITS",
    "VOCAB_SIZE",
    "Corpus",
    "Document",
    "DocumentChanged",
    "EvaluationWindows",
    "Sources",
    "TextDecoder",
    "TrainingBatches",
    "TrainingWindows",
    "decode",
    "encode",
    "encode_prompt",
    "find_sources",
    "permute",
    "split_corpus",
]
