"""The sums and gathers of ranks that share layers, and the messages from one pipeline stage to the next.

A collective's calls are made by all ranks of a group in the same order, with tensors of the same shape. Parts are added
in order of their ranks, so that all ranks get the same bits, whatever carries them. No call waits for ever: where a
rank doesn't come within the timeout, `CollectiveError` ends the others too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvrelay.engine.degree import ONE, Degree

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store


class CollectiveError(RuntimeError):
    """A rank of the group is lost, or didn't come in time. The group can't be used any more."""


class Ring(Protocol):
    """One rank's place among ranks that each send to one of them and receive from another, in order."""

    def send(self, rows: "Tensor") -> None:
        """Sends rows, which may be changed when this returns. Waits only while the ring is full (`Collective.ring`).

        Args:
            rows: [N, width]; the numbers of a row lie side by side.

        Raises:
            CollectiveError: the next rank doesn't take what was sent before, or is lost.
        """
        ...

    def receive(self, rows: "Tensor") -> None:
        """Fills rows, [N, width], with the oldest message that wasn't received.

        Raises:
            CollectiveError: none came, or one of another size.
        """
        ...

    def abort(self) -> None:
        """As `Collective.abort`, of the calls of both neighbours too."""
        ...


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

    def exchange(
        self, rows: "Tensor", sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> "tuple[Tensor, list[int]]":
        """Sends some rows to each rank, and receives those that each rank has sent to this one.

        Args:
            rows: [N, width], those for rank 0 first; contiguous.
            sent: [size] rows for each rank, N together.
            received: [size] rows from each rank, if they are known; all ranks know theirs, or none does.
            most: largest number of rows that may come, if they aren't known.

        Returns:
            [M, width] rows, those from rank 0 first, and [size] how many come from each rank.

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

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> Ring:
        """The place of this rank in a ring of this group. All of its ranks call this, with their own neighbours.

        Args:
            to, source: places of the rank that this one sends to, and of the one that it receives from.
            message_bytes: of the largest message.
            depth: messages that a rank may send before the next one has received the first of them.

        Raises:
            CollectiveError: a rank is lost.
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

    def exchange(
        self, rows: "Tensor", sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> "tuple[Tensor, list[int]]":
        return rows, list(sent)

    def check(self) -> None:
        """Does nothing, because no call fails."""

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> Ring:
        raise ValueError("a group of one rank has no ring")

    def abort(self) -> None:
        """Does nothing, because no call waits."""


NO_GROUP = Alone()


def all_agree(group: Collective, agrees: bool) -> bool:
    """Whether the condition holds on all ranks."""
    import torch

    return bool(group.gather(torch.tensor([agrees])).all())


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one rank among the ranks of its worker."""

    degree: Degree = ONE
    rank: int = 0
    group: Collective = NO_GROUP
    """Ranks of the same stage, which share its layers."""
    all: Collective = NO_GROUP
    """All ranks of the worker."""
    store: "Store | None" = None
    """Where the ranks have met; they may find each other there again."""
    one_machine: bool = True
    """Whether all ranks of `group` are on one machine."""

    @property
    def stage(self) -> int:
        """Number of the pipeline stage."""
        return self.rank // self.degree.tensor

    @property
    def is_last(self) -> bool:
        """Whether the rank is of the last pipeline stage."""
        return self.stage == self.degree.pipeline - 1

    def stages(self, message_bytes: int) -> Ring:
        """The ring of the ranks with the same part of each stage: from a stage to the next, and from the last one to
        the first. All ranks of the worker call it.

        Args:
            message_bytes: of the largest message.

        Raises:
            CollectiveError: a rank is lost.
        """
        ranks, tensor, steps = self.degree.ranks, self.degree.tensor, self.degree.pipeline - 1
        # The last stage must not wait for the first one, which launches so many steps before it receives a result.
        return self.all.ring((self.rank + tensor) % ranks, (self.rank - tensor) % ranks, message_bytes, steps)

    def smallest(self, number: int) -> int:
        """The smallest number that a rank of the worker has. All of its ranks call it.

        Raises:
            CollectiveError: a rank is lost.
        """
        import torch

        return int(self.all.gather(torch.tensor([number])).min())

    def abort(self) -> None:
        """Aborts all groups of the rank. Any thread."""
        self.group.abort()
        self.all.abort()


ALONE = Place()
"""The only rank of a worker."""
