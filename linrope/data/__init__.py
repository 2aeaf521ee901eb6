"""Text as tokens: what is read (`corpus`), how text becomes tokens (`tokenizer`), how training sees it (`windows`).

Text tokenized once (`preparation`), tokens in files (`token_files`), and what a path names (`opening`).

How long its rows are, step by step (`curriculum`), or how each goes on where it ended (`lanes`). And tasks that ask for
what came before: associative recall (`recall`), copying and induction (`copying`), a pass key in text (`passkey`).
"""

from linrope.data.copying import copy_rows, induction_rows, require_copying, require_depth, require_induction
from linrope.data.corpus import (
    SPLITS,
    Corpus,
    Document,
    DocumentChanged,
    Sources,
    TokenSequence,
    find_sources,
    split_corpus,
)
from linrope.data.curriculum import CurriculumStage, PlannedStage, TrainingBatches, TrainingPlan
from linrope.data.lanes import Lanes
from linrope.data.opening import OpenedText, open_text
from linrope.data.passkey import passkey_rows, require_passkey
from linrope.data.preparation import Manifest, PrepareConfig, document_sizes, prepare
from linrope.data.recall import mqar_rows, require_mqar
from linrope.data.stops import StopStrings
from linrope.data.tokenizer import (
    IGNORE,
    SEPARATOR,
    VOCAB_SIZE,
    ByteTokenizer,
    TextDecoder,
    Tokenizer,
    decode,
    encode,
    encode_prompt,
    open_tokenizer,
    tokenizer_from_plain,
    tokenizer_to_plain,
)
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
    "ByteTokenizer",
    "Corpus",
    "CurriculumStage",
    "CurriculumWindows",
    "Document",
    "DocumentChanged",
    "EvaluationWindows",
    "Lanes",
    "Manifest",
    "OpenedText",
    "PlannedStage",
    "PrepareConfig",
    "Sources",
    "StopStrings",
    "TextDecoder",
    "TokenSequence",
    "Tokenizer",
    "TrainingBatches",
    "TrainingPlan",
    "TrainingWindows",
    "copy_rows",
    "decode",
    "document_numbers",
    "document_sizes",
    "encode",
    "encode_prompt",
    "find_sources",
    "induction_rows",
    "mqar_rows",
    "open_text",
    "open_tokenizer",
    "passkey_rows",
    "permute",
    "prepare",
    "require_copying",
    "require_depth",
    "require_induction",
    "require_mqar",
    "require_passkey",
    "split_corpus",
    "tokenizer_from_plain",
    "tokenizer_to_plain",
]
