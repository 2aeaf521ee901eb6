"""Snapshots on disk: what the prefix cache has no room for in memory, and what it holds when the server ends.

A file holds the state after one prefix, and is named by the number of tokens of the prefix and their SHA-256: the
tokens themselves are not stored, and no file is opened to find the longest prefix. Files hold tensors and plain values
only (they load with `weights_only`), and a digest of all that they hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linrope.errors import InputError
from linrope.generation.prompt_state import digest_of, fingerprint
from linrope.layers.state import from_serialized, map_state, to_serialized
from linrope.models.language_model import LanguageModel
from linrope.serving.prefix_cache import TOKEN, Snapshot
from linrope.utils.files import claim, load_plain, remove_partial_files, require_writable, whole_file

FORMAT = "linrope prefix cache 1"
MODEL_FILE, LOCK_FILE = "model.json", "lock"
NAME = re.compile(r"(\d+)-([0-9a-f]{64})(-end)?\.state")
"""Length and SHA-256 of a prefix; -end where the file has the logits of the next token."""
MOST_PENDING = 256 * 2**20
"""Bytes of snapshots that wait to be written; more are dropped, or memory would fill where the disk is slow."""


@dataclass(eq=False)
class _Stored:
    """A file of the folder."""

    name: str
    n_bytes: int
    has_logits: bool
    writing: Future | None = None


class SnapshotFolder:
    """Snapshots of one model in a folder, at most `max_bytes` of them; the least recently used go first.

    Files are written by a thread of its own. `report` is told in words what goes wrong with a file.

    Raises:
        InputError: a folder that cannot be written, holds something else or the states of another model, or is used by
            another server.
    """

    def __init__(
        self, folder: Path, max_bytes: int, model: LanguageModel, report: Callable[[str], object] = print
    ) -> None:
        self.folder, self.max_bytes, self.report = folder, max_bytes, report
        self.device = model.embedding.weight.device
        require_writable(folder, "--cache_folder")
        _require_own(folder, {"format": FORMAT, **fingerprint(model)})
        self._lock = open(folder / LOCK_FILE, "a")  # noqa: SIM115 (held until `close`)
        if not claim(self._lock):
            self._lock.close()
            raise InputError(f"--cache_folder={str(folder)!r} is used by another server: give each its own.")
        remove_partial_files(folder)
        self._guard = threading.RLock()  # of the next three, whose sizes the writer corrects
        self._files: OrderedDict[tuple[int, str], _Stored] = OrderedDict()  # the last used at the end
        self._lengths: dict[int, int] = {}  # number of files of each length
        self.n_bytes = 0
        self._failed: deque[_Stored] = deque()  # what could not be written
        self._pending = 0  # bytes, with the lock of _written
        self._written = threading.Condition()
        self._writer = ThreadPoolExecutor(1, "linrope cache writer")
        for name, status in sorted(_states_in(folder), key=lambda found: found[1].st_mtime_ns):
            self._add(_key_of(name), _Stored(name, status.st_size, name.endswith("-end.state")))

    def __len__(self) -> int:
        """Number of snapshots."""
        return len(self._files)

    def longest(self, tokens: np.ndarray, beyond: int) -> tuple[int, Snapshot] | None:
        """The longest prefix of `tokens` with a snapshot, if it has more than `beyond` tokens; that of all tokens only
        if it has logits."""
        self._forget_failed()
        known = [n for n in sorted(self._lengths) if beyond < n <= len(tokens)]
        for length, digest in reversed(list(zip(known, _digests(tokens, known)))):
            stored = self._files.get((length, digest))
            if stored is None or not (stored.has_logits or length < len(tokens)):
                continue
            if (snapshot := self._read((length, digest), stored)) is not None:
                return length, snapshot
        return None

    def put(self, tokens: np.ndarray, snapshot: Snapshot, wait: bool = False) -> None:
        """Write a snapshot, unless the folder has it, or too many wait to be written: `wait` waits for these."""
        self._forget_failed()
        (digest,) = _digests(tokens, [len(tokens)])
        key, has_logits = (len(tokens), digest), snapshot.logits is not None
        known = self._files.get(key)
        if known is not None and known.has_logits >= has_logits:
            self._mark_used(key)
            return
        if snapshot.n_bytes > self.max_bytes or not self._takes(snapshot.n_bytes, wait):
            return
        if known is not None:
            self._remove(key)
        name = f"{len(tokens)}-{digest}{'-end' if has_logits else ''}.state"
        stored = _Stored(name, snapshot.n_bytes, has_logits)
        self._add(key, stored)
        stored.writing = self._writer.submit(self._write, stored, snapshot)

    def _takes(self, n_bytes: int, wait: bool) -> bool:
        """Whether so many bytes may wait to be written beside those that do; a snapshot alone always may."""

        def has_room() -> bool:
            return not self._pending or self._pending + n_bytes <= MOST_PENDING

        with self._written:
            if wait:
                self._written.wait_for(has_room)
            elif not has_room():
                return False
            self._pending += n_bytes
            return True

    def close(self) -> None:
        """Wait until all is written, and let others use the folder."""
        self._writer.shutdown()
        self._trim()  # by the sizes that the files have come to
        self._lock.close()

    def _add(self, key: tuple[int, str], stored: _Stored) -> None:
        with self._guard:
            self._files[key] = stored
            self._lengths[key[0]] = self._lengths.get(key[0], 0) + 1
            self.n_bytes += stored.n_bytes
        self._trim()

    def _mark_used(self, key: tuple[int, str]) -> None:
        """Also for the next server, by the thread that writes, so that files have the times of their order of use."""
        self._files.move_to_end(key)
        self._writer.submit(_set_time, self.folder / self._files[key].name)

    def _forget_failed(self) -> None:
        while self._failed:
            stored = self._failed.popleft()
            if self._files.get(_key_of(stored.name)) is stored:
                self._remove(_key_of(stored.name))

    def _trim(self) -> None:
        while self.n_bytes > self.max_bytes:
            self._remove(next(iter(self._files)))

    def _remove(self, key: tuple[int, str]) -> None:
        with self._guard:
            stored = self._files.pop(key)
            self.n_bytes -= stored.n_bytes
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]
        path = self.folder / stored.name
        if stored.writing is None or stored.writing.done():
            path.unlink(missing_ok=True)
        else:  # after it was written, by the same thread
            self._writer.submit(path.unlink, missing_ok=True)

    def _write(self, stored: _Stored, snapshot: Snapshot) -> None:
        """Write a file as a whole. It need not outlive a crash of the machine: a damaged one is found by its digest."""
        name = stored.name
        partial = self.folder / f"{name}.{secrets.token_hex(4)}.partial"
        try:
            on_cpu = map_state(lambda _, x: x.cpu(), snapshot.state)
            logits = None if snapshot.logits is None else snapshot.logits.cpu()
            content = {"format": FORMAT, "name": name, "state": to_serialized(on_cpu), "logits": logits}
            content["digest"] = digest_of(content)
            torch.save(content, partial)
            _set_time(partial)
            size = partial.stat().st_size
            partial.replace(self.folder / name)
            with self._guard:
                if self._files.get(_key_of(name)) is stored:
                    self.n_bytes += size - stored.n_bytes
                stored.n_bytes = size
        except (OSError, RuntimeError) as error:  # torch has RuntimeError for a full disk
            with suppress(OSError):
                partial.unlink()
            self._failed.append(stored)
            self.report(f"the prefix cache could not write {partial}: {error}")
        finally:
            with self._written:
                self._pending -= snapshot.n_bytes
                self._written.notify_all()

    def _read(self, key: tuple[int, str], stored: _Stored) -> Snapshot | None:
        """The snapshot of a file; None, and it is removed, if it cannot be read."""
        path = self.folder / stored.name
        if stored.writing is not None:
            stored.writing.result()
        try:
            content = load_plain(path, "snapshot", name_others=False)
            if not isinstance(content, dict) or content.pop("digest", None) != digest_of(content):
                raise InputError(f"snapshot {str(path)!r} was altered after it was written.")
            if (content["format"], content["name"]) != (FORMAT, stored.name):
                raise InputError(f"snapshot {str(path)!r} was renamed.")
            state = from_serialized(content["state"])
        except InputError as error:
            self.report(f"{error} It is removed, and its prompt is read again.")
            self._remove(key)
            return None
        self._mark_used(key)
        state = map_state(lambda _, x: x.clone().to(self.device), state)  # not mapped from the file
        logits = content["logits"]
        return Snapshot(state, None if logits is None else logits.clone().to(self.device))


def _set_time(path: Path) -> None:
    """Now, in nanoseconds: the system itself counts the times of files in milliseconds."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _key_of(name: str) -> tuple[int, str]:
    """Length and SHA-256 of the prefix of a file."""
    length, digest, _ = NAME.fullmatch(name).groups()
    return int(length), digest


def _states_in(folder: Path) -> list[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.stat()) for entry in entries if NAME.fullmatch(entry.name) and entry.is_file()]


def _digests(tokens: np.ndarray, lengths: list[int]) -> list[str]:
    """The SHA-256 of the first n tokens for each n of growing lengths."""
    tokens = np.ascontiguousarray(tokens, dtype=TOKEN)
    digest, start, found = hashlib.sha256(), 0, []
    for n in lengths:
        digest.update(tokens[start:n].tobytes())
        start = n
        found.append(digest.copy().hexdigest())
    return found


def _require_own(folder: Path, mine: dict[str, Any]) -> None:
    """Make the folder one of this model, if it is new or empty. InputError if it is something else."""
    file = folder / MODEL_FILE
    if file.is_file():
        try:
            theirs = json.loads(file.read_text())
        except ValueError as error:
            raise InputError(
                f"--cache_folder={str(folder)!r}: its {MODEL_FILE} is damaged, so that no one can tell whose states "
                "these are: remove the folder, or give another."
            ) from error
        if theirs != json.loads(json.dumps(mine)):
            raise InputError(
                f"--cache_folder={str(folder)!r} holds the states of another model, which mean nothing to this one: "
                "give each model a folder of its own, or remove it."
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--cache_folder={str(folder)!r} holds something else: give a new or an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as opened:
        opened.write(json.dumps(mine, indent=2).encode())
