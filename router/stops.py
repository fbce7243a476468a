"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first of several strings, and holds back whatever may yet turn out to be the beginning of one.

    A Knuth-Morris-Pratt automaton per string, so that a character costs O(1) however the text is cut into pieces. The
    match that ends first counts; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: non-empty strings.
        """
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Adds text; returns what may be shown, and whether a stop string ended in it.

        The text shown ends before the match; what comes after it is dropped. A match that ends while not `armed`
        doesn't count, and is shown.
        """
        if not self._stops:
            return text, False
        base = len(self._held)
        held = self._held + text
        for at, character in enumerate(text, start=base + 1):
            ended = self._advance(character)
            if ended and armed:
                self._held = ""
                return held[: at - ended], True
        keep = len(held) - max(self._matched)
        self._held = held[keep:]
        return held[:keep], False

    def flush(self) -> str:
        """Ends the text: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Takes every automaton one character on; the length of the longest string that ended here, 0 if none."""
        longest = 0
        for index, (stop, failure) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                longest = max(longest, matched)
                matched = failure[matched - 1]
            self._matched[index] = matched
        return longest


def _failure(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(stop)
    matched = 0
    for at in range(1, len(stop)):
        while matched and stop[matched] != stop[at]:
            matched = failure[matched - 1]
        if stop[matched] == stop[at]:
            matched += 1
        failure[at] = matched
    return failure
