"""Runs of several processes, one for each device, of which the first speaks for all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_only

PATIENCE = 10.0
"""Seconds that a rank which failed gives the first one to end too."""


def is_first_rank() -> bool:
    """Whether this process is the only one of its run, or the first; true of any process before it starts others."""
    return rank_zero_only.rank == 0


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Within it an error ends any other rank than the first in silence if the first one ends as well.

    It does where all ranks meet the same error, which it says, or where the error is that it is gone. Where it does not
    end within `PATIENCE`, waiting for this rank perhaps, the error is this one's own and goes on. Not before, for
    Lightning kills a first rank once another has failed, and this one would not have spoken yet.
    """
    first = os.getppid()  # it has started the others; where something else did, that goes on and all ranks speak
    try:
        yield
    except Exception as error:
        if not is_first_rank() and _ends(first):
            raise SystemExit(1) from error
        raise


def _ends(parent: int) -> bool:
    """Whether the process that started this one ends within `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while os.getppid() == parent:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
