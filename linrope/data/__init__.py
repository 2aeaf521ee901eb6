"""Text as tokens: what is read (`corpus`), how bytes become tokens (`tokenizer`), how training sees it (`windows`).

How long its rows are, step by step (`curriculum`), or how each goes on where it ended (`lanes`). And a synthetic task:
associative recall (`recall`).
"""

from linrope.data.corpus import SPLITS, Corpus, Document, DocumentChanged, Sources, find_sources, split_corpus
from linrope.data.curriculum import CurriculumStage, PlannedStage, TrainingBatches, TrainingPlan
from linrope.data.lanes import Lanes
from linrope.data.recall import mqar_rows, require_mqar
from linrope.data.stops import StopStrings
from linrope.data.tokenizer import IGNORE, SEPARATOR, VOCAB_SIZE, TextDecoder, decode, encode, encode_prompt
from linrope.data.windows import (
    DOCUMENTS,
    CurriculumWindows,
    EvaluationWindows,
    TrainingWindows,
    document_numbers,
    permute,
)

__all__ = [
    "DOCUMENTS",
    "IGNORE",
    "SEPARATOR",
    "SPLITS",
    "VOCAB_SIZE",
    "Corpus",
    "CurriculumStage",
    "CurriculumWindows",
    "Document",
    "DocumentChanged",
    "EvaluationWindows",
    "Lanes",
    "PlannedStage",
    "Sources",
    "StopStrings",
    "TextDecoder",
    "TrainingBatches",
    "TrainingPlan",
    "TrainingWindows",
    "decode",
    "document_numbers",
    "encode",
    "encode_prompt",
    "find_sources",
    "mqar_rows",
    "permute",
    "require_mqar",
    "split_corpus",
]
