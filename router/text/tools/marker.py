"""Finds a marker in a text that comes in pieces."""


class Marker:
    """Searches for one string; holds back the end of the text that may be its beginning, and the space before it."""

    def __init__(self, marker: str) -> None:
        self.space = ""
        """White space before the marker that was found last, which `push` leaves out."""
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
            The text before the marker, and the text behind it; None if the marker isn't there yet.
        """
        text = self._held + text
        before, found, after = text.partition(self._marker)
        if found:
            self._held, kept = "", before.rstrip()
            self.space = before[len(kept) :]
            return kept, after
        keep = len(text) - self._beginning(text)
        keep = len(text[:keep].rstrip())
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of the marker."""
        longest = min(len(text), len(self._marker) - 1)
        return next((size for size in range(longest, 0, -1) if self._marker.startswith(text[-size:])), 0)
