"""The rank of this process in a run of several processes."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_only


def rank() -> int:
    """The rank that Lightning has found; 0 where Lightning is not loaded."""
    return getattr(rank_zero_only, "rank", 0)
