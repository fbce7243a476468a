"""Constraints as the engine knows them: which tokens may come next. The library behind them is in `compiler.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

STEP_WAIT_SECONDS = 0.01
"""Longest time in seconds that a step waits for the masks of all its rows, once their logits are there."""


class ConstraintError(ValueError):
    """A constraint can't be obeyed; the text says why, in words for the user who asked for it."""


class MaskNotReadyError(Exception):
    """A mask isn't computed yet, so the row's token is chosen in a later step."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Form that a completion must have, as the request says it."""

    kind: ConstraintKind
    text: str
    """The schema, the regular expression or the grammar; of a choice, its texts as a JSON array; else empty."""


class Matcher(Protocol):
    """Follows one completion token by token. Its masks are computed in another process, beside the step."""

    def push(self, token: int) -> None:
        """Takes the next token of the completion, and begins to compute the mask of the one after it."""
        ...

    def ready(self, *, surely: bool = False) -> bool:
        """Whether the next step should have a row that needs the mask: it is there, or will be when the row's logits
        are. If not, the owner is woken once it is.

        Args:
            surely: the mask must be there; waits for it for a moment.
        """
        ...

    def mask(self, seconds: float = STEP_WAIT_SECONDS) -> NDArray[np.int32]:
        """[ceil(V / 32)] bit i of word j: whether token 32 j + i may come next. Waits for it for up to `seconds`.

        Raises:
            ConstraintError: a token isn't what the constraint allows, or following it has taken too much time.
            MaskNotReadyError: it isn't there yet.
        """
        ...

    def after(self, token: int) -> "Matcher | None":
        """A copy of the matcher that has followed one token more. None if the token isn't allowed next, or the mask
        isn't there."""
        ...


class Grammar(Protocol):
    """A compiled constraint; requests share it."""

    def matcher(self, tokens: Sequence[int]) -> Matcher:
        """A matcher that has followed a completion's first `tokens`."""
        ...
