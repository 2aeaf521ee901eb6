"""Whether a checkpoint fits the run that is to start from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linrope.errors import InputError
from linrope.model import LanguageModelConfig


def require_same_model(checkpoint: dict[str, Any], config: LanguageModelConfig, path: str | Path) -> None:
    """Raises InputError, naming the fields that differ, where a checkpoint's model is not the one configured."""
    then = LanguageModelConfig.from_dict(checkpoint["linrope"]["config"])  # an older one lacks newer options
    saved, wanted = _flat(then.to_dict()), _flat(config.to_dict())
    differing = [
        f"model.{key}: {saved.get(key)!r} in the checkpoint, {wanted.get(key)!r} here"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]
    if not differing:
        return
    beside = Path(path).parent.parent / "config.yaml"
    mend = f"--config {beside}" if beside.is_file() else "--config with the YAML that trained it"
    raise InputError(
        f"checkpoint {str(path)!r} holds another model than the one configured; pass {mend}, or make these equal:\n  "
        + "\n  ".join(differing)
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
