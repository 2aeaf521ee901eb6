"""What the ranks of a run tell each other beside its collectives: configurations, progress, and errors."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.distributed import DistError, PrefixStore, TCPStore

from linrope.errors import RankLost

PATIENCE = 3.0
"""Seconds in which a rank that runs has another heartbeat, and in which all that wait for a lost rank have noticed."""
POLL = 0.05


class RankBoard:
    """Notes that every rank writes and reads, also while a collective hangs: a TCPStore of torch.distributed.

    It shares the server of the process group: rank 0 hosts it on the group's port, or torchrun does. So it is there
    before the process group, and torchrun's outlives all ranks.

    Args:
        environment: of the launcher; it knows the rank, the number of ranks, and the server's address.
        seconds: to wait for the server.

    Raises:
        DistError: the server does not answer.
    """

    def __init__(self, environment: ClusterEnvironment, rank: int, world_size: int, seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        # as torch.distributed's own rendezvous decides it
        of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.is_host = rank == 0 and not of_torchrun
        os.environ["MASTER_ADDR"] = environment.main_address  # as Lightning does for the process group
        os.environ["MASTER_PORT"] = str(environment.main_port)
        server = TCPStore(
            environment.main_address,
            environment.main_port,
            is_master=self.is_host,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # torchrun's server outlives a restart. That of rank 0 does not, and there the counts of machines may differ.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_torchrun else "0"
        self._store = PrefixStore(f"linrope/{attempt}", server)
        self.passed = 0
        """Places that this rank has passed."""
        self._place, self._beats = (0, "the start"), 0
        self.ended = threading.Event()
        """Set once this rank does not use the board any more."""
        self.found_failed: list[int] = []
        """What `failed` last found: the server may end before the error of a collective is explained."""
        self.launcher: Any = None  # Lightning's, if it has started the other ranks

    def write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of a key; None if no rank has written it."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def read_all(self, key: str) -> dict[int, Any]:
        """The values of `key/RANK`, by rank, of those that have written one."""
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        if self._store.check(keys):  # one question instead of one for each rank
            return dict(enumerate(map(json.loads, self._store.multi_get(keys))))
        values = enumerate(map(self.read, keys))
        return {rank: value for rank, value in values if value is not None}

    def wait_for(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """The values of `key/RANK` of all `ranks`. RankLost if one of them fails, or has not written in `seconds`."""
        waiting, found, until = list(ranks), {}, time.monotonic() + seconds
        while waiting:
            failed = self.failed()  # before: it may write, then fail
            if (value := self.read(f"{key}/{waiting[0]}")) is not None:
                found[waiting.pop(0)] = value
                continue
            if failed:
                raise RankLost(f"stopped, because {names(failed)} failed.")
            if time.monotonic() > until:
                missing = [rank for rank in waiting if self.read(f"{key}/{rank}") is None]
                raise RankLost(f"{names(missing)} did not start within {seconds:g} s.")
            time.sleep(POLL)
        return found

    def announce(self, text: str, own: bool) -> None:
        """Note that this rank ends with an error: its `own`, or that of a collective."""
        self._store.append("errors", json.dumps({"rank": self.rank, "text": text, "own": own}) + "\n")

    def errors(self) -> dict[int, dict[str, Any]]:
        """What the ranks have announced, by rank."""
        lines = self._store.get("errors").splitlines() if self._store.check(["errors"]) else []
        return {error["rank"]: error for error in map(json.loads, lines)}

    def failed(self) -> list[int]:
        """The ranks that have failed by themselves."""
        self.found_failed = [rank for rank, error in self.errors().items() if error["own"]]
        return self.found_failed

    def pass_by(self, step: int, place: str) -> None:
        """Note in memory where this rank is; its heartbeat tells the others."""
        self._place = (step, place)
        self.passed += 1

    def beat(self) -> None:
        """Tell the others that this rank runs, and where it is."""
        self._beats += 1
        self.write(f"beat/{self.rank}", [self._beats, self.passed, *self._place])

    def end(self) -> None:
        """End the heartbeat: this rank does not use the board any more."""
        self.ended.set()
        with suppress(DistError):
            self.write(f"ended/{self.rank}", True)

    def serve(self, seconds: float) -> None:
        """Wait until all ranks have ended, at most `seconds`, if this process has the server, which ends with it."""
        until = time.monotonic() + seconds
        while self.is_host and time.monotonic() < until and len(self.read_all("ended")) < self.world_size:
            time.sleep(POLL)

    def why_collective_failed(self, error: RuntimeError) -> RankLost:
        """Which ranks are to blame that a collective failed on this rank, as an error to raise.

        A rank that waited in vain announces that. Those that have announced nothing after `PATIENCE` are blamed: if
        they have no heartbeat they are lost, else the one that is furthest behind hangs.
        """
        try:
            return self._to_blame(error)
        except DistError:
            if self.found_failed:
                return RankLost(f"stopped, because {names(self.found_failed)} failed.", printed_by=0)
            return RankLost(f"rank 0 was lost: it was killed, or cannot be reached. {RESUME}", printed_by=None)

    def _to_blame(self, error: RuntimeError) -> RankLost:
        self.beat()
        self.announce(str(error), own=False)
        # Lightning's launcher of one machine ends all soon after it has seen the first one end: no time to wait.
        started = enumerate(getattr(self.launcher, "procs", ()), start=1)
        if ended := [rank for rank, process in started if (process.poll() or 0) < 0]:
            return RankLost(f"{_lost(ended)} {RESUME}", printed_by=0)
        before, until = self.read_all("beat"), time.monotonic() + PATIENCE
        while time.monotonic() < until:
            errors = self.errors()
            if failed := [rank for rank, one in errors.items() if one["own"]]:
                return RankLost(f"stopped, because {names(failed)} failed.", printed_by=0)
            if len(errors) == self.world_size:
                return RankLost(f"all ranks lost their connections: {error}", printed_by=0)
            time.sleep(POLL)
        after = self.read_all("beat")
        silent = [rank for rank in range(self.world_size) if rank not in errors]
        lost = [rank for rank in silent if before.get(rank, [0])[0] == after.get(rank, [0])[0]]
        if lost:
            text = _lost(lost)
        else:
            behind = furthest_behind({rank: after[rank] for rank in silent})
            text = f"{behind} did not come to a collective operation in time (trainer.strategy.timeout)."
        return RankLost(f"{text} {RESUME}", printed_by=min(errors))


def furthest_behind(beats: Mapping[int, list]) -> str:
    """The ranks that have passed the least places, and the last of them, in words."""
    least = min(passed for _, passed, _, _ in beats.values())
    ranks = [rank for rank, (_, passed, _, _) in beats.items() if passed == least]
    _, _, step, place = beats[ranks[0]]
    return f"{names(ranks)}, last seen after {place} of step {step},"


RESUME = "All ranks stop. Start the run again with --ckpt_path=last."


def _lost(ranks: list[int]) -> str:
    return f"{names(ranks)} {'was' if len(ranks) == 1 else 'were'} lost: killed, stopped, or not reachable."


def names(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5`."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective operation failed, and not this rank: gloo raises a plain RuntimeError."""
    return isinstance(error, DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))
