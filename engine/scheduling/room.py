"""How the holders of requests share a KV pool: what each is expected to take of it, and who gives blocks up.

A part of the pool, RESERVE_SHARE, is kept for holders of little: those whose requests are expected to have at most so
many blocks in the end. So a short request finds blocks, although another holder's long ones have taken all the rest. A
holder who is alone has all but this reserve. Requests whose holder is unknown share without it.

    blocks of a sequence     | held          | growth           |
                             0               len(hold.blocks)   wanted: for the tokens that it is expected to have
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.request import Request
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.sequence import Status

RESERVE_SHARE = 8
"""Divisor of a pool's blocks that yields its reserve."""
LACKING_STEPS = 16
"""Steps for which blocks are kept for a reservation that has found too few, and hasn't asked again."""
REPORTED = 8
"""Number of holders of most that a worker reports."""


class Lacking(NamedTuple):
    """A reservation that has found too few blocks, and for which sequences of greater ranks give up theirs."""

    rank: int
    blocks: int
    until: int
    """Number of the step after which it is forgotten, unless it asks again."""


def expected_length(request: Request, length: int) -> int:
    """Tokens that a sequence of `length` tokens is expected to have in the end. One that has passed what was expected
    of it may go on to `max_tokens`."""
    expected = request.prompt_tokens + request.expected_tokens
    return expected if request.expected_tokens and length < expected else request.most_tokens


@dataclass(slots=True)
class Use:
    """Blocks that the requests of an engine take of its pool."""

    growth: int = 0
    """Number of blocks that the requests are expected to need beyond those that they hold."""
    wanted: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Blocks that each holder's requests are expected to have in the end."""
    ending: int = 0
    """Blocks of the running requests that are expected to end soon."""
    ending_requests: int = 0
    yielding: int = 0
    """Blocks of the requests of classes less urgent than `interactive`, which give them up for more urgent ones."""
    yielding_growth: int = 0
    """Blocks among `growth` of these requests."""
    yielding_requests: int = 0

    def add(self, held: int, wanted: int, holder: int) -> None:
        """Counts a request that holds so many blocks, and is expected to have `wanted` in the end."""
        wanted = max(held, wanted)
        self.growth += wanted - held
        self.wanted[holder] += wanted

    def largest(self) -> list[tuple[int, int]]:
        """(holder, blocks) of the holders that take most, the largest first; without the unknown holder 0."""
        known = ((holder, blocks) for holder, blocks in self.wanted.items() if holder)
        return sorted(known, key=lambda each: -each[1])[:REPORTED]


@dataclass(frozen=True, slots=True)
class Room:
    """The shares of one pool."""

    total: int
    """Number of blocks in the pool."""
    block_size: int

    @property
    def reserve(self) -> int:
        """Blocks that are kept for holders of little."""
        return self.total // RESERVE_SHARE

    def wanted(self, request: Request, length: int) -> int:
        """Blocks that a sequence of `length` tokens is expected to have in the end."""
        return -(-expected_length(request, length) // self.block_size)

    def use(
        self, sequences: Iterable[EngineSequence], reserved: Iterable[tuple[Hold, Request]], soon_tokens: float = 0
    ) -> Use:
        """The blocks that sequences and reservations take.

        Args:
            soon_tokens: a running sequence that lacks no more tokens than this is expected to end soon.
        """
        use, block_size = Use(), self.block_size
        for sequence in sequences:
            request, length, held = sequence.request, len(sequence.tokens), len(sequence.hold.blocks)
            end = length if sequence.handoff else expected_length(request, length)
            use.add(held, wanted := -(-end // block_size), request.holder)
            if request.urgency.yields:
                use.yielding += held
                use.yielding_growth += max(0, wanted - held)
                use.yielding_requests += held > 0
            if end - length <= soon_tokens and sequence.status is Status.RUNNING:
                use.ending += held
                use.ending_requests += 1
        for hold, request in reserved:
            use.add(len(hold.blocks), self.wanted(request, len(request.tokens)), request.holder)
        return use

    def small(self, use: Use, request: Request) -> bool:
        """Whether the holder of a request, which `use` counts, takes no more than the reserve."""
        return request.holder != 0 and use.wanted[request.holder] <= self.reserve

    def within_reserve(self, use: Use) -> bool:
        """Whether all holders of little together take no more than the reserve."""
        return self._little(use) <= self.reserve

    def kept(self, use: Use, request: Request) -> int:
        """Free blocks that must be left to others when the request, which `use` counts, gets blocks."""
        if not request.holder or self.small(use, request):
            return 0
        return max(0, self.reserve - self._little(use))

    def _little(self, use: Use) -> int:
        return sum([blocks for holder, blocks in use.wanted.items() if holder and blocks <= self.reserve])


def dispensable(sequences: Sequence[EngineSequence], among: Iterable[EngineSequence]) -> EngineSequence | None:
    """The sequence among these that gives its blocks up first: of the greatest rank, then of the holder whose sequences
    have most blocks, then the last in order. None if there are none."""
    held: defaultdict[int, int] = defaultdict(int)
    for sequence in sequences:
        held[sequence.request.holder] += len(sequence.hold.blocks)
    return max(among, key=lambda one: (one.rank, held[one.request.holder], one.order), default=None)


def victim(running: Sequence[EngineSequence], ready: Iterable[EngineSequence]) -> EngineSequence | None:
    """The sequence that gives its blocks up, so that another one can go on (`dispensable`).

    The first running one never does, unless one of a smaller rank is ready: so one always advances. Of one rank, each
    becomes the first in time. None if there is no other.

    Args:
        running: in order (`Sequence.order`).
        ready: in order.
    """
    every = [*running, *ready]
    first = min([every[0], *itertools.islice(ready, 1)], key=lambda one: one.rank)
    return dispensable(every, (sequence for sequence in every if sequence is not first))
