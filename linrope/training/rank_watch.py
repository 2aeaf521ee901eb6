"""The heartbeat of a rank, and what it does where collectives raise no error: NCCL's wait on the device, in silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import DistError

from linrope.training.rank_board import RankBoard, furthest_behind, names

BEAT = 1.0
"""Seconds between two heartbeats."""
WARN_AFTER = 0.8
"""Share of the timeout after which a rank that others wait for is named: NCCL ends the process at the timeout."""
GRACE = 30.0
"""Seconds that a rank has to end by itself after another one has failed."""


class RankWatch:
    """A thread that beats until the board ends, names a rank that hangs, and ends a rank that another one has left.

    Args:
        timeout: of collectives, in seconds.
        tell: prints a line; called in the thread.
        end: ends the process; called in the thread.
    """

    def __init__(self, board: RankBoard, timeout: float, tell: Callable[[str], None], end: Callable[[], None]) -> None:
        self.board, self.timeout, self.tell, self.end = board, timeout, tell, end
        self._passed, self._since, self._told = -1, time.monotonic(), False

    def start(self) -> None:
        self.board.beat()
        threading.Thread(target=self._run, daemon=True, name="linrope-rank-watch").start()

    def _run(self) -> None:
        reason, is_told = None, False
        while reason is None and not self.board.ended.wait(BEAT):
            try:
                self.board.beat()
                self._name_who_hangs()
                if failed := self.board.failed():
                    reason = f"stopped, because {names(failed)} failed."
                    is_told = self.board.rank > min({*range(self.board.world_size)} - {*failed}, default=0)
            except DistError:
                reason = "rank 0 was lost: it was killed, or cannot be reached."
        if reason is not None and not self.board.ended.wait(GRACE):
            if not is_told:  # by a lower rank
                self.tell(f"error: {reason}")
            self.end()

    def _name_who_hangs(self) -> None:
        """Print which rank the others wait for: once for each wait, and on the lowest rank that waits."""
        if self.board.passed != self._passed:
            self._passed, self._since, self._told = self.board.passed, time.monotonic(), False
        waited = time.monotonic() - self._since
        if self._told or waited < WARN_AFTER * self.timeout:
            return
        self._told = True
        beats = self.board.read_all("beat")
        least = min(passed for _, passed, _, _ in beats.values())
        waiting = [rank for rank, (_, passed, _, _) in beats.items() if passed > least]
        if waiting and min(waiting) == self.board.rank:
            self.tell(
                f"waiting for {waited:.0f} s for {furthest_behind(beats)} at most {self.timeout:g} s "
                "(trainer.strategy.timeout)."
            )
