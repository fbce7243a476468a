"""The prefix cache: which block holds the KV of which beginning of a prompt.

The name of a full block is a digest of everything its KV depends on:

    digest[-1] = SHA-256(namespace, tenant)                       namespace: model fingerprint and KV layout
    digest[i]  = SHA-256(digest[i - 1], tokens of block i)        tokens as little-endian int32

so two blocks have one name only if model, layout, tenant and all tokens up to the block's end are the same. A
cryptographic hash, because a collision would hand one prompt's KV to another.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError


class PrefixIndex:
    """Finds cached blocks by content. Keeps no block alive: what the pool evicts, it forgets.

    A `chain` is the list of digests of a token list's leading blocks. It belongs to whoever owns the tokens, is
    extended in place as far as needed, and spares hashing the same tokens twice; the tokens it covers never change.
    """

    def __init__(self, pool: BlockPool, block_size: int, namespace: bytes) -> None:
        """Becomes the pool's index.

        Raises:
            ValueError: the pool has an index already.
        """
        if pool.on_evict is not None:
            raise ValueError("the block pool already has a prefix index")
        pool.on_evict = self._drop
        self._pool = pool
        self._block_size = block_size
        self._root = hashlib.sha256(b"kvrelay prefix" + struct.pack("<Q", len(namespace)) + namespace)
        self._pack = struct.Struct(f"<{block_size}i").pack
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._block_of)

    def find(self, tokens: Sequence[int], tenant: str, limit: int, chain: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `tokens`, in whole blocks and at most `limit` tokens.

        Takes no hold: the answer is good until the pool next hands out a block.
        """
        blocks = []
        for index in range(min(limit, len(tokens)) // self._block_size):
            block = self._block_of.get(self._digest(tokens, tenant, index, chain))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match(
        self, tokens: Sequence[int], tenant: str, owner: str, limit: int, chain: list[bytes] | None = None
    ) -> Hold:
        """A hold of the longest known prefix; it covers `len(hold.blocks) * block_size` tokens, perhaps none.

        Args:
            limit: tokens to take from the cache at most. Whoever needs the last token's logits passes one less than
                there are.
            chain: digests known already; the hold keeps it, and `publish` goes on from there.
        """
        chain = [] if chain is None else chain
        hold = self._pool.share(self.find(tokens, tenant, limit, chain), owner)
        hold.chain = chain
        hold.published = len(hold.blocks)
        return hold

    def publish(self, tokens: Sequence[int], tenant: str, hold: Hold, computed: int) -> None:
        """Makes the blocks of `hold` that the first `computed` tokens fill known, from the first new one on.

        Content that another block already holds keeps that block.

        Args:
            tokens: the sequence's tokens; KV of the first `computed` lies in `hold.blocks`, all of it final.

        Raises:
            IntegrityError: a block to publish is known as other content.
        """
        for index in range(hold.published, computed // self._block_size):
            digest = self._digest(tokens, tenant, index, hold.chain)
            block = hold.blocks[index]
            if digest not in self._block_of:
                if block in self._digest_of:
                    raise IntegrityError(f"block {block} of {hold.owner!r} is published as other content")
                self._pool.remember(block)
                self._block_of[digest] = block
                self._digest_of[block] = digest
            hold.published = index + 1

    def withdraw(self, hold: Hold) -> None:
        """Forgets every block of `hold`, shared ones included, because their content is in doubt."""
        for block in hold.blocks:
            if block in self._digest_of:
                self._drop(block)
                self._pool.forget(block)

    def check_integrity(self) -> None:
        """Raises IntegrityError, naming blocks, unless digests and blocks map one to one and the pool agrees."""
        if {block: digest for digest, block in self._block_of.items()} != self._digest_of:
            odd = set(self._block_of.values()) ^ set(self._digest_of)
            raise IntegrityError(f"prefix index is not one to one; blocks on one side only: {sorted(odd)}")
        if self._digest_of.keys() != self._pool.indexed:
            odd = self._digest_of.keys() ^ self._pool.indexed
            raise IntegrityError(f"prefix index and block pool differ about blocks {sorted(odd)}")

    def _digest(self, tokens: Sequence[int], tenant: str, index: int, chain: list[bytes]) -> bytes:
        """Digest of block `index`, at most one past the end of `chain`, which then gains it."""
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
