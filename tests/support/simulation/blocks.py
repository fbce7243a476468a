"""Pools of the simulated hand-off: who owns each block, who touches it, and whether its KV is what it must be."""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.ports import BlockClaim

BLOCK = 4
"""Tokens of a block."""
LAYERS = 3
FLOATS = KVLayout(layers=LAYERS, kv_heads=16, head_dim=128, block_size=BLOCK, dtype="float32")
CODES = KVLayout(layers=LAYERS, kv_heads=16, head_dim=510, block_size=BLOCK, dtype="int8", order="HND")
"""A layout with scales; a layer of a block takes 64 KiB, the smallest frame, as in FLOATS."""
STATES = StatesLayout(layers=(1,), hidden_size=2**13, dtype="float32")
"""Layout of hidden states; a frame of one layer of a block has those of two tokens."""


class Violation(AssertionError):
    """A guarantee is broken. `kind`: owner, leak, deadline, token, commit, credit, fence, report, lost,
    protocol or crash."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@cache
def _ramp(words: int) -> NDArray[np.uint64]:
    return np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def states_of(key: Key, first: int, end: int) -> torch.Tensor:
    """float32 [tokens, 1, hidden] the hidden states of an attempt's tokens [first, end)."""
    rows = torch.arange(first, end)[:, None, None] * STATES.hidden_size + torch.arange(STATES.hidden_size)
    return (rows + zlib.crc32(repr(key).encode()) % 64 * 2**17).float()


class Hold:
    """Keeps blocks of one attempt allocated: a sender's hold, or a receiver's reservation (then it is its own hold)."""

    __slots__ = ("blocks", "have_tokens", "owner", "released")

    def __init__(self, owner: Any, blocks: list[int]) -> None:
        self.owner = owner
        self.blocks = blocks
        self.have_tokens = 0
        self.released = False

    @property
    def hold(self) -> "Hold":
        return self

    def __repr__(self) -> str:
        return f"Hold({self.blocks})"


MOST_BLOCKS = 10
_spare: dict[KVLayout, list[KVPool]] = {}
"""Memory that earlier worlds have used: new memory would take half of a world's time."""


class Blocks:
    """One worker's pool. Every method that breaks ownership raises `Violation`."""

    def __init__(self, name: str, layout: KVLayout, count: int) -> None:
        self.name = name
        self.count = count
        spare = _spare.setdefault(layout, [])
        self.pool = spare.pop() if spare else KVPool(layout, MOST_BLOCKS)
        self.free = list(range(count))
        self.owner: list[Any] = [None] * count
        self._words = self.pool.bytes.numpy().reshape(MOST_BLOCKS, -1).view(np.uint64)
        self._holds = [0] * count
        self._touched = [0] * count

    def give_back(self) -> None:
        """The world is over."""
        _spare[self.pool.layout].append(self.pool)

    def take(self, owner: Any, count: int) -> Hold | None:
        """A hold on `count` free blocks; None if there are fewer."""
        if len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            if self._touched[block]:
                raise Violation("owner", f"{self.name}: block {block} is given to {owner} while a link touches it")
            self.owner[block] = owner
            self.fill(block, "stale")
        return self.hold(owner, blocks)

    def hold(self, owner: Any, blocks: list[int]) -> Hold:
        """One more hold on blocks that `owner` has already."""
        for block in blocks:
            if self.owner[block] != owner:
                raise Violation("owner", f"{self.name}: {owner} holds block {block} of {self.owner[block]}")
            self._holds[block] += 1
        return Hold(owner, blocks)

    def release(self, hold: Hold) -> None:
        """A block without holds is free at once, and may get another owner."""
        if hold.released:
            raise Violation("owner", f"{self.name}: a hold of {hold.owner} is released twice")
        hold.released = True
        for block in hold.blocks:
            self._holds[block] -= 1
            if not self._holds[block]:
                if self._touched[block]:
                    raise Violation("owner", f"{self.name}: block {block} of {hold.owner} is freed under a link")
                self.owner[block] = None
                self.free.append(block)

    def touch(self, owner: Any, blocks: list[int], writing: bool) -> None:
        """A link begins to read or write; writing needs exclusive access."""
        for block in blocks:
            of = self.owner[block]
            if of != owner:
                raise Violation("owner", f"{self.name}: a link touches block {block} of {of} for {owner}")
            if writing and self._touched[block]:
                raise Violation("owner", f"{self.name}: two links write block {block} of {owner}")
            self._touched[block] += 1

    def let_go(self, blocks: list[int]) -> None:
        """The link no longer touches the blocks."""
        for block in blocks:
            self._touched[block] -= 1

    def fill(self, block: int, *stamp: object) -> None:
        """Writes KV that belongs to `stamp`: whose it is, and the number of the block in the prompt."""
        np.add(_ramp(self._words.shape[1]), zlib.crc32(repr(stamp).encode()), out=self._words[block])

    def check_tokens(self, hold: Hold, tokens: int) -> None:
        """Every token has the KV that the sender of this very attempt computed for this very place."""
        expected, found = _computed(self.pool.layout, hold.owner, tokens), self._read(hold.blocks, tokens)
        if not torch.equal(expected, found):
            first = int((expected != found).nonzero()[0, 0]) // self.pool.layout.block_bytes
            raise Violation("token", f"{hold.owner}: block {first} holds other KV")

    def check_all_free(self) -> None:
        if len(self.free) != self.count or len(set(self.free)) != self.count:
            held = {block: self.owner[block] for block in range(self.count) if block not in self.free}
            raise Violation("leak", f"{self.name}: still held: {held}")

    def _read(self, blocks: list[int], tokens: int) -> torch.Tensor:
        out = torch.empty(self.pool.layout.nbytes(tokens), dtype=torch.uint8)
        self.pool.read(blocks, 0, tokens, out)
        return out


@cache
def _scratch(layout: KVLayout) -> Blocks:
    return Blocks("expected", layout, MOST_BLOCKS)


def _computed(layout: KVLayout, key: Key, tokens: int) -> torch.Tensor:
    """The KV that an attempt's sender computes, as it lies in a frame."""
    scratch, blocks = _scratch(layout), list(range(layout.blocks_for(tokens)))
    for number in blocks:
        scratch.fill(number, key, number)
    return scratch._read(blocks, tokens)


class WatchedClaim:
    """A frame's claim, which the link's thread takes as it begins, some time before the frame's job uses it. The pool
    knows that the blocks are in use from then on until the frame has ended."""

    in_place = False

    def __init__(self, claim: BlockClaim, blocks: Blocks, owner: Key, touched: list[int], writing: bool) -> None:
        self.written = claim.written
        self._claim = claim
        self._blocks = blocks
        self._touch = owner, touched, writing
        self._taken: bool | None = None
        self._used = False

    def take(self) -> bool:
        """Whether the link's thread may touch the blocks."""
        if self._taken is None:
            self._taken = self._claim.enter()
            if self._taken:
                self._blocks.touch(*self._touch)
        return self._taken

    def enter(self) -> bool:
        """As `BlockClaim.enter`, for the job."""
        first = self.take() and not self._used
        self._used = True
        return first

    def close(self) -> bool:
        """As `BlockClaim.close`, for the job."""
        return self._claim.close() if self._taken is None else self.enter()

    def ending(self, call: Callable[..., None]) -> Callable[..., None]:
        """`call`, which reports the frame's end, after the blocks were let go."""

        def ended(*outcome: object) -> None:
            if self._taken:
                self._blocks.let_go(self._touch[1])
            call(*outcome)

        return ended
