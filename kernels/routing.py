"""The routing of a step's rows to experts. No torch."""

from dataclasses import dataclass
from enum import IntEnum


class Scoring(IntEnum):
    """How a router's logits become scores; `Scoring` in native/experts.h."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_CHOSEN = 2
    """Experts are chosen by their logits, and the softmax is over the chosen ones."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Options of the choice of each row's experts; see `reference.route`."""

    experts: int
    top: int
    """Number of experts of each row."""
    scoring: Scoring = Scoring.SOFTMAX
    normalized: bool = True
    """Whether shares are divided by their sum."""
    least: float = 0.0
    """Number that is added to the sum of shares before they are divided by it."""
    scale: float = 1.0
    """Factor of shares."""
    groups: int = 1
    """Number of groups of consecutive experts, of which only the best ones' are chosen."""
    top_groups: int = 1
    group_best: int = 2
    """Number of a group's largest scores whose sum is the group's: 1 or 2."""
