"""Runs of several processes, one for each device: which of them prints."""

from __future__ import annotations

import time

from lightning_utilities.core.rank_zero import rank_zero_only  # Lightning sets its rank; importing it loads no torch

HEAD_START = 2.0
"""Seconds that rank 0 has to print an error that all ranks meet, before the other ranks exit."""


def rank() -> int:
    """The rank of this process in its run; 0 in a process that has not started others, and without Lightning."""
    return getattr(rank_zero_only, "rank", 0)


def leave_error_to_first_rank() -> bool:
    """Whether another process prints an error that is the same on all ranks: True on all ranks but the first.

    It waits `HEAD_START` there: a launcher ends all processes once one has failed, and rank 0 must have printed before.
    """
    if rank() == 0:
        return False
    time.sleep(HEAD_START)
    return True
