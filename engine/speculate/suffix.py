"""Guesses by the longest match: what followed the longest end of the sequence that it had before.

A suffix automaton (Blumer et al., 1985) has one state for each set of strings that end at the same places of a text. It
grows with each token in constant time, amortized, and the suffix link of its newest state is the longest end of the
text that occurs earlier. Each state keeps where its strings ended last.

The longer the match, the more is guessed: FACTOR tokens for each of its own (Oliaro et al., SuffixDecoding, 2024). So
long copies come in few steps, and chance matches cost little.
"""

from collections.abc import Sequence

from kvrelay.engine.speculate.base import NO_GUESS, Guess
from kvrelay.engine.speculate.lookup import copied

FACTOR = 2
MOST_LINKS = 32
"""Suffixes of one place whose last occurrence is noted: the longest ones, which are those that are looked up."""


class SuffixIndex:
    """The suffix automaton of one sequence. Grows with it."""

    def __init__(self, shortest: int) -> None:
        """
        Args:
            shortest: tokens of a match that is worth a guess, at least.
        """
        self._shortest = shortest
        # Of each state: transitions, link, length of its longest string, index behind its last occurrence.
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

    def guess(self, tokens: Sequence[int], most: int) -> Guess:
        """See `Index.guess`."""
        length, end = self.match
        return NO_GUESS if length < self._shortest else copied(tokens, end, min(most, FACTOR * length))

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
