"""What the engine knows of a constraint: which tokens may come next. The library behind it is in `compiler.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class ConstraintError(ValueError):
    """A constraint can't be obeyed; the text says why, in words for the user who asked for it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a completion must look like, as the request says it."""

    kind: ConstraintKind
    text: str
    """The schema, the regular expression or the grammar; of a choice, its texts as a JSON array; else empty."""


class Matcher(Protocol):
    """Follows one completion token by token. Its masks are computed on a thread of their own, beside the step."""

    def push(self, token: int) -> None:
        """Takes the next token of the completion, and begins to compute the mask of the one after it."""
        ...

    def mask(self) -> NDArray[np.int32]:
        """[ceil(V / 32)] bit i of word j: whether token 32 j + i may come next. Waits for it if need be.

        Raises:
            ConstraintError: a token isn't what the constraint allows, or the constraint became too costly to follow.
        """
        ...

    def after(self, token: int) -> "Matcher | None":
        """Another matcher, which has taken one token more; None if it may not come next. Waits for the mask."""
        ...


class Grammar(Protocol):
    """A compiled constraint; requests share it."""

    def matcher(self, tokens: Sequence[int]) -> Matcher:
        """A matcher that has followed a completion's first `tokens`."""
        ...
