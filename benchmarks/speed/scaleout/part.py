"""One part of `python -m benchmarks.scaleout PART`: a benchmark of its own, with files named after it."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.harness.runner import AddOption, Benchmark


class Part(Benchmark):
    """A part of the benchmark.

    Attributes:
        part: the first argument of the command, and the name of the files.
    """

    name = "scaleout"
    output = "results/scaleout"
    part: ClassVar[str]

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("part", choices=[cls.part], help="this part; the others have options of their own")
        cls.add_part_options(add)

    @classmethod
    def add_part_options(cls, add: AddOption) -> None:
        """Add the part's options."""
        raise NotImplementedError

    @property
    def stem(self) -> str:
        return self.part
