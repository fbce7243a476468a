"""Who holds which block of the KV pool.

Every block is in exactly one of three states:

    free      its content is of no use
    cached    nobody holds it, but the prefix index knows its content; the least recently used is evicted first
    held      one or more holds refer to it

                     allocate
         free ---------------------> held <---.
          ^   <--------------------- |  |     | share
          |     last release         |  v     |
          '------- evict -------- cached -----'
                                 (last release of a block that the prefix index knows)

Only a `Hold` keeps a block alive, and its owner must release it. To keep blocks beyond another owner's hold, share them
first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any


class IntegrityError(RuntimeError):
    """A broken invariant of this process (never a user's mistake); the message names the ids involved."""


class Hold:
    """References on blocks, in the order of a sequence's logical blocks. Made by `BlockPool` only.

    Attributes:
        blocks: pool blocks, in order; empty once released. Grown by `extend` only.
        owner: who must release it, for messages; changes when the hold is passed on.
        chain: the prefix index's digests of the leading blocks' content, as far as they were needed.
        published: leading blocks that the prefix index has been offered.
        shared: leading blocks that had their content from the start; others may read them.
        partial: tokens whose KV was in the block behind the shared ones from the start; nobody else holds that block.
        sides: a `SideHold` of each layer group behind the first (`engine/kv/sides.py`, which imports this module).
        withdrawn: whether the prefix index is told no more of it.
        doubtful: whether its content may be wrong (`PrefixIndex.doubt`).
    """

    __slots__ = (
        "_pool",
        "blocks",
        "chain",
        "doubtful",
        "owner",
        "partial",
        "published",
        "released",
        "shared",
        "sides",
        "withdrawn",
    )

    def __init__(self, pool: "BlockPool", blocks: list[int], owner: str) -> None:
        self._pool = pool
        self.blocks = blocks
        self.owner = owner
        self.chain: list[bytes] = []
        self.published = self.shared = self.partial = 0
        self.withdrawn = self.doubtful = False
        self.released = False
        self.sides: tuple[Any, ...] = ()

    def extend(self, count: int) -> bool:
        """Adds `count` fresh blocks at the end; False, and nothing changes, if the pool has too few.

        Raises:
            IntegrityError: the hold was released.
        """
        if self.released:
            raise IntegrityError(f"hold of {self.owner!r} was extended after its release")
        fresh = self._pool.take(count)
        if fresh is None:
            return False
        self.blocks += fresh
        return True

    def take_over(self, block: int) -> None:
        """Adds a cached block at the end, which its owner may write to: the prefix index must no longer know it.

        Raises:
            IntegrityError: somebody holds the block, or it is free.
        """
        self._pool.claim(block, self.owner)
        self.blocks.append(block)

    def pass_to(self, owner: str) -> None:
        """Changes the owner's name."""
        self.owner = owner
        for side in self.sides:
            side.hold.owner = owner

    def drop(self, count: int) -> None:
        """Drops the references on the first `count` blocks."""
        self._pool.give_back(self.blocks[:count])
        del self.blocks[:count]

    def cover(self, tokens: int) -> bool:
        """Lets the groups behind the first have room for so many tokens, too; False, and nothing changes, if one of
        their pools has too few blocks."""
        if all(side.can_cover(tokens) for side in self.sides):
            for side in self.sides:
                side.cover(tokens)
            return True
        return False

    def slide(self, tokens: int) -> None:
        """Gives up blocks that no token behind the first `tokens` ones needs."""
        for side in self.sides:
            side.slide(tokens)

    def known(self) -> list[int]:
        """Logical blocks of each layer group before the first one whose KV comes from another worker."""
        return [self.shared, *[side.known for side in self.sides]]

    def tables(self) -> list[list[int]]:
        """The block table of each layer group: the block, or slot, of each logical block, -1 where it has none."""
        return [list(self.blocks), *[side.table() for side in self.sides]]

    def release(self) -> None:
        """Drops the references, the last block's first, so that a prefix is evicted from its end. Idempotent."""
        if not self.released:
            self.released = True
            self._pool.end(self)
            self.blocks = []
            for side in self.sides:
                side.release()

    def __repr__(self) -> str:
        return f"Hold(owner={self.owner!r}, blocks={self.blocks}, released={self.released})"


class BlockPool:
    """States, reference counts and live holds of `num_blocks` blocks. Not thread-safe.

    All operations take O(1) per block; `check_integrity` takes O(pool).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.total = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        """Called with each cached block before it is reused; the prefix index sets it."""
        self.evictions = 0
        """Cached blocks that were reused so far."""
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._indexed: set[int] = set()
        self._holds: dict[Hold, None] = {}

    @property
    def free(self) -> int:
        """Blocks whose content is of no use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and the prefix index knows."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that a hold refers to."""
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free plus cached."""
        return len(self._free) + len(self._cached)

    @property
    def indexed(self) -> Set[int]:
        """Blocks that the prefix index knows, held or cached."""
        return self._indexed

    @property
    def holds(self) -> Iterable[Hold]:
        """The holds that aren't released."""
        return self._holds

    def owners(self) -> dict[str, int]:
        """Blocks in the live holds of each owner: shows who leaks blocks."""
        owners: Counter[str] = Counter()
        for hold in self._holds:
            owners[hold.owner] += len(hold.blocks)
        return dict(owners)

    def only_in(self, holds: Iterable[Hold]) -> int:
        """Number of blocks that no hold but these refers to: they are available once these are released."""
        found: Counter[int] = Counter()
        for hold in holds:
            found.update(hold.blocks)
        return sum([count == self._refs[block] for block, count in found.items()])

    def can_allocate(self, shared: Sequence[int], fresh: int) -> bool:
        """Whether `shared` (held or cached) blocks can be shared and then `fresh` more be allocated."""
        refs = self._refs
        return fresh + sum(refs[block] == 0 for block in shared) <= self.available

    def allocate(self, count: int, owner: str) -> Hold | None:
        """A hold of `count` blocks with undefined content; None if there are too few.

        Takes free blocks first, then evicts the least recently used cached ones.
        """
        blocks = self.take(count)
        return None if blocks is None else self._register(blocks, owner)

    def share(self, blocks: Sequence[int], owner: str) -> Hold:
        """A further hold of blocks that are held or cached. `blocks` may be empty.

        Raises:
            IntegrityError: one of them is free, so its content is undefined; nothing is shared then.
        """
        stray = [block for block in blocks if self._refs[block] == 0 and block not in self._cached]
        if stray:
            raise IntegrityError(f"{owner!r} wants to share free blocks {stray}")
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        return self._register(list(blocks), owner)

    def remember(self, block: int) -> None:
        """Notes that the prefix index knows the content of `block`: its last release will make it cached.

        Raises:
            IntegrityError: nobody holds it, or it is known already.
        """
        if self._refs[block] == 0 or block in self._indexed:
            raise IntegrityError(f"block {block} can't be indexed: refs {self._refs[block]}, {self._state(block)}")
        self._indexed.add(block)

    def forget(self, block: int) -> None:
        """Notes that the prefix index no longer knows `block`: it is free now, or with its last release."""
        self._indexed.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def is_cached(self, block: int) -> bool:
        """Whether the prefix index knows a block that nobody holds."""
        return block in self._cached

    def claim(self, block: int, owner: str) -> None:
        """Takes a cached block out of the prefix index's knowledge, for a hold. For this module only."""
        if block not in self._cached:
            raise IntegrityError(f"{owner!r} wants to take over block {block}: {self._state(block)}")
        del self._cached[block]
        self._indexed.discard(block)
        self._refs[block] = 1

    def check_integrity(self) -> None:
        """Recounts everything from the live holds.

        Raises:
            IntegrityError: a block is in no state or in two, its reference count isn't that of the live holds, or
                free + cached + held isn't total. Names the blocks and the owners of the holds on them.
        """
        expected: Counter[int] = Counter()
        for hold in self._holds:
            expected.update(hold.blocks)
            if hold.released or len(set(hold.blocks)) != len(hold.blocks):
                raise IntegrityError(f"{hold!r} is released but live, or names a block twice")
        free = Counter(self._free)
        for block in range(self.total):
            states = free[block] + (block in self._cached) + (expected[block] > 0)
            indexed_as_it_should = block not in self._indexed if free[block] else True
            cached_as_it_should = block in self._indexed if block in self._cached else True
            counted = self._refs[block] == expected[block]
            if states != 1 or not (counted and indexed_as_it_should and cached_as_it_should):
                raise IntegrityError(f"block {block}: {self._state(block)}, held by {self._owners_of(block)}")
        held = len(expected)
        if self.free + self.cached + held != self.total:
            raise IntegrityError(f"free {self.free} + cached {self.cached} + held {held} != total {self.total}")

    def check_idle(self) -> None:
        """Checks that no hold is left, while nothing may hold a block.

        Raises:
            IntegrityError: a hold is live; names its owner and blocks.
        """
        if self._holds:
            leaked = ", ".join(f"{hold.owner} {list(hold.blocks)}" for hold in self._holds)
            raise IntegrityError(f"no request is left, and blocks are held: {leaked}")

    def take(self, count: int) -> list[int] | None:
        """Blocks for a hold, each with one reference; None if too few are free or cached. For this module only."""
        if count < 0:
            raise ValueError(f"count is {count}; it must be at least 0")
        if count > self.available:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        # Neighbours in their order are one run of memory, which some links send without a copy. Eviction yields a
        # former sequence's blocks from its end.
        taken.sort()
        for block in taken:
            self._refs[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._indexed.discard(block)
        self.evictions += 1
        if self.on_evict is not None:
            self.on_evict(block)
        return block

    def _register(self, blocks: list[int], owner: str) -> Hold:
        hold = Hold(self, blocks, owner)
        self._holds[hold] = None
        return hold

    def end(self, hold: Hold) -> None:
        """Takes the references of a hold that is released. For this module only."""
        del self._holds[hold]
        self.give_back(hold.blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Takes one reference on each block, the last one's first. For this module only."""
        refs = self._refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if block in self._indexed:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def _state(self, block: int) -> str:
        where = [name for name, blocks in (("free", self._free), ("cached", self._cached)) if block in blocks]
        indexed = "indexed" if block in self._indexed else "not indexed"
        return f"refs {self._refs[block]}, {indexed}, listed as {where or 'neither free nor cached'}"

    def _owners_of(self, block: int) -> list[str]:
        return [hold.owner for hold in self._holds if block in hold.blocks]
