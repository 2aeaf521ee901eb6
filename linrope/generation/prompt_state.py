"""What a model has read, as generation goes on from it: kept in memory, forked, and in a file.

A state file is tensors and plain values (`weights_only`), and names the model that it belongs to: the states of one
model mean nothing to another, and a mix-up would give wrong text, not an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.layers.state import ModelState, from_serialized, map_state, to_serialized
from linrope.utils.files import load_plain, whole_file

if TYPE_CHECKING:
    from linrope.models.language_model import LanguageModel


FORMAT = "linrope state 1"


@dataclass(frozen=True)
class PromptState:
    """What a model has read of each row.

    Attributes:
        state: the model's, after the last token.
        logits: (B, vocab_size) of the next token.
        recent: (B, R) int64, the last tokens that were read; -1 where a row began later.
    """

    state: ModelState
    logits: Tensor
    recent: Tensor

    def fork(self, n: int) -> PromptState:
        """Each row `n` times, one after another: (B · n) rows that may be continued differently."""
        if n < 1:
            raise InputError(f"n={n} must be at least 1: it is how often each row is there.")

        def repeated(_: str, x: Tensor) -> Tensor:
            return x.repeat_interleave(n, dim=0)

        return PromptState(map_state(repeated, self.state), repeated("", self.logits), repeated("", self.recent))

    @property
    def length(self) -> int:
        """Tokens read, by the longest row."""
        return self.state[0].past.length


def fingerprint(model: LanguageModel) -> dict[str, Any]:
    """What tells a model from others: its configuration, and the SHA-256 of its weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return {"config": model.config.to_dict(), "weights": digest.hexdigest()}


def save_prompt_state(path: str | Path, model: LanguageModel, context: PromptState) -> None:
    """Write a context to a file, whole or not at all; a file that is there is replaced."""
    on_cpu = map_state(lambda _, x: x.cpu(), context.state)
    content = {
        "format": FORMAT,
        "model": fingerprint(model),
        "state": to_serialized(on_cpu),
        "logits": context.logits.cpu(),
        "recent": context.recent.cpu(),
    }
    with whole_file(Path(path)) as file:
        torch.save(content, file)


def load_prompt_state(path: str | Path, model: LanguageModel) -> PromptState:
    """The context in a file that `save_prompt_state` wrote with this model, on the model's device.

    Raises:
        InputError: no such file, a damaged one, something else, or the state of another model, with what differs.
    """
    content = load_plain(Path(path), "state file")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"state file {str(path)!r} is none of this version ({FORMAT}): save it with --save_state.")
    saved = content["model"]
    saved["config"] = model.config.from_dict(saved["config"]).to_dict()  # files do not know of options that came later
    _require_same(saved, fingerprint(model), path)
    device = next(model.parameters()).device
    state = from_serialized(content["state"], device)
    return PromptState(state, content["logits"].to(device), content["recent"].to(device))


def _require_same(saved: dict[str, Any], ours: dict[str, Any], path: str | Path) -> None:
    if saved == ours:
        return
    then, now = saved["config"], ours["config"]
    differing = [
        f"model.{key}: {then.get(key)!r} in the file, {now.get(key)!r} here"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    what = "\n  ".join(differing) or "the same configuration, but other weights"
    raise InputError(
        f"state file {str(path)!r} is of another model, whose states mean nothing to this one: give the checkpoint "
        f"that it was saved with, or read the prompt again.\n  {what}"
    )
