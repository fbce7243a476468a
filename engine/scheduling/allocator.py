"""Takes the blocks of sequences that start, and of reservations, from the pool: by the shares of their holders.

Whoever found too few blocks first is not overtaken for ever: only requests of holders of little pass it, as far as they
take no more than the reserve (`engine/scheduling/room.py`), which it would not get.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.limits import SequenceLimits
from kvrelay.engine.scheduling.room import Room, Use
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.sequence import Status


class Allocator:
    """Allocates the blocks of one scheduler, whose lists it reads."""

    def __init__(
        self,
        prefix: PrefixIndex,
        limits: SequenceLimits,
        live: Mapping[tuple[str, int], EngineSequence],
        running: Sequence[EngineSequence],
        ready: Sequence[EngineSequence],
        waiting: deque[EngineSequence],
    ) -> None:
        self._prefix, self._limits = prefix, limits
        self._live, self._running, self._ready, self._waiting = live, running, ready, waiting
        self._room = Room(limits.total_blocks, limits.block_size)
        self._ever_reserved: list[tuple[Hold, Request]] = []
        """Reservations that were not resumed, also released ones until the next `_reserved`."""
        self.starved: EngineSequence | None = None
        """The last sequence for which there were too few free blocks."""

    @property
    def _reserved(self) -> list[tuple[Hold, Request]]:
        """Reservations that were neither resumed nor released. A reservation's owner releases it without telling the
        allocator."""
        self._ever_reserved = [(hold, request) for hold, request in self._ever_reserved if not hold.released]
        return self._ever_reserved

    @property
    def reservations(self) -> int:
        """Number of reservations that were neither resumed nor released."""
        return len(self._reserved)

    def reservations_within(self, rank: int) -> int:
        """Number of reservations for requests of this rank or a smaller one."""
        return sum([request.urgency.rank <= rank for _, request in self._reserved])

    @property
    def least_reserved_rank(self) -> int | None:
        """The smallest rank of requests with reservations; None without any."""
        return min([request.urgency.rank for _, request in self._reserved], default=None)

    def lacking(self, sequence: EngineSequence) -> int:
        """Blocks that others would have to give up, so that a waiting sequence gets its own."""
        needed = self._limits.blocks_for(len(sequence.tokens)) + self._spare_for(sequence, self.use())
        return needed - self._prefix.pool.available

    def needed(self, request: Request) -> int:
        """Free blocks with which a request would get a reservation that it was refused."""
        use, length = self.use(), len(request.tokens)
        use.add(0, self._room.wanted(request, length), request.holder)
        return self._limits.blocks_for(length + 1) + self._spare(use, request)

    @property
    def reserving(self) -> set[tuple[int, int]]:
        """(rank, holder) of reservations whose sequences are still to come."""
        return {(request.urgency.rank, request.holder) for _, request in self._reserved}

    def use(self, soon_tokens: float = 0) -> Use:
        """The blocks that sequences and reservations take; `soon_tokens` as in `Room.use`."""
        return self._room.use(self._live.values(), self._reserved, soon_tokens)

    def reserve(self, request: Request, *, passing: bool) -> Hold | None:
        """Blocks for a reservation; None if there are too few, or others go first (`Scheduler.reserve`)."""
        use, length = self.use(), len(request.tokens)
        use.add(0, self._room.wanted(request, length), request.holder)
        starved = self._waiting[0] if self._waiting and self._waiting[0] is self.starved else None
        if starved is not None and starved.rank > request.urgency.rank:
            starved = None
        if (passing or starved is not None) and not self._may_pass(use, request, starved):
            return None
        spare = self._spare(use, request)
        hold = self._allocate(request, request.tokens, [], length + 1, length, spare, imports=length)
        if hold is not None:
            hold.pass_to(f"reservation {request}")
            self._ever_reserved.append((hold, request))
        return hold

    def resumed(self, hold: Hold) -> None:
        """Counts a reservation's blocks as those of a sequence from now on."""
        self._ever_reserved = [other for other in self._reserved if other[0] is not hold]

    @property
    def kept_from_growth(self) -> int:
        """Blocks that growth leaves to holders of little, where holders are known."""
        return self._room.reserve if any(sequence.request.holder for sequence in self._running) else 0

    def may_grow(self, sequence: EngineSequence) -> bool:
        """Whether a running sequence may have one more block, should one be free."""
        available = self._prefix.pool.available
        return available > self._room.reserve or available > self._room.kept(self.use(), sequence.request)

    def next_waiting(self, *, first_only: bool) -> EngineSequence | None:
        """The first waiting sequence, with blocks for all of its tokens; if there are too few, the first of a holder of
        little, unless `first_only`. None if neither gets any."""
        use, first = self.use(), self._waiting[0]
        if self._start(first, use):
            return first
        self.starved = first
        if first_only:
            return None
        passing = (one for one in self._waiting if one is not first and self._may_pass(use, one.request, first))
        return next((one for one in passing if self._start(one, use)), None)

    def _may_pass(self, use: Use, request: Request, first: EngineSequence | None) -> bool:
        """Whether a request, which `use` counts, may get blocks before those that have waited for longer."""
        room = self._room
        # A request that needs more than the pool without the reserve waits for all others, so nobody passes it.
        beside = first is None or room.wanted(first.request, len(first.tokens)) <= room.total - room.reserve
        return beside and room.small(use, request) and room.within_reserve(use)

    def _spare(self, use: Use, request: Request) -> int:
        """Free blocks that must be left to others: the reserve, and one for each running sequence, so that a new one
        doesn't cause a preemption at once. None if nothing else holds any, since nothing would free more."""
        if request.holder and self._room.small(use, request) and self._room.within_reserve(use):
            return 0
        busy = self._running or self._ready or self._reserved
        return max(len(self._running), self._room.kept(use, request)) if busy else 0

    def _spare_for(self, sequence: EngineSequence, use: Use) -> int:
        """`_spare` for a waiting sequence."""
        spare = self._spare(use, sequence.request)
        if sequence.status is Status.PREEMPTED and spare:
            # It would be recomputed in vain if the growth of the others soon took its blocks.
            spare = max(spare, self._room.use([*self._running, *self._ready], self._reserved).growth)
        return spare

    def _start(self, sequence: EngineSequence, use: Use) -> bool:
        """Blocks for all tokens of a waiting sequence, cached ones first; False if there are too few."""
        # The logits of a token that comes from the prefix cache are not computed.
        length, request = len(sequence.tokens), sequence.request
        limit = (sequence.unscored or length) - 1
        hold = self._allocate(request, sequence.tokens, sequence.chain, length, limit, self._spare_for(sequence, use))
        if hold is None:
            return False
        hold.pass_to(sequence.hold.owner)
        sequence.hold.release()
        sequence.hold = hold
        sequence.num_computed = hold.published * self._limits.block_size + hold.partial
        if sequence.status is Status.WAITING:
            sequence.cached_tokens = sequence.furthest = sequence.num_computed
        return True

    def _allocate(
        self,
        request: Request,
        tokens: Sequence[int],
        chain: list[bytes],
        capacity: int,
        limit: int,
        spare: int,
        imports: int | None = None,
    ) -> Hold | None:
        """Blocks for `capacity` tokens, of which the first `limit` may come from the prefix cache. None unless `spare`
        blocks are left. `imports` as for `PrefixIndex.allocate`."""
        blocks = self._limits.blocks_for(capacity)
        return self._prefix.allocate(tokens, request.tenant, chain, blocks, limit, spare, imports=imports)
