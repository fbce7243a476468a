"""Splits a model's reasoning, <think>...</think> at the beginning of its text, from its answer."""

from collections.abc import Sequence

from kvrelay.router.text.tools.marker import Marker

OPEN, CLOSE = "<think>", "</think>"


class Reasoning:
    """Splits the text of one completion, and counts the tokens of the first part."""

    def __init__(self, begun: bool, close_id: int | None) -> None:
        """
        Args:
            begun: whether the prompt has the opening tag already.
            close_id: the token that is the closing tag; None if several tokens are.
        """
        self.tokens = 0
        """Tokens of the reasoning so far, its tags included."""
        self._begun = begun
        self._inside = begun
        self._lead = ""
        """The beginning of the text, while it may become the opening tag."""
        self._close = Marker(CLOSE)
        self._close_id = close_id
        self._lead_tokens = 0
        """Tokens of the beginning of the text, while that may become the opening tag."""
        self._closed = False
        """Whether the token that is the closing tag has come. A search for stop strings may hold its text back."""
        self._fresh = True

    def push(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        """Adds text and its tokens; returns the parts of the text that are reasoning and answer."""
        self._count(token_ids)
        if not self._begun:
            return self._push_lead(self._lead + text)
        return self._push_inside(text) if self._inside else ("", self._answer(text))

    def finish(self) -> tuple[str, str]:
        """Ends the text: what was held back."""
        return (self._close.flush(), "") if self._inside else ("", self._lead)

    def _push_lead(self, text: str) -> tuple[str, str]:
        lead = text.lstrip()
        if lead.startswith(OPEN):
            self._begun, self._inside, self._lead = True, True, ""
            self.tokens = self._lead_tokens
            return self._push_inside(lead.removeprefix(OPEN))
        if OPEN.startswith(lead):
            self._lead = text
            return "", ""
        self._begun, self._lead, self._fresh = True, "", False
        return "", text

    def _push_inside(self, text: str) -> tuple[str, str]:
        before, after = self._close.push(text)
        if self._fresh:
            before = before.lstrip()
            self._fresh = not before
        if after is None:
            return before, ""
        self._inside, self._fresh = False, True
        return before, self._answer(after)

    def _answer(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._closed or (self._begun and not self._inside):
            return
        count = len(token_ids)
        if self._close_id in token_ids:
            self._closed, count = True, token_ids.index(self._close_id) + 1
        if self._begun:
            self.tokens += count
        else:
            self._lead_tokens += count
