"""Loaders that know how long they were waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class TimedLoader(DataLoader[Any]):
    """A DataLoader that keeps count, in `waited`, of the seconds in which somebody waited for its batches."""

    waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - began
            yield batch
