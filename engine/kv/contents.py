"""Contents of blocks: the map of an index between digests and the blocks of its pool."""

from collections.abc import Iterable

from kvrelay.engine.kv.blocks import BlockPool, IntegrityError


class Contents:
    """Maps digests and blocks one to one. Keeps no block alive: it forgets a block that the pool evicts."""

    def __init__(self, pool: BlockPool) -> None:
        """Becomes the pool's index.

        Raises:
            ValueError: the pool has an index already.
        """
        if pool.on_evict is not None:
            raise ValueError("the block pool already has an index")
        pool.on_evict = self._drop
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._block_of)

    def get(self, digest: bytes) -> int | None:
        """The block with this content; None if there is none."""
        return self._block_of.get(digest)

    def add(self, digest: bytes, block: int, owner: str) -> None:
        """Notes the content of a held block. If another block has the same content already, that one stays.

        Raises:
            IntegrityError: the block is known as other content; names `owner`.
        """
        if digest in self._block_of:
            return
        if block in self._digest_of:
            raise IntegrityError(f"block {block} of {owner!r} is published as other content")
        self._pool.remember(block)
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """Forgets the content of these blocks, as far as it is known."""
        for block in blocks:
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

    def _drop(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
