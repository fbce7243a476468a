"""Guesses by looking up what the sequence itself had before."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.engine.speculate.base import NO_GUESS, Computed, Guess, Want

LONGEST = 32
"""Longer matches are of one kind."""


class Index(Protocol):
    """Finds in one sequence what its end repeats."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that came since, of the whole sequence."""

    def guess(self, tokens: Sequence[int], most: int) -> Guess:
        """What may follow the sequence, up to `most` tokens; perhaps nothing. Its kind is that of `copied`."""
        ...


class LookupProposer:
    """Implements `Proposer` with an index of each sequence."""

    passes = False
    kinds = LONGEST.bit_length() + 1
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

    def propose(self, wants: Sequence[Want]) -> list[Guess]:
        return [self._propose(want) for want in wants]

    def forget(self, handle: int) -> None:
        self._indexes.pop(handle, None)

    def _propose(self, want: Want) -> Guess:
        index = self._indexes.get(want.handle)
        if index is None:
            index = self._indexes[want.handle] = self._new_index()
        index.extend(want.tokens)
        return index.guess(want.tokens, want.most)


def copied(tokens: Sequence[int], begin: int, count: int) -> Guess:
    """`count` tokens from `begin` on; behind the end of `tokens` what was copied is copied again: text that repeats.

    The kind is the number of binary digits of the number of tokens that are alike before `begin` and at the end.
    """
    if count < 1:
        return NO_GUESS
    alike, most = 0, min(LONGEST, begin)
    while alike < most and tokens[begin - 1 - alike] == tokens[-1 - alike]:
        alike += 1
    period = len(tokens) - begin
    found = list(tokens[begin : begin + count])
    while len(found) < count:
        found.append(found[len(found) - period])
    return Guess(found, alike.bit_length())
