"""The hidden states that a prefill worker holds for the proposers of decode workers. No torch.

They lie in host memory from the step that computed them until their attempt is over, so that the next link can send
them again if one is lost. What doesn't fit into `transfer.states_bytes` is dropped, and the states of the prompt begin
behind it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class StatesRoom:
    """Host memory for the hidden states at one end of all its hand-offs."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self._limit = limit
        self.used = 0
        """Bytes in use."""

    def take(self, nbytes: int) -> bool:
        """Counts so many bytes more; False, and nothing is counted, if the limit doesn't allow it."""
        if self.used + nbytes > self._limit:
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Counts so many bytes less."""
        self.used -= nbytes


class SentStates:
    """The hidden states of one prompt, as far as they are known: of its tokens [first, end)."""

    def __init__(self, room: StatesRoom) -> None:
        self._room = room
        self._parts: list[tuple[int, Any]] = []
        self.first = self.end = 0

    def add(self, first: int, states: "Tensor") -> None:
        """Takes the states of the tokens from `first` on, [n, layers, hidden].

        A preempted sequence computes tokens again, or finds them in the prefix cache: what is known stays, and behind a
        gap the states begin anew.
        """
        known = self.end - first
        if known >= len(states):
            return
        if known < 0:
            self.clear(first)
        elif known:
            states = states[known:]
        if self._room.take(states.nbytes):
            self._parts.append((self.end, states))
            self.end += len(states)
        else:
            self.clear(self.end + len(states))

    def slices(self, first: int, count: int) -> list[Any]:
        """The states of the tokens [first, first + count), all of which are known, in one or several pieces."""
        found = []
        for start, states in self._parts:
            begin, end = max(first, start), min(first + count, start + len(states))
            if begin < end:
                found.append(states[begin - start : end - start])
        return found

    def clear(self, first: int = 0) -> None:
        """Gives all states up, and begins anew with the token `first`."""
        self._room.give(sum([states.nbytes for _, states in self._parts]))
        self._parts = []
        self.first = self.end = first
