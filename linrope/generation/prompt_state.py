"""Prompt states: what a model has read, kept in memory, forked, and saved to a file.

A state file holds tensors and plain values only (it loads with `weights_only`), and identifies its model: the state of
one model is meaningless to another. A digest of all that it holds shows whether it was altered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.layers.state import ModelState, from_serialized, map_state, to_serialized
from linrope.utils.files import load_plain, require_new, whole_file
from linrope.utils.options import require_whole

FORMAT = "linrope state 2"


class CausalModel(Protocol):
    """What generation needs of a model: `LanguageModel` in evaluation mode (in training mode dropout applies)."""

    config: Any  # with `vocab_size` and `to_dict()`
    tokenizer: dict[str, str] | None  # serialized; None if unknown

    def __call__(
        self, tokens: Tensor, state: ModelState | None, ids: Tensor | None, *, return_state: bool, logits_to_keep: int
    ) -> tuple[Tensor, ModelState]: ...

    def state_bytes(self, context: int, dtype: torch.dtype) -> int: ...
    def parameters(self) -> Iterator[Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class PromptState:
    """A model's state after a prompt, and what sampling needs of it."""

    state: ModelState
    """The model's state after the last token."""
    logits: Tensor
    """(B, vocab_size), for the next token."""
    recent: Tensor
    """(B, R) int64, the last tokens read; -1 for padding."""

    def fork(self, n: int) -> PromptState:
        """Each row repeated `n` times, next to each other: B · n rows, to be continued in different ways."""
        require_whole("n", n)
        return self.select_rows(torch.arange(len(self.logits)).repeat_interleave(n))

    def select_rows(self, rows: Tensor | Sequence[int]) -> PromptState:
        """Row i of the result is row `rows[i]`: see `linrope.layers.state.ModelState.select_rows`."""
        state = self.state.select_rows(rows)
        rows = torch.as_tensor(rows)
        rows = rows if rows.dtype == torch.bool else rows.long()
        return PromptState(state, *(x[rows.to(x.device)] for x in (self.logits, self.recent)))

    @property
    def length(self) -> int:
        """Number of tokens read, in the longest row."""
        return self.state[0].past.length


def fingerprint(model: CausalModel) -> dict[str, Any]:
    """Identifies a model: its configuration, and the SHA-256 of its weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return {"config": model.config.to_dict(), "weights": digest.hexdigest()}


def digest_of(content: Any) -> str:
    """SHA-256 of nested dictionaries, lists, plain values and tensors on the CPU."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(f"{type(value).__name__} ".encode())
        if type(value) is Tensor and value.layout == torch.strided:
            digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, (dict, list, tuple)):
            parts = list(value.items()) if isinstance(value, dict) else value
            digest.update(f"{len(parts)}\n".encode())
            for part in parts:
                add(part)
        else:
            digest.update(f"{value!r}\n".encode())

    add(content)
    return digest.hexdigest()


def save_prompt_state(path: str | Path, model: CausalModel, state: PromptState) -> None:
    """Write a state to a file. An existing file is replaced as a whole, that of a link where the link leads to.

    Raises:
        InputError: the path is that of a folder, a device or a pipe, or lies in no folder.
    """
    target = require_new(Path(path), "path", overwrite=True)
    on_cpu = map_state(lambda _, x: x.cpu(), state.state)
    content = {
        "format": FORMAT,
        "model": fingerprint(model),
        "state": to_serialized(on_cpu),
        "logits": state.logits.cpu(),
        "recent": state.recent.cpu(),
    }
    content["digest"] = digest_of(content)
    with whole_file(target) as file:
        torch.save(content, file)


def load_prompt_state(path: str | Path, model: CausalModel) -> PromptState:
    """The state that `save_prompt_state` wrote with this model, on the model's device.

    Raises:
        InputError: the file is missing, damaged, altered or not a state file, or its state belongs to another model;
            the message says what differs.
    """
    content = load_plain(Path(path), "state file")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"state file {str(path)!r} is not in the format {FORMAT!r}: write it with --save_state.")
    if content.pop("digest", None) != digest_of(content):
        raise InputError(
            f"state file {str(path)!r} was altered after it was written: give it as it was, or read the prompt again."
        )
    if content["model"] != fingerprint(model):
        old, new = content["model"]["config"], model.config.to_dict()
        differing = [
            f"model.{key}: {old.get(key)!r} in the file, {new.get(key)!r} in this model"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
        raise InputError(
            f"state file {str(path)!r} belongs to another model: give the checkpoint that it was saved with, or read "
            "the prompt again.\n  " + ("\n  ".join(differing) or "the same configuration, but other weights")
        )
    device = next(model.parameters()).device
    state = from_serialized(content["state"], device)
    return PromptState(state, content["logits"].to(device), content["recent"].to(device))
