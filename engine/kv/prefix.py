"""The prefix cache: which block holds the KV of which prefix.

The name of a full block is a digest of everything that its KV depends on:

    digest[-1] = SHA-256(namespace, tenant)                       namespace: model fingerprint and KV layout
    digest[i]  = SHA-256(digest[i - 1], tokens of block i)        tokens as little-endian int32

so two blocks have the same name only if model, layout, tenant and all tokens up to the block's end are the same. The
hash is cryptographic, because a collision would give one prompt's KV to another.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError


class PrefixIndex:
    """Finds cached blocks by content. Keeps no block alive: it forgets a block that the pool evicts.

    A `chain` is the list of digests of a token list's leading blocks. The owner of the tokens keeps it, so that no
    token is hashed twice. It is extended in place as far as needed, and the tokens that it covers never change.
    """

    def __init__(self, pool: BlockPool, block_size: int, namespace: bytes, *, enabled: bool = True) -> None:
        """Becomes the pool's index.

        Args:
            enabled: if False, it stays empty and finds nothing.

        Raises:
            ValueError: the pool has an index already.
        """
        if pool.on_evict is not None:
            raise ValueError("the block pool already has a prefix index")
        pool.on_evict = self._drop
        self.pool = pool
        self.queried_tokens = self.hit_tokens = 0
        """Tokens for which blocks were allocated so far, and those of them that were found."""
        self._block_size = block_size
        self._enabled = enabled
        self._root = hashlib.sha256(b"kvrelay prefix" + struct.pack("<Q", len(namespace)) + namespace)
        self._pack = struct.Struct(f"<{block_size}i").pack
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._block_of)

    def find(self, tokens: Sequence[int], tenant: str, limit: int, chain: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `tokens`, in whole blocks and at most `limit` tokens.

        Takes no hold: the answer is valid until the pool next allocates a block.

        Args:
            limit: one less than there are tokens if the last token's logits are needed.
        """
        blocks: list[int] = []
        if not self._enabled:
            return blocks
        for index in range(min(limit, len(tokens)) // self._block_size):
            block = self._block_of.get(self._digest(tokens, tenant, index, chain))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(
        self, tokens: Sequence[int], tenant: str, chain: list[bytes], count: int, limit: int, spare: int = 0
    ) -> Hold | None:
        """A hold of `count` blocks: those of the longest known prefix, then fresh ones. The caller names its owner.

        Args:
            chain: the digests known already; the hold keeps it, and `publish` continues from there.
            limit: as for `find`.
            spare: blocks that must be left in the pool.

        Returns:
            None if there are too few blocks.
        """
        shared = self.find(tokens, tenant, limit, chain)
        fresh = count - len(shared)
        if not self.pool.can_allocate(shared, fresh + spare):
            return None
        hold = self.pool.share(shared, "a new hold")
        if not hold.extend(fresh):
            raise IntegrityError(f"the pool has no {fresh} blocks beside {len(shared)} shared ones, as it said")
        hold.chain = chain
        hold.published = len(shared)
        self.queried_tokens += limit
        self.hit_tokens += len(shared) * self._block_size
        return hold

    def make_room(self, hold: Hold, tokens: int, spare: int) -> int:
        """Lets a hold grow to so many tokens, unless the pool would have fewer than `spare` blocks left.

        Returns:
            The tokens that it has room for, `tokens` or fewer.
        """
        lacking = -(-tokens // self._block_size) - len(hold.blocks)
        if lacking > 0 and self.pool.can_allocate((), lacking + spare):
            hold.extend(lacking)
        return min(tokens, len(hold.blocks) * self._block_size)

    def publish(self, tokens: Sequence[int], tenant: str, hold: Hold, computed: int) -> None:
        """Adds the blocks of `hold` that the first `computed` tokens fill and that weren't published before.

        If another block has the same content already, that one stays in the index.

        Args:
            tokens: the sequence's tokens; the KV of the first `computed` is in `hold.blocks`, in final form.

        Raises:
            IntegrityError: a block to publish is known as other content.
        """
        if not self._enabled:
            return
        for index in range(hold.published, computed // self._block_size):
            digest = self._digest(tokens, tenant, index, hold.chain)
            block = hold.blocks[index]
            if digest not in self._block_of:
                if block in self._digest_of:
                    raise IntegrityError(f"block {block} of {hold.owner!r} is published as other content")
                self.pool.remember(block)
                self._block_of[digest] = block
                self._digest_of[block] = digest
            hold.published = index + 1

    def withdraw(self, hold: Hold) -> None:
        """Forgets every block of `hold`, shared ones too, because their content is in doubt."""
        for block in hold.blocks:
            if block in self._digest_of:
                self._drop(block)
                self.pool.forget(block)

    def check_integrity(self) -> None:
        """Raises IntegrityError, naming blocks, unless digests and blocks map one to one and the pool agrees."""
        if {block: digest for digest, block in self._block_of.items()} != self._digest_of:
            odd = set(self._block_of.values()) ^ set(self._digest_of)
            raise IntegrityError(f"prefix index is not one to one; blocks on one side only: {sorted(odd)}")
        if self._digest_of.keys() != self.pool.indexed:
            odd = self._digest_of.keys() ^ self.pool.indexed
            raise IntegrityError(f"prefix index and block pool differ about blocks {sorted(odd)}")

    def _digest(self, tokens: Sequence[int], tenant: str, index: int, chain: list[bytes]) -> bytes:
        """Digest of block `index`, which is at most one past the end of `chain`; a new digest is appended."""
        if index < len(chain):
            return chain[index]
        if chain:
            digest = hashlib.sha256(chain[-1])
        else:
            digest = self._root.copy()
            digest.update(tenant.encode())
            digest = hashlib.sha256(digest.digest())
        start = index * self._block_size
        digest.update(self._pack(*tokens[start : start + self._block_size]))
        chain.append(digest.digest())
        return chain[-1]

    def _drop(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
