"""Text as tokens: what is read (`corpus`), how bytes become tokens (`tokenizer`), how training sees it (`windows`).

And a synthetic task: associative recall (`recall`).
"""

from linrope.data.corpus import SPLITS, Corpus, Document, DocumentChanged, Sources, find_sources, split_corpus
from linrope.data.recall import mqar_rows, require_mqar
from linrope.data.tokenizer import IGNORE, SEPARATOR, VOCAB_SIZE, TextDecoder, decode, encode, encode_prompt
from linrope.data.windows import EvaluationWindows, TrainingBatches, TrainingWindows, permute

__all__ = [
    "IGNORE",
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
    "mqar_rows",
    "permute",
    "require_mqar",
    "split_corpus",
]
