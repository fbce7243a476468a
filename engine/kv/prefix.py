"""The prefix cache: which block holds the KV of which prefix.

The name of a full block is a digest of everything that its KV depends on:

    digest[-1] = SHA-256(namespace, tenant)                       namespace: model fingerprint and KV layout
    digest[i]  = SHA-256(digest[i - 1], tokens of block i)        tokens as little-endian int32

so two blocks have the same name only if model, layout, tenant and all tokens up to the block's end are the same. The
hash is cryptographic, because a collision would give one prompt's KV to another.

A sequence that ends leaves its last block, too, which its tokens may fill in part only. Its name is made in the same
way, of the tokens that it has; as these are fewer, it is never that of a full block. The next turn of a conversation
goes on in that block: it takes the block over, so that the block has one owner who writes to it, and is not known until
that owner has filled or left it. If somebody holds the block, or too little of it is the sequence's (`Partials.find`),
the sequence computes these tokens again: fewer than a block has, in a step that it needs anyway. A copy of the block
would have to be a part of the step's plan on all ranks.

Where a model has layer groups behind the first, a prefix is known only if all of them know what the tokens behind it
need: the blocks of a window before its end, and the state at its end. Both have the names of the first group's blocks.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.contents import Contents, Match, Partials
from kvrelay.engine.kv.sides import SidePool


class PrefixIndex:
    """Finds cached blocks by content. Keeps no block alive: it forgets a block that the pool evicts.

    A `chain` is the list of digests of a token list's leading blocks. The owner of the tokens keeps it, so that no
    token is hashed twice. It is extended in place as far as needed, and the tokens that it covers never change.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        namespace: bytes,
        *,
        enabled: bool = True,
        sides: Sequence[SidePool] = (),
        memory: BlockPool | None = None,
    ) -> None:
        """Becomes the pool's index.

        Args:
            enabled: if False, it stays empty and finds nothing.
            sides: pools of the layer groups behind the first.
            memory: see the attribute.

        Raises:
            ValueError: the pool has an index already.
        """
        self._partials = Partials()
        self._contents = Contents(pool, self._partials.drop)
        self.pool = pool
        self.memory = memory or pool
        """Pool whose blocks bound what the engine can take: that of a window, if the first group's take no memory."""
        self.sides = tuple(sides)
        self.queried_tokens = self.hit_tokens = 0
        """Tokens for which blocks were allocated so far, and those of them that were found."""
        self.block_size = block_size
        self.enabled = enabled
        self._root = hashlib.sha256(b"kvrelay prefix" + struct.pack("<Q", len(namespace)) + namespace)

    def __len__(self) -> int:
        """Blocks whose content is known, held or not; partly filled ones, too."""
        return len(self._contents)

    def find(self, tokens: Sequence[int], tenant: str, limit: int, chain: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `tokens`, in whole blocks and at most `limit` tokens.

        Takes no hold: the answer is valid until the pool next allocates a block.

        Args:
            limit: one less than there are tokens if the last token's logits are needed.
        """
        blocks: list[int] = []
        if not self.enabled:
            return blocks
        for index in range(min(limit, len(tokens)) // self.block_size):
            block = self._contents.get(self.digest(tokens, tenant, index, chain))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(
        self,
        tokens: Sequence[int],
        tenant: str,
        chain: list[bytes],
        count: int,
        limit: int,
        spare: int = 0,
        *,
        imports: int | None = None,
    ) -> Hold | None:
        """A hold of `count` blocks: those of the longest known prefix, then one that it takes over if it goes on in a
        partly filled one, then fresh ones. The caller names its owner.

        Args:
            chain: the digests known already; the hold keeps it, and `publish` continues from there.
            limit: as for `find`.
            spare: blocks that must be left in the pool.
            imports: number of tokens whose KV comes from another worker, as far as it isn't known; the groups behind
                the first then have room for what the token behind them needs. None if none comes. What comes begins
                with a block, so no partly filled one is taken over.

        Returns:
            None if there are too few blocks.
        """
        shared = self.find(tokens, tenant, limit, chain)
        match = None
        if imports is None:
            least = longest(self.sides, chain[: len(shared)]) if self.sides else len(shared)
            while (match := self._match(tokens, tenant, limit, chain, len(shared))) is None and len(shared) > least:
                shared.pop()
        # A block that is taken over counts as a fresh one: both are available now.
        fresh = count - len(shared)
        if not self.pool.can_allocate(shared, fresh + spare):
            return None
        if not all(side.can_begin(count) for side in self.sides):
            return None
        hold = self.pool.share(shared, "a new hold")
        hold.sides = tuple([side.begin(chain[: len(shared)], imports, count, match) for side in self.sides])
        hold.shared = len(shared)
        if match is not None:
            self._contents.take_over(hold, match.digest)
            hold.partial = match.tokens
            fresh -= 1
        if not hold.extend(fresh):
            raise IntegrityError(f"the pool has no {fresh} blocks beside {len(hold.blocks)} known ones, as it said")
        hold.chain = chain
        # A window may know fewer blocks than the first group. Blocks of it that are imported are published, too.
        hold.published = min([len(shared), *[side.known for side in hold.sides if imports and not side.side.is_state]])
        self.queried_tokens += limit
        self.hit_tokens += len(shared) * self.block_size + hold.partial
        return hold

    def make_room(self, hold: Hold, tokens: int, spare: int) -> int:
        """Lets a hold grow to so many tokens, unless the pool would have fewer than `spare` blocks left.

        Returns:
            The tokens that it has room for, `tokens` or fewer.
        """
        lacking = -(-tokens // self.block_size) - len(hold.blocks)
        if lacking > 0 and self.pool.can_allocate((), lacking + spare):
            hold.extend(lacking)
        room = min(tokens, len(hold.blocks) * self.block_size)
        if hold.sides and not hold.cover(room):
            rooms: list[int] = [side.room() for side in hold.sides]
            return min(room, *rooms)
        return room

    def publish(self, tokens: Sequence[int], tenant: str, hold: Hold, computed: int) -> None:
        """Adds the blocks of `hold` that the first `computed` tokens fill and that weren't published before.

        If another block has the same content already, that one stays in the index.

        Args:
            tokens: the sequence's tokens; the KV of the first `computed` is in `hold.blocks`, in final form.

        Raises:
            IntegrityError: a block to publish is known as other content.
        """
        if not self.enabled or hold.withdrawn:
            return
        for index in range(hold.published, computed // self.block_size):
            digest = self.digest(tokens, tenant, index, hold.chain)
            self._contents.add(digest, hold.blocks[index], hold.owner, hold.chain[0])
            for side in hold.sides:
                side.publish(index, digest, hold.chain[0])
            hold.published = index + 1

    def leave(self, tokens: Sequence[int], tenant: str, hold: Hold, computed: int, *, states: bool) -> None:
        """Adds what `hold`, whose owner writes to it no more, has of the first `computed` tokens behind their whole
        blocks: the block that they fill in part, and the states at their end.

        Args:
            tokens, computed: as for `publish`.
            states: whether its slots have the states behind these tokens. If not, and there are any, nothing is added.
        """
        if (
            not self.enabled
            or hold.released
            or hold.withdrawn
            or (not states and any(side.is_state for side in self.sides))
        ):
            return
        self.publish(tokens, tenant, hold, computed)
        index, count = divmod(computed, self.block_size)
        if count:
            parent, rest = self._parent(tenant, index, hold.chain), tuple(tokens[computed - count : computed])
            digest = _child(parent, rest)
            if self._contents.get(digest) is None:
                self._partials.add(parent, rest, digest)
            first = hold.chain[0] if index else digest
            self._contents.add(digest, hold.blocks[index], hold.owner, first)
            for side in hold.sides:
                side.leave(index, digest, first)
        elif index:
            for side in hold.sides:
                if side.side.is_state:
                    side.leave(index - 1, hold.chain[index - 1], hold.chain[0])

    def withdraw(self, hold: Hold) -> None:
        """Forgets every block of `hold`, shared ones too; no later one is added."""
        hold.withdrawn = True
        self._contents.forget(hold.blocks)
        for side in hold.sides:
            side.withdraw()

    def doubt(self, hold: Hold) -> None:
        """Forgets all blocks whose content may be wrong because a block of `hold` may be, and marks their holds.

        These are the blocks whose prefix begins with the same first block, and every block of each hold that has one of
        them. Whoever computes with a `doubtful` hold has to compute its tokens again.
        """
        doubtful = set(hold.blocks)
        for first in hold.chain[:1]:
            behind = self._contents.behind(first)
            doubtful.update(behind)
            self._contents.forget(behind)
            for side in self.sides:
                side.contents.forget(side.contents.behind(first))
        reached = [hold]
        while reached:
            for one in reached:
                one.doubtful = True
                self.withdraw(one)
                doubtful.update(one.blocks)
            reached = [one for one in self.pool.holds if not one.doubtful and not doubtful.isdisjoint(one.blocks)]

    def check_integrity(self) -> None:
        """Checks this index, and the pools of the groups behind the first.

        Raises:
            IntegrityError: digests and blocks don't map one to one, or a pool disagrees; names blocks.
        """
        self._contents.check_integrity()
        self._partials.check_integrity()
        if any(self._contents.get(digest) is None for digest in self._partials):
            raise IntegrityError("a partly filled block is known by its tokens that is not in the prefix index")
        for side in self.sides:
            side.check_integrity()

    def digest(self, tokens: Sequence[int], tenant: str, index: int, chain: list[bytes]) -> bytes:
        """Digest of block `index`, which is at most one past the end of `chain`; a new digest is appended."""
        if index < len(chain):
            return chain[index]
        start = index * self.block_size
        chain.append(_child(self._parent(tenant, index, chain), tokens[start : start + self.block_size]))
        return chain[-1]

    def _match(
        self, tokens: Sequence[int], tenant: str, limit: int, chain: Sequence[bytes], count: int
    ) -> Match | None:
        """The partly filled block behind the first `count` blocks of a sequence that it can take over."""
        start = count * self.block_size
        rest = tokens[start : min(limit, start + self.block_size - 1)]
        if not rest or not self._partials:
            return None
        for match in self._partials.find(self._parent(tenant, count, chain), rest):
            if self._contents.unheld(match.digest) is not None and all(
                side.goes_on(chain[:count], match) for side in self.sides
            ):
                return match
        return None

    def _parent(self, tenant: str, index: int, chain: Sequence[bytes]) -> bytes:
        """Digest of all before block `index`, which `chain` has unless it is the first one."""
        if index:
            return chain[index - 1]
        root = self._root.copy()
        root.update(tenant.encode())
        return root.digest()


def _child(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a block with these tokens behind those with the digest `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}i", *tokens)).digest()


def longest(sides: Sequence[SidePool], chain: Sequence[bytes]) -> int:
    """The most of the leading blocks with these digests behind which a sequence can go on in all groups."""
    found = 0
    known = [0] * len(sides)
    """Blocks before the current one that each group knows without a gap."""
    for count, digest in enumerate(chain, 1):
        known = [before + 1 if side.knows(digest) else 0 for side, before in zip(sides, known, strict=True)]
        if all(count - side.first_needed(count) <= have for side, have in zip(sides, known, strict=True)):
            found = count
    return found
