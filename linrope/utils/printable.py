"""Text of others on a terminal: generated text, names of files, messages that quote them."""

from __future__ import annotations

_BIDIRECTIONAL = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
"""Embeddings, overrides and isolates: they show text in another order than it has."""
_CONTROL_CHARACTERS = dict.fromkeys([*range(32), *range(127, 160), *_BIDIRECTIONAL], "�")
del _CONTROL_CHARACTERS[ord("\n")], _CONTROL_CHARACTERS[ord("\t")]


def printable(text: str) -> str:
    """The text with U+FFFD for characters that would steer a terminal or change the order of what it shows, and "?" for
    bytes that are not UTF-8."""
    return text.encode("utf-8", errors="replace").decode("utf-8").translate(_CONTROL_CHARACTERS)
