"""Interface of a proposer, which guesses tokens for a speculating engine. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvrelay.engine.request import Request

if TYPE_CHECKING:
    from torch import Tensor


class Want(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    handle: int
    """The scheduler's number for the sequence."""
    request: Request
    tokens: Sequence[int]
    """Prompt and completion so far; the owner appends to it later, and changes nothing else. Not to be changed."""
    most: int
    """Largest number of tokens to guess, 1 or more."""


WARM_UP = Want(-1, Request("warm-up", 0, (0, 0), 2), (0, 0), 4)
"""A sequence that proposers warm up with."""


class Computed(NamedTuple):
    """Tokens of a sequence that a step computed, and that the sequence has."""

    handle: int
    tokens: Sequence[int]
    """Prompt and completion as in `Want.tokens`, with what the step yielded."""
    start: int
    """Position of the first token that was computed."""
    states: "Tensor"
    """[n, layers, hidden] of the n tokens: what `Proposer.layers` names. On the model's device, as a part of what
    the step has kept; in host memory of their own if another worker has computed them."""


class Proposer(Protocol):
    """Guesses how sequences continue. A wrong guess costs time and nothing else. Not thread-safe."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose inputs it guesses from; the number of layers stands for the last one's output.
        Empty if it guesses from tokens alone."""
        ...

    @property
    def last_state(self) -> bool:
        """Whether the proposer needs these inputs of the last computed token alone."""
        ...

    def warm_up(self) -> None:
        """Runs everything that would make the first guesses slow."""

    def observe(self, computed: Sequence[Computed]) -> bool:
        """Takes what a step has computed. Called for every step if it guesses from hidden states, and otherwise never;
        and when a sequence comes whose prompt another worker has computed, with the states that came along.

        Args:
            computed: of the sequences that go on; those of one sequence in order of their positions.

        Returns:
            Whether it has read a part of a prompt, which it would have done without a guess as well.
        """
        ...

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """Guesses how each sequence continues: perhaps by fewer tokens than asked for, perhaps by none."""
        ...

    def forget(self, handle: int) -> None:
        """Forgets a sequence, which has ended. Unknown handles are allowed."""
        ...
