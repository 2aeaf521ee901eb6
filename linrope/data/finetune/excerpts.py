"""A small task from Python's standard library: which of its packages does an excerpt of source come from?"""

from __future__ import annotations

from linrope.data.corpus.files import find_sources
from linrope.data.finetune.examples import Example

PACKAGES = ("asyncio", "email", "multiprocessing", "xml")
"""The labels."""
LINES = 5
"""Lines of an excerpt."""
SPLIT_OF = ("train", "train", "val", "train", "test")
"""The split of each package's files in turn: excerpts of one file are never in two splits."""


def read_excerpts() -> dict[str, list[Example]]:
    """The excerpts by split; blank lines are left out. Each package has the same number of them in a split, its first
    ones, so that the most frequent label is right in a fourth of the rows."""
    found: dict[str, dict[str, list[Example]]] = {split: {} for split in SPLIT_OF}
    n_files = dict.fromkeys(PACKAGES, 0)
    for document in find_sources(None).documents:
        package = document.name.partition("/")[0]
        if package not in n_files:
            continue
        split = SPLIT_OF[n_files[package] % len(SPLIT_OF)]
        n_files[package] += 1
        text = document.path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        of_package = found[split].setdefault(package, [])
        for start in range(0, len(lines) - LINES + 1, LINES):
            name, excerpt = f"{document.name}:{start // LINES}", "\n".join(lines[start : start + LINES])
            of_package.append(Example(name, (excerpt,), PACKAGES.index(package)))
    return {split: _balanced(list(by_package.values())) for split, by_package in found.items()}


def _balanced(lists: list[list[Example]]) -> list[Example]:
    n = min(map(len, lists))
    return [example for examples in lists for example in examples[:n]]
