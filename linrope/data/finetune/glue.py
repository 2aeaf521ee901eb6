"""Tasks of GLUE (arXiv 1804.07461), from their official TSV files."""

from __future__ import annotations

from linrope.data.finetune.tsv import CLASSIFICATION, REGRESSION, TableFormat

NO_YES = ("0", "1")

GLUE: dict[str, TableFormat] = {
    "mrpc": TableFormat("#1 String", "#2 String", "Quality", NO_YES, id="index"),
    "sst2": TableFormat("sentence", None, "label", NO_YES, ("accuracy",), id="index"),
    "qnli": TableFormat("question", "sentence", "label", ("entailment", "not_entailment"), ("accuracy",), id="index"),
    "stsb": TableFormat("sentence1", "sentence2", "score", None, REGRESSION, id="index"),
    # the official train.tsv has rows that are broken by line ends within a question
    "qqp": TableFormat(
        "question1", "question2", "is_duplicate", NO_YES, CLASSIFICATION, id="id", skips_damaged_rows=True
    ),
    "mnli": TableFormat(
        "sentence1",
        "sentence2",
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
        id="index",
        val={"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
        test={"matched": "test_matched.tsv", "mismatched": "test_mismatched.tsv"},
    ),
}
"""The format of each task by its name."""
