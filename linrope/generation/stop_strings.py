"""Stop strings: they end a text, also when they come in several pieces."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.errors import InputError


class StopStrings:
    """Passes text through up to the first stop string, which is not shown.

    Text that may be the beginning of a stop string is held back until more text decides. `found` is the stop string
    that ended the text, or None.

    Raises:
        InputError: an empty string.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        if "" in stop_strings:
            raise InputError("--stop='' is empty: it would end every text before its first character. Remove it.")
        self.stop_strings, self.found = tuple(stop_strings), None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that certainly comes before any stop string; "" after one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(text.find(stop), -len(stop), stop) for stop in self.stop_strings if stop in text]
        if places:  # the first; of two with the same beginning, the longer
            place, _, self.found = min(places)
            return text[:place]
        longest = max((len(stop) - 1 for stop in self.stop_strings), default=0)
        for kept in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[kept:]) for stop in self.stop_strings):
                self._held = text[kept:]
                return text[:kept]
        self._held = ""
        return text

    def finish(self, text: str = "") -> str:
        """The rest of the text, which ends with `text`: what was held back is shown unless a stop string was found."""
        shown = self.feed(text)
        held, self._held = ("" if self.found is not None else self._held), ""
        return shown + held
