"""Strings that end a text, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from linrope.errors import InputError


class StopStrings:
    """Passes text on up to the first of the strings that ends it, which is left out.

    What may be the beginning of one is held back until more text decides, so that nothing is shown that has to be
    taken back. `found` is the string that ended the text, or None.

    Raises:
        InputError: an empty string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise InputError("--stop='' is empty, and would end every text at once: leave it out.")
        self.stops, self.found = tuple(stops), None
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far is certain to come before any stop; nothing once one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(text.find(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if places:  # of two that begin at one place, the longer
            place, _, self.found = min(places)
            return text[:place]
        kept = len(text) - self._begun(text)
        self._held = text[kept:]
        return text[:kept]

    def _begun(self, text: str) -> int:
        """How many characters at the end of the text some stop begins with."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def finish(self, text: str = "") -> str:
        """What was held back, where the text ends (with `text`) and no stop was completed."""
        shown = self.feed(text)
        held, self._held = ("" if self.found is not None else self._held), ""
        return shown + held
