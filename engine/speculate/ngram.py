"""Guesses by prompt lookup: what followed the last time that the sequence had the same few tokens.

Source: Saxena, Prompt Lookup Decoding, 2023. It pays where the output repeats the prompt: edited code, summaries with
quotations, answers with the question's names.
"""

from collections.abc import Sequence

from kvrelay.engine.speculate.base import NO_GUESS, Guess
from kvrelay.engine.speculate.lookup import copied


class NgramIndex:
    """Where each n-gram of one sequence ended last. Grows with the sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        """For each length: by n-gram, the index behind its last occurrence that a token follows."""
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that came since; the last one ends no n-gram yet, because nothing follows it."""
        for end in range(self._indexed + 1, len(tokens)):
            for length, ends in zip(self._lengths, self._ends, strict=True):
                if length <= end:
                    ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def guess(self, tokens: Sequence[int], most: int) -> Guess:
        """See `Index.guess`."""
        begin = self.find(tokens)
        return NO_GUESS if begin is None else copied(tokens, begin, most)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The index behind the last occurrence of the longest n-gram that ends `tokens`; None if there is none."""
        for length, ends in zip(self._lengths, self._ends, strict=True):
            end = ends.get(tuple(tokens[-length:]))
            if end is not None:
                return end
        return None
