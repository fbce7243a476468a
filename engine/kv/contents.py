"""Contents of blocks: the map of an index between digests and the blocks of its pool."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError


class Contents:
    """Maps digests and blocks one to one. Keeps no block alive: it forgets a block that the pool evicts."""

    def __init__(self, pool: BlockPool, on_drop: Callable[[bytes], None] | None = None) -> None:
        """Becomes the pool's index.

        Args:
            on_drop: called with the digest of each content that is forgotten.

        Raises:
            ValueError: the pool has an index already.
        """
        if pool.on_evict is not None:
            raise ValueError("the block pool already has an index")
        pool.on_evict = self._drop
        self._pool, self._on_drop = pool, on_drop
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._first_of: dict[int, bytes] = {}
        """Digest of the first block of each block's prefix."""

    def __len__(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._block_of)

    def get(self, digest: bytes) -> int | None:
        """The block with this content; None if there is none."""
        return self._block_of.get(digest)

    def add(self, digest: bytes, block: int, owner: str, first: bytes) -> None:
        """Notes the content of a held block. If another block has the same content already, that one stays.

        Args:
            first: digest of the first block of its prefix, from which it was computed.

        Raises:
            IntegrityError: the block is known as other content; names `owner`.
        """
        if digest in self._block_of:
            return
        if block in self._digest_of:
            raise IntegrityError(f"block {block} of {owner!r} is published as other content")
        self._pool.remember(block)
        self._block_of[digest] = block
        self._digest_of[block], self._first_of[block] = digest, first

    def behind(self, first: bytes) -> list[int]:
        """The known blocks whose prefix begins with the block of this digest, itself included."""
        return [block for block, beginning in self._first_of.items() if beginning == first]

    def unheld(self, digest: bytes) -> int | None:
        """The block with this content, if nobody holds it; None otherwise."""
        block = self._block_of.get(digest)
        return block if block is not None and self._pool.is_cached(block) else None

    def take_over(self, hold: Hold, digest: bytes) -> None:
        """Gives a hold the block with this content, for its owner to write to: the content is forgotten.

        Raises:
            IntegrityError: somebody holds the block, or there is none.
        """
        block = self.unheld(digest)
        if block is None:
            raise IntegrityError(f"{hold.owner!r} wants to take over a block that is held, or not known")
        self._drop(block)
        hold.take_over(block)

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
        if self._digest_of.keys() != self._first_of.keys():
            odd = self._digest_of.keys() ^ self._first_of.keys()
            raise IntegrityError(f"blocks have a digest or the first block of their prefix, not both: {sorted(odd)}")
        if self._digest_of.keys() != self._pool.indexed:
            odd = self._digest_of.keys() ^ self._pool.indexed
            raise IntegrityError(f"prefix index and block pool differ about blocks {sorted(odd)}")

    def _drop(self, block: int) -> None:
        digest = self._digest_of.pop(block)
        del self._block_of[digest], self._first_of[block]
        if self._on_drop is not None:
            self._on_drop(digest)


class Match(NamedTuple):
    """A partly filled block that has tokens of a sequence."""

    tokens: int
    """Leading tokens of the block that are the sequence's."""
    whole: bool
    """Whether these are all tokens of the block."""
    digest: bytes
    """Digest of the block's content."""


_tokens_of = itemgetter(0)


class Partials:
    """The contents that fill a block in part, found by their tokens behind each prefix.

    Contents behind one prefix are in the order of their tokens. So no content shares more tokens with a given list than
    one of the list's two neighbours does.
    """

    def __init__(self) -> None:
        self._behind: dict[bytes, list[tuple[tuple[int, ...], bytes]]] = {}
        """(tokens, digest) of each content, by the digest of the prefix before it."""
        self._known: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """(digest of the prefix before it, tokens) of each content, by its digest."""

    def __iter__(self) -> Iterator[bytes]:
        """The digests of all contents."""
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, parent: bytes, tokens: tuple[int, ...], digest: bytes) -> None:
        """Notes a content that isn't known yet. `parent` is the digest of the prefix before it."""
        self._known[digest] = parent, tokens
        insort(self._behind.setdefault(parent, []), (tokens, digest), key=_tokens_of)

    def drop(self, digest: bytes) -> None:
        """Forgets a content, if it is known."""
        if digest not in self._known:
            return
        parent, tokens = self._known.pop(digest)
        behind = self._behind[parent]
        del behind[bisect_left(behind, tokens, key=_tokens_of)]
        if not behind:
            del self._behind[parent]

    def find(self, parent: bytes, tokens: Sequence[int]) -> list[Match]:
        """The contents behind a prefix that these tokens go on with, those that have most of them first.

        Among them is each content that has nothing but these tokens. One that goes on in another way is found if more
        than half of it are these tokens, and no other shares more with them: whoever writes to its block loses the rest
        for the sequence that left it there.
        """
        behind, given = self._behind.get(parent, []), tuple(tokens)
        found: list[Match] = []
        place, end = bisect_right(behind, given, key=_tokens_of), len(given)
        for known, digest in behind[max(0, place - 1) : place + 1]:
            count = _common(known, given)
            if count < len(known) < 2 * count:
                found.append(Match(count, False, digest))
        while end and (place := bisect_right(behind, given[:end], key=_tokens_of)):
            known, digest = behind[place - 1]
            end = _common(known, given[:end])
            if end == len(known):
                found.append(Match(end, True, digest))
                end -= 1
        return sorted(found, key=lambda match: (-match.tokens, not match.whole))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless both maps agree and all lists are in order."""
        listed = {digest: (parent, known) for parent, behind in self._behind.items() for known, digest in behind}
        if listed != self._known or any(behind != sorted(behind) for behind in self._behind.values()):
            raise IntegrityError(f"{len(self._known)} partly filled blocks are known, {len(listed)} of them by prefix")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning of two lists of tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (token, same) in pairs if token != same), min(len(one), len(other)))
