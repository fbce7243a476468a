"""Guesses by prompt lookup: what followed the last time that the sequence had the same few tokens.

Source: Saxena, Prompt Lookup Decoding, 2023. It pays where the output repeats the prompt: edited code, summaries with
quotations, answers with the question's names.
"""

from collections.abc import Sequence

from kvrelay.engine.speculate.base import Want


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

    def find(self, tokens: Sequence[int]) -> int | None:
        """The index behind the last occurrence of the longest n-gram that ends `tokens`; None if there is none."""
        for length, ends in zip(self._lengths, self._ends, strict=True):
            end = ends.get(tuple(tokens[-length:]))
            if end is not None:
                return end
        return None


class NgramProposer:
    """Implements `Proposer`."""

    passes = False

    def __init__(self, shortest: int, longest: int) -> None:
        """
        Args:
            shortest, longest: tokens of the n-grams that are looked up.
        """
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[int, NgramIndex] = {}

    def warm_up(self) -> None:
        """See `Proposer.warm_up`."""

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        return [self._propose(want) for want in wants]

    def forget(self, handle: int) -> None:
        self._indexes.pop(handle, None)

    def _propose(self, want: Want) -> list[int]:
        index = self._indexes.get(want.handle)
        if index is None:
            index = self._indexes[want.handle] = NgramIndex(self._shortest, self._longest)
        index.extend(want.tokens)
        begin = index.find(want.tokens)
        return [] if begin is None else copied(want.tokens, begin, want.most)


def copied(tokens: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from `begin` on; behind the end of `tokens` what was copied is copied again: text that repeats."""
    period = len(tokens) - begin
    found = list(tokens[begin : begin + count])
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
