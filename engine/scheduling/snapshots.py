"""Snapshots of states: which steps make them, and which sequences begin with one.

A state can't be cut back to an earlier token. So where a chunk of a prompt ends at a block's border, the state is
copied to another slot, which the prefix cache knows by that block's digest: a later prompt with the same beginning
goes on there. The last chunk of a prompt is cut at its last border for this, so a repeated prompt computes a few tokens
only.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.kv.sides import SidePool
from kvrelay.engine.plan import SlotCopy

if TYPE_CHECKING:
    from kvrelay.engine.scheduling.planning import Row
    from kvrelay.engine.sequence import Sequence as EngineSequence


class Snapshot(NamedTuple):
    """A slot that the step in flight fills."""

    side: SidePool
    hold: Hold
    digest: bytes
    first: bytes
    """As for `Contents.add`."""
    handle: int
    """Number of the sequence whose state it is."""


class Snapshots:
    """Plans the copies of one scheduler's steps."""

    def __init__(self, prefix: PrefixIndex) -> None:
        self._prefix = prefix
        self._keeps = any(side.is_state for side in prefix.sides) and prefix.enabled
        """Whether snapshots are made."""
        self._coming: list[Snapshot] = []

    def end_of_chunk(self, start: int, end: int, last: int) -> int:
        """Where a chunk of tokens [start, end) of a sequence ends: if it computes the `last` one, at the border before
        that, unless no whole block is before it."""
        if not self._keeps or end < last:
            return end
        border = (last - 1) // self._prefix.block_size * self._prefix.block_size
        return border if border > start else end

    def plan(self, rows: "list[Row]") -> tuple[SlotCopy, ...]:
        """The copies of a step with these rows: of the snapshots that sequences begin with, and of those to be made."""
        copies = []
        for sequence, length, _ in rows:
            end = sequence.reach + length
            for number, own in enumerate(sequence.hold.sides):
                if not own.side.is_state:
                    continue
                slot = own.hold.blocks[0]
                if own.snapshot is not None:
                    copies.append(SlotCopy(number + 1, own.snapshot.blocks[0], slot, True))
                if self._keeps and length > 1 and not end % self._prefix.block_size:
                    copies += self._made(own.side, number + 1, sequence, end, slot)
        return tuple(copies)

    def settle(self, failed: set[int]) -> None:
        """Notes the snapshots of an ended step, but for the sequences with these handles, which failed."""
        for side, hold, digest, first, handle in self._coming:
            if handle not in failed:
                side.contents.add(digest, hold.blocks[0], hold.owner, first)
            hold.release()
        self._coming.clear()

    def _made(self, side: SidePool, group: int, sequence: "EngineSequence", end: int, slot: int) -> list[SlotCopy]:
        count, request = end // self._prefix.block_size, sequence.request
        chain = sequence.hold.chain
        while len(chain) < count:
            self._prefix.digest(sequence.tokens, request.tenant, len(chain), chain)
        if side.knows(chain[count - 1]):
            return []
        hold = side.pool.allocate(1, f"snapshot of {request}")
        if hold is None:
            return []
        self._coming.append(Snapshot(side, hold, chain[count - 1], chain[0], sequence.handle))
        return [SlotCopy(group, slot, hold.blocks[0], False)]
