"""The task of the standard library: balanced, and split by file."""

from collections import Counter

from linrope.data.finetune.excerpts import LINES, PACKAGES, read_excerpts


def test_splits_share_no_file_and_labels_are_balanced():
    splits = read_excerpts()
    files = {split: {example.id.rpartition(":")[0] for example in examples} for split, examples in splits.items()}
    for split, examples in splits.items():
        counts = Counter(example.target for example in examples)
        assert set(counts.values()) == {len(examples) // len(PACKAGES)}
        assert len(counts) == len(PACKAGES)
        assert all(example.texts[0].count("\n") == LINES - 1 for example in examples)
        assert all(example.id.startswith(PACKAGES[example.target]) for example in examples)
        assert all(files[split].isdisjoint(files[other]) for other in files if other != split)
    assert len(splits["train"]) > len(splits["val"]) > 100
