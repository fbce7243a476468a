"""Blocks of the layer groups behind the first: those of windows, and the slots of states.

The first group's blocks count a sequence's tokens. Each further group has a pool of its own, of which a sequence's hold
has a `SideHold`:

    window   the blocks of the last tokens. It grows with the steps, and what falls out of the window is given up: it is
             cached then, as it is a part of a prefix that another sequence may go on behind
    state    one slot, from the sequence's start to its end. A snapshot of it is a slot of its own that is only cached,
             under the digest of the block at whose end it was made. At the sequence's end, its own slot becomes one

    prompt   |  block 0  |  block 1  |  block 2  |  block 3  |
    full        held        held        held        held
    window      cached      cached      held        held          a window of 1.5 blocks
    state                   snapshot                snapshot      behind chunks of two blocks, and a slot
"""

from collections.abc import Sequence
from itertools import takewhile

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.contents import Contents, Match
from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.machine.options import AUTO, require


def side_blocks(group: LayerGroup, options: EngineConfig) -> int:
    """Blocks, or slots, of a group that are enough for all sequences that an engine may have at a time, and their next
    steps: those that run, and as many that wait for their KV or are sent.

    Raises:
        ValueError: an option that it depends on is still `auto`.
    """
    for name in ("block_size", "max_batch_tokens", "max_sequences"):
        require(getattr(options, name) != AUTO, name, "auto", "a number, as `EngineConfig.on` makes it")
    sequences = 2 * options.max_sequences + 2
    if group.kind == "state":
        return 2 * sequences
    each = -(-group.window // options.block_size) + 2
    return sequences * each + 2 * -(-options.max_batch_tokens // options.block_size)


def blocks_without_kv(options: EngineConfig, max_context: int, windows: Sequence[tuple[int, int]] = ()) -> int:
    """Blocks of a first group that keeps nothing, which take no memory: enough for all sequences that windows have
    blocks for.

    Args:
        windows: (window in tokens, blocks) of each window group.
    """
    sequences = 2 * options.max_sequences + 2
    for window, blocks in windows:
        sequences = min(sequences, blocks // -(-window // options.block_size) + 1)
    return sequences * -(-max_context // options.block_size)


class SidePool:
    """The blocks, or slots, of one group, and which of them have known content. Not thread-safe."""

    def __init__(self, group: LayerGroup, num_blocks: int, block_size: int, spare: int = 0) -> None:
        """
        Args:
            block_size: tokens of a block of the first group.
            spare: slots, the last ones, that no sequence holds.
        """
        self.group = group
        self.block_size = block_size
        self.pool = BlockPool(num_blocks - spare)
        self.spare = range(num_blocks - spare, num_blocks)
        """Slots for the states behind guessed tokens, one a token, until the step has ended."""
        self.contents = Contents(self.pool)
        self.live: set[SideHold] = set()
        """Blocks that sequences and reservations have of a window, until they release them."""

    @property
    def is_state(self) -> bool:
        return self.group.kind == "state"

    def first_needed(self, count: int) -> int:
        """The first logical block that a token behind `count` whole blocks needs; for a state, the last of them, at
        whose end its snapshot is."""
        if self.is_state:
            return count - 1
        return self.group.first_needed(count * self.block_size) // self.block_size

    def knows(self, digest: bytes) -> bool:
        """Whether the group has the content of this logical block, or the state at its end."""
        return self.contents.get(digest) is not None

    def can_begin(self, blocks: int) -> bool:
        """Whether a sequence of so many logical blocks can begin, and all that are here find theirs. Blocks of its
        prefix that are cached now count as available until it has them."""
        if self.is_state:
            return self.pool.available >= 2
        lacking = sum([max(0, min(own.wanted, self.most) - len(own.hold.blocks)) for own in self.live])
        return self.pool.available >= min(blocks, self.most) + lacking

    def goes_on(self, chain: Sequence[bytes], match: Match) -> bool:
        """Whether a sequence can take over what this group has of a partly filled block behind blocks with these
        digests. A state can't be cut back, so it must be that at the end of all tokens of the block."""
        if self.contents.unheld(match.digest) is None:
            return False
        return match.whole if self.is_state else all(map(self.knows, chain[self._first_behind(chain, match) :]))

    def begin(self, chain: Sequence[bytes], imports: int | None, blocks: int, match: Match | None = None) -> "SideHold":
        """Blocks that a sequence begins with behind a known prefix.

        Args:
            chain: digests of the prefix's blocks, all of which are known; of imported ones, the first group knows them.
            imports: as for `PrefixIndex.allocate`.
            blocks: number of the sequence's logical blocks.
            match: partly filled block behind them that the sequence takes over, of which `goes_on` is true.

        Raises:
            IntegrityError: they aren't, or there is no room, though `can_begin` said so.
        """
        if self.is_state:
            if match is not None:
                slot = self.pool.share((), "a new hold")
                self.contents.take_over(slot, match.digest)
                return SideHold(self, slot, 0)
            snapshot = None
            if chain and imports is None:
                # First, because a slot is evicted to make room for the sequence's own.
                snapshot = self.pool.share(self._known(chain[-1:]), "a new hold")
            fresh = self.pool.allocate(1, "a new hold")
            if fresh is None:
                raise IntegrityError("the pool of states has no slot, as it said")
            return SideHold(self, fresh, 0, snapshot)
        if imports is not None:
            first = self.group.first_needed(imports) // self.block_size
            known = list(takewhile(self.knows, chain[first:]))
            hold = self.pool.share(self._known(known), "a new hold")
            if not hold.extend(imports // self.block_size + 1 - first - len(known)):
                raise IntegrityError("the pool of a window has too few blocks, unlike what it said")
            # The sender's blocks may be smaller, and begin inside of the first one.
            own = SideHold(self, hold, first, complete=first + (first > 0))
            own.known = first + len(known)
        else:
            first = self._first_behind(chain, match)
            own = SideHold(self, self.pool.share(self._known(chain[first:]), "a new hold"), first)
            if match is not None:
                self.contents.take_over(own.hold, match.digest)
        own.wanted = blocks
        self.live.add(own)
        return own

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is in one state, and the index agrees."""
        self.pool.check_integrity()
        self.contents.check_integrity()

    def _first_behind(self, chain: Sequence[bytes], match: Match | None) -> int:
        """The first logical block of a window that a token behind these blocks, and a partly filled one, needs."""
        tokens = len(chain) * self.block_size + (0 if match is None else match.tokens)
        return self.group.first_needed(tokens) // self.block_size

    def _known(self, digests: Sequence[bytes]) -> list[int]:
        blocks = [block for digest in digests if (block := self.contents.get(digest)) is not None]
        if len(blocks) != len(digests):
            raise IntegrityError(f"{len(blocks)} of {len(digests)} blocks of a {self.group.kind} are known")
        return blocks

    @property
    def most(self) -> int:
        """Blocks of a window that a sequence has at most between two steps."""
        return -(-self.group.window // self.block_size) + 1


class SideHold:
    """One sequence's blocks of one group."""

    __slots__ = ("complete", "first", "hold", "known", "side", "snapshot", "wanted")

    def __init__(self, side: SidePool, hold: Hold, first: int, snapshot: Hold | None = None, complete: int = 0) -> None:
        """
        Args:
            first: logical block of the first block of `hold`.
            snapshot: slot of the state that the sequence begins with, until its first step has copied it.
            complete: first logical block that has, or will have, the KV of all of its tokens.
        """
        self.side = side
        self.hold = hold
        self.first = first
        self.snapshot = snapshot
        self.complete = complete
        self.known = 0
        """Logical blocks before the first one whose KV comes from another worker: the others are known, or not in the
        window."""
        self.wanted = 0
        """Logical blocks of the sequence, as far as they are known: it will want as many that are in the window."""

    def can_cover(self, tokens: int) -> bool:
        """Whether there is room for so many tokens of the sequence."""
        return self._lacking(tokens) <= self.side.pool.available

    def cover(self, tokens: int) -> None:
        """Takes blocks up to so many tokens of the sequence; `can_cover` must be true."""
        lacking = self._lacking(tokens)
        if lacking > 0 and not self.hold.extend(lacking):
            raise IntegrityError(f"the pool of a {self.side.group.kind} has no {lacking} blocks, as it said")
        # It grows on.
        self.wanted = max(self.wanted, self.first + len(self.hold.blocks) + 1)

    def room(self) -> int:
        """Number of the sequence's tokens for which there is room."""
        if self.side.is_state:
            return 2**62
        return (self.first + len(self.hold.blocks)) * self.side.block_size

    def slide(self, tokens: int) -> None:
        """Gives up blocks that no token behind the first `tokens` ones needs, and the snapshot that it began with."""
        if self.snapshot is not None:
            self.snapshot.release()
            self.snapshot = None
        if self.side.is_state:
            return
        count = self.side.group.first_needed(tokens) // self.side.block_size - self.first
        if count > 0:
            self.hold.drop(min(count, len(self.hold.blocks)))
            self.first += count

    def share(self, first: int, end: int, tokens: int, owner: str) -> "SideHold":
        """A further hold of what it has of the logical blocks [first, end) and a token behind `tokens` ones needs; of a
        state, nothing: it still changes."""
        begin = max(first, self.first, self.side.group.first_needed(tokens) // self.side.block_size)
        blocks = [] if self.side.is_state else self.hold.blocks[begin - self.first : max(begin, end) - self.first]
        return SideHold(self.side, self.side.pool.share(blocks, owner), begin)

    def from_block(self, index: int) -> list[int]:
        """The blocks from logical block `index` on; of a state, its slot."""
        return self.hold.blocks if self.side.is_state else self.hold.blocks[max(0, index - self.first) :]

    def table(self) -> list[int]:
        """The block of each logical block, -1 for those before the first; of a state, its slot."""
        return [-1] * self.first + self.hold.blocks

    def publish(self, index: int, digest: bytes, first: bytes) -> None:
        """Notes the content of logical block `index`, if it is here; `first` as for `Contents.add`."""
        if self.side.is_state or index < self.complete:
            return
        if 0 <= index - self.first < len(self.hold.blocks):
            self.side.contents.add(digest, self.hold.blocks[index - self.first], self.hold.owner, first)

    def leave(self, index: int, digest: bytes, first: bytes) -> None:
        """Notes the content that the owner leaves behind, who writes to it no more: logical block `index`, or the state
        if it is in the slot already."""
        if not self.side.is_state:
            self.publish(index, digest, first)
        elif self.snapshot is None:
            self.side.contents.add(digest, self.hold.blocks[0], self.hold.owner, first)

    def withdraw(self) -> None:
        """Forgets the content of every block, because it is in doubt."""
        self.side.contents.forget(self.hold.blocks)
        if self.snapshot is not None:
            self.side.contents.forget(self.snapshot.blocks)

    def release(self) -> None:
        """Drops all references. Idempotent."""
        self.side.live.discard(self)
        self.hold.release()
        if self.snapshot is not None:
            self.snapshot.release()

    def _lacking(self, tokens: int) -> int:
        if self.side.is_state:
            return 0
        return -(-tokens // self.side.block_size) - self.first - len(self.hold.blocks)
