"""What a speculating engine needs of whatever guesses its tokens. No torch."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvrelay.engine.request import Request


class Want(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    handle: int
    """The scheduler's number for the sequence."""
    request: Request
    tokens: Sequence[int]
    """Prompt and completion so far; the owner appends to it later, and changes nothing else. Not to be changed."""
    most: int
    """How many tokens to guess at most, 1 or more."""


class Guess(NamedTuple):
    """How a sequence may continue."""

    tokens: list[int]
    """Perhaps none."""
    kind: int = 0
    """Guesses of one kind come true about equally often; from 0, less than the proposer's `kinds`."""


NO_GUESS = Guess([])


class Proposer(Protocol):
    """Guesses how sequences continue. A wrong guess costs time and nothing else. Not thread-safe."""

    @property
    def passes(self) -> bool:
        """Whether a further token of a guess takes time of its own, as a pass of a draft model does."""
        ...

    @property
    def kinds(self) -> int:
        """How many kinds of guesses it makes, 1 or more."""
        ...

    def warm_up(self) -> None:
        """Runs what would make the first guesses slow."""

    def propose(self, wants: Sequence[Want]) -> list[Guess]:
        """A guess for each, perhaps shorter than asked for."""
        ...

    def forget(self, handle: int) -> None:
        """The sequence has ended. Unknown handles are allowed."""
        ...
