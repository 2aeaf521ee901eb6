"""Text as tokens: what is read (`corpus`), how bytes become tokens (`tokenizer`), how training sees it (`windows`).

How long its rows are, step by step (`curriculum`), or how each goes on where it ended (`lanes`). And tasks that ask for
what came before: associative recall (`recall`), copying and induction (`copying`), a pass key in text (`passkey`).
"""

from linrope.data.copying import copy_rows, induction_rows, require_copying, require_depth, require_induction
from linrope.data.corpus import SPLITS, Corpus, Document, DocumentChanged, Sources, find_sources, split_corpus
from linrope.data.curriculum import CurriculumStage, PlannedStage, TrainingBatches, TrainingPlan
from linrope.data.lanes import Lanes
from linrope.data.passkey import passkey_rows, require_passkey
from linrope.data.recall import mqar_rows, require_mqar
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
    "TextDecoder",
    "TrainingBatches",
    "TrainingPlan",
    "TrainingWindows",
    "copy_rows",
    "decode",
    "document_numbers",
    "encode",
    "encode_prompt",
    "find_sources",
    "induction_rows",
    "mqar_rows",
    "passkey_rows",
    "permute",
    "require_copying",
    "require_depth",
    "require_induction",
    "require_mqar",
    "require_passkey",
    "split_corpus",
]
