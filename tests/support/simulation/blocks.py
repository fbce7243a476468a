"""Pools of the simulated hand-off: who owns each block, who touches it, and whether its KV is what it must be."""

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.protocol.handshake import tracks_of
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.ports import BlockClaim
from kvrelay.transfer.protocol.routes import held_by, routes_of
from support.ranks import rank_cache

BLOCK = 4
"""Tokens of a block."""
LAYERS = 3
FLOATS = KVLayout(layers=LAYERS, kv_heads=16, head_dim=128, block_size=BLOCK, dtype="float32")
CODES = KVLayout(layers=LAYERS, kv_heads=16, head_dim=510, block_size=BLOCK, dtype="int8", order="HND")
"""A layout with scales; a layer of a block takes 64 KiB, the smallest frame, as in FLOATS."""
SLOT = KVLayout(layers=LAYERS, kv_heads=1, head_dim=2**16, block_size=1, dtype="raw", planes=1)


def caches_of(layout: KVLayout) -> list[CacheLayout]:
    """Caches that models may keep of a sequence: of all tokens, of some last ones, a state, and none of all tokens."""
    full, window, state = (
        LayerGroup("full", (layout,)),
        LayerGroup("window", (layout,), 6),
        LayerGroup("state", (SLOT,)),
    )
    found = ((full,), (full, window), (full, state), (full, window, state), (LayerGroup("full", ()), state))
    return [CacheLayout(groups, BLOCK) for groups in found]


STATES = StatesLayout(layers=(1,), hidden_size=2**13, dtype="float32")
"""Layout of hidden states; a frame of one layer of a block has those of two tokens."""


class Violation(AssertionError):
    """A guarantee is broken. `kind`: owner, leak, deadline, token, commit, credit, fence, report, lost,
    protocol or crash."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@functools.cache
def _ramp(words: int) -> NDArray[np.uint64]:
    return np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def states_of(key: Key, first: int, end: int) -> torch.Tensor:
    """float32 [tokens, 1, hidden] the hidden states of an attempt's tokens [first, end)."""
    rows = torch.arange(first, end)[:, None, None] * STATES.hidden_size + torch.arange(STATES.hidden_size)
    return (rows + zlib.crc32(repr(key).encode()) % 64 * 2**17).float()


class Hold:
    """Keeps blocks of one attempt allocated: a sender's hold, or a receiver's reservation (then it is its own hold)."""

    __slots__ = ("blocks", "cache", "first", "have", "owner", "released", "tokens")

    def __init__(self, owner: Any, blocks: list[int], cache: CacheLayout, first: int, tokens: int) -> None:
        """
        Args:
            first: number of the first block in the prompt.
            tokens: that come from another worker; 0 if the KV is computed here, so that a window lacks no block.
        """
        self.owner = owner
        self.blocks = blocks
        self.cache = cache
        self.first = first
        self.tokens = tokens
        self.have = tuple([group.first_needed(tokens) for group in cache.groups])
        self.released = False

    def tables(self) -> list[list[int]]:
        """As `kvrelay.engine.kv.blocks.Hold.tables`. All groups have the same blocks, each in its own pools; the first
        one is a state's slot."""
        found = [self.blocks]
        for group in self.cache.side_groups:
            if group.kind == "state":
                found.append(self.blocks[:1])
            else:
                before = max(self.first, group.first_needed(self.tokens) // BLOCK)
                found.append([-1] * before + self.blocks[before - self.first :])
        return found

    def comes_from(self, first: Sequence[int]) -> None:
        """Does nothing: no later attempt shares a block."""

    @property
    def hold(self) -> "Hold":
        return self

    def __repr__(self) -> str:
        return f"Hold({self.blocks})"


MOST_BLOCKS = 10


def _pools(cache: CacheLayout, degree: Degree, rank: int) -> list[KVPool]:
    return [KVPool(layout, MOST_BLOCKS) for _, layout in rank_cache(cache, degree, rank).tracks]


@functools.cache
def _one_block(layout: KVLayout) -> KVPool:
    return KVPool(layout, 1)


_spare: dict[tuple[CacheLayout, Degree], list[list[list[KVPool]]]] = {}
"""Memory that earlier worlds have used: new memory would take half of a world's time."""


class Blocks:
    """One worker's pool. Every method that breaks ownership raises `Violation`."""

    def __init__(self, name: str, cache: CacheLayout, count: int, degree: Degree = ONE) -> None:
        self.name = name
        self.cache = cache
        self.degree = degree
        self.count = count
        spare = _spare.setdefault((cache, degree), [])
        self.ranks = spare.pop() if spare else [_pools(cache, degree, rank) for rank in range(degree.ranks)]
        """Pools of the tracks, of each rank."""
        self.free = list(range(count))
        self.owner: list[Any] = [None] * count
        self._holds = [0] * count
        self._touched = [0] * count
        self._written = Counter[tuple[int, Hashable]]()
        """Links that write a block, by the part of it that they write."""

    def give_back(self) -> None:
        """The world is over."""
        _spare[self.cache, self.degree].append(self.ranks)

    def take(self, owner: Any, count: int, tokens: int = 0) -> Hold | None:
        """A hold on `count` free blocks; None if there are fewer. `tokens` as for `Hold`."""
        if len(self.free) < count:
            return None
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            if self._touched[block]:
                raise Violation("owner", f"{self.name}: block {block} is given to {owner} while a link touches it")
            self.owner[block] = owner
            self.fill(block, "stale")
            self.fill_slot(block, "stale")
        return self.hold(owner, blocks, tokens=tokens)

    def hold(self, owner: Any, blocks: list[int], first: int = 0, tokens: int = 0) -> Hold:
        """One more hold on blocks that `owner` has already; `first` and `tokens` as for `Hold`."""
        for block in blocks:
            if self.owner[block] != owner:
                raise Violation("owner", f"{self.name}: {owner} holds block {block} of {self.owner[block]}")
            self._holds[block] += 1
        return Hold(owner, blocks, self.cache, first, tokens)

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

    def touch(self, owner: Any, blocks: list[int], part: Hashable) -> None:
        """A link begins to read or, with a `part` of each block, to write; writing needs exclusive access to that."""
        for block in blocks:
            of = self.owner[block]
            if of != owner:
                raise Violation("owner", f"{self.name}: a link touches block {block} of {of} for {owner}")
            if part is not None and self._written[block, part]:
                raise Violation("owner", f"{self.name}: two links write block {block} of {owner}")
            self._touched[block] += 1
            self._written[block, part] += 1

    def let_go(self, blocks: list[int], part: Hashable) -> None:
        """The link no longer touches the blocks."""
        for block in blocks:
            self._touched[block] -= 1
            self._written[block, part] -= 1

    def fill(self, block: int, *stamp: object) -> None:
        """Writes KV that belongs to `stamp`: whose it is, and the number of the block in the prompt."""
        self._write(block, stamp, states=False)

    def fill_slot(self, block: int, *stamp: object) -> None:
        """Writes a state that belongs to `stamp` into the slot of that number."""
        self._write(block, stamp, states=True)

    def _write(self, block: int, stamp: tuple[object, ...], *, states: bool) -> None:
        for number, (group, layout) in enumerate(self.cache.tracks):
            if (self.cache.groups[group].kind == "state") == states:
                seed = zlib.crc32(repr((number, layout.dtype, *stamp)).encode())
                whole = self.ranks[0][number] if self.degree == ONE else _one_block(layout)
                index = block if self.degree == ONE else 0
                words = whole.bytes[index].flatten().numpy().view(np.uint64)
                np.add(_ramp(len(words)), seed, out=words)
                for rank, pools in enumerate(self.ranks if self.degree != ONE else ()):
                    part = whole.slice(*held_by(layout, self.degree, rank))
                    for mine, field in zip(pools[number].fields, part.fields, strict=True):
                        mine[block] = field[0]

    def check_tokens(self, hold: Hold, tokens: int) -> None:
        """Every token has the KV that the sender of this very attempt computed for this very place."""
        scratch = _computed(self.cache, hold.owner, tokens)
        first_ones = Hold(hold.owner, list(range(len(hold.blocks))), self.cache, 0, tokens)
        for rank, pools in enumerate(self.ranks):
            parts = [
                pool.slice(*held_by(layout, self.degree, rank))
                for pool, (_, layout) in zip(scratch.ranks[0], self.cache.tracks, strict=True)
            ]
            expected = self._read(parts, first_ones.tables(), tokens)
            pairs = zip(expected, self._read(pools, hold.tables(), tokens), strict=True)
            for (group, _), (wanted, found) in zip(self.cache.tracks, pairs, strict=True):
                if not torch.equal(wanted, found):
                    kind = self.cache.groups[group].kind
                    raise Violation("token", f"{hold.owner}: rank {rank} holds other KV of a {kind} group")

    def check_all_free(self) -> None:
        if len(self.free) != self.count or len(set(self.free)) != self.count:
            held = {block: self.owner[block] for block in range(self.count) if block not in self.free}
            raise Violation("leak", f"{self.name}: still held: {held}")

    def _read(self, pools: list[KVPool], tables: list[list[int]], tokens: int) -> list[torch.Tensor]:
        """KV that is needed of so many tokens, by track, as it lies in frames."""
        found, tracks = [], tracks_of(self.cache, routes_of(self.cache, ONE, ONE), tokens)
        for pool, track, (group, _) in zip(pools, tracks, self.cache.tracks, strict=True):
            out = torch.empty(pool.layout.nbytes(track.tokens - track.first), dtype=torch.uint8)
            pool.read(tables[group], track.first, track.tokens - track.first, out)
            found.append(out)
        return found


@functools.cache
def _scratch(cache: CacheLayout) -> Blocks:
    return Blocks("expected", cache, MOST_BLOCKS)


def _computed(cache: CacheLayout, key: Key, tokens: int) -> Blocks:
    """KV that an attempt's sender computes, in its first blocks and of the whole model; the next call overwrites it."""
    scratch, blocks = _scratch(cache), list(range(-(-tokens // BLOCK)))
    for number in blocks:
        scratch.fill(number, key, number)
    scratch.fill_slot(0, key)
    return scratch


class WatchedClaim:
    """A frame's claim, which the link's thread takes as it begins, some time before the frame's job uses it. The pool
    knows that the blocks are in use from then on until the frame has ended."""

    in_place = False

    def __init__(self, claim: BlockClaim, blocks: Blocks, owner: Key, touched: list[int], part: Hashable) -> None:
        self.written = claim.written
        self._claim = claim
        self._blocks = blocks
        self._touch = owner, touched, part
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
                self._blocks.let_go(*self._touch[1:])
            call(*outcome)

        return ended
