"""Guesses by looking up earlier parts of the sequence itself."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.engine.speculate.base import Computed, Want

FACTOR = 2
"""Number of guessed tokens for each token of a suffix match."""
MOST_LINKS = 32
"""Number of suffixes of one place whose last occurrence is noted: the longest ones, which are those that are looked
up."""


class Index(Protocol):
    """Finds earlier occurrences of the end of one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the whole sequence, and adds its new tokens to the index."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses how the sequence goes on, up to `most` tokens; perhaps nothing."""
        ...


class LookupProposer:
    """Implements `Proposer` with an index of each sequence."""

    layers = ()
    last_state = False

    def __init__(self, new_index: Callable[[], Index]) -> None:
        self._new_index = new_index
        self._indexes: dict[int, Index] = {}

    def warm_up(self) -> None:
        """See `Proposer.warm_up`."""

    def observe(self, computed: Sequence[Computed]) -> bool:
        """See `Proposer.observe`."""
        return False

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        return [self._propose(want) for want in wants]

    def forget(self, handle: int) -> None:
        self._indexes.pop(handle, None)

    def _propose(self, want: Want) -> list[int]:
        index = self._indexes.get(want.handle)
        if index is None:
            index = self._indexes[want.handle] = self._new_index()
        index.extend(want.tokens)
        return index.guess(want.tokens, want.most)


class NgramIndex:
    """Where each n-gram of one sequence ended last. Grows with the sequence.

    What followed the last time that the sequence had the same few tokens is guessed (Saxena, Prompt Lookup Decoding,
    2023). That pays where the output repeats the prompt: edited code, summaries that quote, the question's names.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        """Index behind the last occurrence of each n-gram that a token follows, for each length."""
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that came since; the last one ends no n-gram yet, because nothing follows it."""
        for end in range(self._indexed + 1, len(tokens)):
            for length, ends in zip(self._lengths, self._ends, strict=True):
                if length <= end:
                    ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses what followed the last occurrence of the longest n-gram that ends `tokens`."""
        for length, ends in zip(self._lengths, self._ends, strict=True):
            end = ends.get(tuple(tokens[-length:]))
            if end is not None:
                return _copied(tokens, end, most)
        return []


class SuffixIndex:
    """The suffix automaton of one sequence (Blumer et al., 1985). Grows with it.

    The automaton has one state for each set of strings that end at the same places of a text. It grows with each token
    in constant time, amortized, and the suffix link of its newest state is the longest end of the text that occurs
    earlier. Each state keeps where its strings ended last. The longer the match, the more is guessed (Oliaro et al.,
    SuffixDecoding, 2024): long copies come in few steps, and chance matches cost little.
    """

    def __init__(self, shortest: int) -> None:
        """
        Args:
            shortest: tokens of a match that is worth a guess, at least.
        """
        self._shortest = shortest
        # Each state has transitions, a link, the length of its longest string, the index behind its last occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0
        self._count = 0
        self.match = 0, 0
        """Tokens of the longest end of the text that occurs earlier, and the index behind that occurrence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that came since."""
        for index in range(self._count, len(tokens)):
            self._push(tokens[index])
        self._count = len(tokens)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses what followed the longest end of `tokens` that occurs earlier."""
        length, end = self.match
        return [] if length < self._shortest else _copied(tokens, end, min(most, FACTOR * length))

    def _push(self, token: int) -> None:
        state, before = self._state({}, self._length[self._last] + 1), self._last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        self._link[state] = 0 if before < 0 else self._target(before, token)
        self._last = state
        end = self._length[state]
        link = self._link[state]
        self.match = self._length[link], self._end[link]
        self._end[state] = end
        for _ in range(MOST_LINKS):
            if link <= 0:
                break
            self._end[link] = end
            link = self._link[link]

    def _target(self, before: int, token: int) -> int:
        """The state behind `before` by `token`, whose longest string is no longer than needed: perhaps a new one."""
        target = self._next[before][token]
        if self._length[target] == self._length[before] + 1:
            return target
        clone = self._state(self._next[target].copy(), self._length[before] + 1)
        self._link[clone], self._end[clone] = self._link[target], self._end[target]
        self._link[target] = clone
        while before >= 0 and self._next[before].get(token) == target:
            self._next[before][token] = clone
            before = self._link[before]
        return clone

    def _state(self, transitions: dict[int, int], length: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._end.append(0)
        return len(self._next) - 1


def _copied(tokens: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from `begin` on; behind the end of `tokens` the copied tokens repeat."""
    period = len(tokens) - begin
    found = list(tokens[begin : begin + count])
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
