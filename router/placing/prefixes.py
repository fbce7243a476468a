"""Where the KV of which prompts probably is: what this router has placed on which worker, and what workers report, of
this router's prompts and of those that other routers have sent them.

A prompt is named by its chain: one digest for each UNIT tokens, over these and all before them, and over the namespace
(tenant and cache salt) that the KV may be shared in:

    chain[-1] = XXH3(namespace)
    chain[i]  = XXH3(tokens of unit i, seed chain[i - 1])

A digest decides on placement only, never on what is shared: workers compare blocks by a cryptographic hash.

The index models the cache of each worker as the worker keeps it: the least recently used is evicted first, and the end
of a prompt before its beginning. Answers are known when their requests end: the next turn of a conversation begins
with them. A worker may have evicted more than is known here, as it also keeps other KV that it has generated, and other
routers' prompts are known only when they are computed. It reports how many tokens of a prompt it had. Eviction is LRU:
if a unit is gone, everything that was used before it is gone too.
"""

import asyncio
import itertools
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvrelay.rpc.identity import WorkerId

UNIT = 32
"""Tokens of one digest. A prefix is known to this precision, whatever a worker's block size."""
Cached = list[tuple[int, list[int]]]
"""Tokens of the longest prefix that workers have, and the rows of the workers that have so many. The first entry, which
has no rows, counts for all that are in no other one."""
FEW = 8
"""Number of workers up to which they are looked up one by one."""
_UNIT_BYTES = UNIT * 4
_PART_UNITS = 512
"""Units that are hashed at a time, in some 0.2 ms; then others have their turn on the event loop."""


async def chain_of(tokens: "array[int]", namespace: str) -> "array[int]":
    """The chain of a prompt's whole units.

    Args:
        tokens: of four bytes each.
        namespace: within which KV may be shared.
    """
    chain = array("Q")
    for start in range(0, len(tokens) - UNIT + 1, _PART_UNITS * UNIT):
        chain = extended(chain, tokens[start : start + _PART_UNITS * UNIT], namespace)
        if len(tokens) >= start + _PART_UNITS * UNIT:
            await asyncio.sleep(0)
    return chain


def extended(chain: Sequence[int], tokens: "array[int]", namespace: str) -> "array[int]":
    """The chain of a prompt's whole units and of those of `tokens`, four bytes each, which follow these units."""
    data = memoryview(tokens).cast("B")
    longer = array("Q", chain)
    digest = longer[-1] if longer else xxh3_64_intdigest(namespace.encode())
    for start in range(0, len(data) - _UNIT_BYTES + 1, _UNIT_BYTES):
        digest = xxh3_64_intdigest(data[start : start + _UNIT_BYTES], digest)
        longer.append(digest)
    return longer


@dataclass(slots=True)
class _Cache:
    """The prefixes in the cache of one worker, as far as the router knows."""

    max_units: int = 0
    used: "OrderedDict[int, int]" = field(default_factory=OrderedDict)
    """Number of the latest placement with each unit, in ascending order. A prompt's beginning comes after its end, so
    that a unit is never here without those before it."""
    computing: dict[int, None] = field(default_factory=dict)
    """Numbers of the placements that the worker has not reported on, in order."""
    bit: int = 0
    """The worker's bit in `holders`."""
    holders: dict[int, int] = field(default_factory=dict)
    """Workers that have each unit, one bit for each; shared by all caches of an index."""

    def trim(self) -> None:
        while len(self.used) > self.max_units:
            self._lost(self.used.popitem(last=False)[0])

    def drop(self, unit: int) -> None:
        """Drops a unit. No later one of its prompt may be left."""
        del self.used[unit]
        self._lost(unit)

    def _lost(self, unit: int) -> None:
        left = self.holders[unit] & ~self.bit
        if left:
            self.holders[unit] = left
        else:
            del self.holders[unit]

    def find(self, chain: Sequence[int]) -> int:
        """Units of the longest known prefix."""
        return bisect_left(chain, True, key=lambda unit: unit not in self.used)

    def use(self, chain: Sequence[int], number: int) -> None:
        used, holders = self.used, self.holders
        for unit in reversed(chain):
            if unit not in used:
                holders[unit] = holders.get(unit, 0) | self.bit
            used[unit] = number
            used.move_to_end(unit)
        self.trim()

    def drop_until(self, number: int) -> None:
        """Drops the units that were last used by placement `number` or before."""
        while self.used and next(iter(self.used.values())) <= number:
            self._lost(self.used.popitem(last=False)[0])


class Expectation:
    """The prefix that one placement expects in its worker's cache. `end` must be called when it is over."""

    def __init__(self, cache: _Cache, chain: Sequence[int], number: int) -> None:
        self._cache, self._chain, self._number = cache, chain, number
        found = cache.find(chain)
        self._last_uses = array("Q", (cache.used[unit] for unit in itertools.islice(chain, found)))
        self._certain = next(iter(cache.computing), number)
        """Number of the first placement whose prompt may not be computed yet; the prompts of all earlier ones are."""
        cache.use(chain, number)
        cache.computing[number] = None

    @property
    def tokens(self) -> int:
        """Tokens that are expected there."""
        return UNIT * len(self._last_uses)

    def reported(self, cached_tokens: int, block_size: int) -> None:
        """Notes that the worker has computed the prompt, and how much of it was in the cache.

        Args:
            block_size: block size of the worker, which may lack a part of a block that another sequence has changed.
        """
        self._cache.computing.pop(self._number, None)
        if cached_tokens + max(UNIT, block_size) < self.tokens:
            last_use = self._last_uses[cached_tokens // UNIT]
            if last_use < self._certain:
                self._cache.drop_until(last_use)

    def end(self) -> None:
        """The placement is over. What the worker has not computed won't be there. Safe to call again."""
        if self._number not in self._cache.computing:
            return
        del self._cache.computing[self._number]
        used = self._cache.used
        for unit in itertools.islice(self._chain, len(self._last_uses), None):
            if used.get(unit) == self._number:
                self._cache.drop(unit)


class PrefixIndex:
    """The caches of all workers. Memory is bounded: some 250 bytes for each UNIT tokens, up to `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        """
        Args:
            max_tokens: tokens to remember, over all workers; 0 for none.
        """
        self._max_units = max_tokens // UNIT
        self._caches: dict[WorkerId, _Cache] = {}
        self._holders: dict[int, int] = {}
        """Workers that have each unit, as bits."""
        self._everybody = 0
        """The bits of all workers."""
        self._rows: list[int] = []
        """Position of each bit's worker in the order of `keep`; for unused bits anything."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Units that are remembered."""
        return sum(len(cache.used) for cache in self._caches.values())

    def __contains__(self, worker: WorkerId) -> bool:
        """Whether the worker is one of those of the latest `keep`: of others nothing is remembered."""
        return worker in self._caches

    def keep(self, workers: Iterable[tuple[WorkerId, int]]) -> None:
        """Forgets all other workers: an incarnation that has left never comes back.

        Args:
            workers: each with the tokens that its KV pool holds.
        """
        pools = dict(workers)
        share = self._max_units // max(1, len(pools))
        for worker in self._caches.keys() - pools.keys():
            gone = self._caches.pop(worker)
            gone.max_units = 0
            gone.trim()
            self._everybody &= ~gone.bit
        self._caches = {worker: self._caches.get(worker) or self._new_cache() for worker in pools}
        rows = {cache.bit.bit_length() - 1: row for row, cache in enumerate(self._caches.values())}
        self._rows = [rows.get(bit, 0) for bit in range(self._everybody.bit_length())]
        for worker, cache in self._caches.items():
            cache.max_units = min(share, pools[worker] // UNIT)
            cache.trim()

    def _new_cache(self) -> _Cache:
        """The cache of a worker that gets the first free bit."""
        bit = ~self._everybody & (self._everybody + 1)
        self._everybody |= bit
        return _Cache(bit=bit, holders=self._holders)

    def find(self, worker: WorkerId, chain: Sequence[int]) -> int:
        """Tokens of the longest prefix that the worker probably has."""
        cache = self._caches.get(worker)
        return 0 if cache is None or not chain else UNIT * cache.find(chain)

    def cached(self, chain: Sequence[int]) -> Cached:
        """Tokens of the longest prefix that each worker probably has; its row is its position in `keep`."""
        holders, left, high = self._holders, self._everybody, len(chain)
        groups: list[tuple[int, int]] = []
        while left and high:
            # The longest prefix that one of those who are left has. Whoever has a unit has all before it.
            length, too_long = 0, high + 1
            while too_long - length > 1:
                middle = (length + too_long) // 2
                if holders.get(chain[middle - 1], 0) & left:
                    length = middle
                else:
                    too_long = middle
            if not length:
                break
            having = holders[chain[length - 1]] & left
            groups.append((UNIT * length, having))
            left, high = left & ~having, length - 1
        groups.append((0, left))
        # Listing the rows of most of the workers would take longest.
        groups.sort(key=lambda group: group[1].bit_count(), reverse=True)
        return [(groups[0][0], []), *[(tokens, self._rows_of(having)) for tokens, having in groups[1:] if having]]

    def _rows_of(self, workers: int) -> list[int]:
        """The rows of workers that are given by their bits."""
        rows = []
        if workers.bit_count() <= FEW:
            while workers:
                lowest = workers & -workers
                rows.append(self._rows[lowest.bit_length() - 1])
                workers ^= lowest
            return rows
        return list(itertools.compress(self._rows, map(int, reversed(bin(workers)[2:]))))

    def note(self, worker: WorkerId, chain: Sequence[int]) -> None:
        """Notes that a worker has all of this."""
        if (cache := self._caches.get(worker)) is not None:
            cache.use(chain, next(self._numbers))

    def expect(self, worker: WorkerId, chain: Sequence[int]) -> Expectation:
        """Notes that a prompt is placed on a worker, which will have all of it."""
        return Expectation(self._caches.get(worker) or _Cache(), chain, next(self._numbers))
