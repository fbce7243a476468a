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


class Proposer(Protocol):
    """Guesses how sequences continue. A wrong guess costs time and nothing else. Not thread-safe."""

    @property
    def passes(self) -> bool:
        """Whether a further token of a guess takes time of its own, as a pass of a draft model does."""
        ...

    def warm_up(self) -> None:
        """Runs what would make the first guesses slow."""

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """A guess for each, perhaps shorter than asked for, or empty."""
        ...

    def forget(self, handle: int) -> None:
        """The sequence has ended. Unknown handles are allowed."""
        ...
