"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first of several strings; holds back the end of the text that may be the beginning of one.

    The match that ends first counts; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: non-empty strings.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Adds text; returns the text to show, and whether a stop string ended in `text`.

        The text to show ends before the match; the rest is dropped. A match that ends while not `armed` is ordinary
        text.
        """
        seen = len(self._held)
        text = self._held + text
        if armed:
            matches = [
                (at + len(stop), at)
                for stop in self._stops
                if (at := text.find(stop, max(0, seen - len(stop) + 1))) >= 0  # ends after what was seen before
            ]
            if matches:
                self._held = ""
                return text[: min(matches)[1]], True
        keep = max(0, len(text) - self._longest + 1)
        while keep < len(text) and not self._may_begin(text[keep:]):
            keep += 1
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """Ends the text: returns what was held back, which is no stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        """Whether more text could complete `text` to a stop string."""
        return any(stop.startswith(text) and stop != text for stop in self._stops)
