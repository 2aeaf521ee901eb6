"""How the folder of a sharded checkpoint is known: see `linrope.models.sharded_checkpoint`, which reads one."""

from __future__ import annotations

from pathlib import Path

META_FILE, INDEX_FILE = "meta.pt", ".metadata"


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path leads to the folder of a sharded checkpoint."""
    return Path(path, META_FILE).is_file() and Path(path, INDEX_FILE).is_file()
