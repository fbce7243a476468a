"""The sums and gathers of ranks that share layers.

A collective's calls are made by all ranks of a group in the same order, with tensors of the same shape. Parts are added
in order of their ranks, so that all ranks get the same bits, whatever carries them. No call waits for ever: where a
rank doesn't come within the timeout, `CollectiveError` ends the others too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvrelay.engine.degree import ONE, Degree

if TYPE_CHECKING:
    from torch import Tensor


class CollectiveError(RuntimeError):
    """A rank of the group is lost, or didn't come in time. The group can't be used any more."""


class Collective(Protocol):
    """One rank's end of a group."""

    @property
    def place(self) -> int:
        """This rank's number in the group, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def sum(self, part: "Tensor") -> "Tensor":
        """The sum of all ranks' parts, in `part` itself, which must be contiguous.

        Raises:
            CollectiveError: see there.
        """
        ...

    def gather(self, part: "Tensor") -> "Tensor":
        """[size, *part.shape] of all ranks' parts, in order of their ranks.

        Raises:
            CollectiveError: see there.
        """
        ...

    def check(self) -> None:
        """
        Raises:
            CollectiveError: a call has failed, or the group was aborted.
        """
        ...

    def abort(self) -> None:
        """Ends calls that wait, with `CollectiveError`, and all later ones. Any thread; may be called again."""
        ...


class Alone:
    """Implements `Collective` for a group of one."""

    place, size = 0, 1

    def sum(self, part: "Tensor") -> "Tensor":
        return part

    def gather(self, part: "Tensor") -> "Tensor":
        return part[None]

    def check(self) -> None:
        """Does nothing, because no call fails."""

    def abort(self) -> None:
        """Does nothing, because no call waits."""


NO_GROUP = Alone()


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank is among the ranks of its worker."""

    degree: Degree = ONE
    rank: int = 0
    group: Collective = NO_GROUP
    """Ranks of the same stage, which share its layers."""
    all: Collective = NO_GROUP
    """All ranks of the worker."""

    @property
    def stage(self) -> int:
        """Number of the pipeline stage."""
        return self.rank // self.degree.tensor


ALONE = Place()
"""The only rank of a worker."""
