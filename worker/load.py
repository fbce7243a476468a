"""A worker's load, as its routers are told: what the engine thread reads between two steps, and what waits for it.

Everything here runs on the event loop, except `read` and `take`, which run with the engine's lock, on any thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.room import Room
from kvrelay.internal.v1.worker_pb2 import Blocks, Holding, Load, Promised, Requests
from kvrelay.worker.relay.stream import RelayStream

REPORT_SECONDS = 0.03
"""Longest time in seconds until a router learns of a load that others' requests have changed: routers should not choose
the same worker."""

SOON_SECONDS = 0.5
"""Seconds within which a request's end is soon: a prompt may be computed for its blocks meanwhile."""
PACE_DECAY = 0.9
"""Factor by which the time of earlier steps counts less with each reading."""


@dataclass(frozen=True, slots=True)
class LoadReading:
    """The engine's load at one moment."""

    load: Load
    taken_tokens: int
    """Number of tokens of all requests that the engine has taken so far."""
    taken_blocks: int
    """Number of blocks that these requests were expected to need in the end."""


class LoadReports:
    """Keeps the latest reading, and reports each change to every router: at once if blocks were freed."""

    def __init__(self, engine: Engine, block_size: int, promised: Callable[[], Promised]) -> None:
        """
        Args:
            block_size: tokens per block.
            promised: what the worker's role has promised.
        """
        self._engine = engine
        self._block_size = block_size
        self._promised = promised
        self._loop = asyncio.get_running_loop()
        self._streams: set[RelayStream] = set()
        self._room = Room(engine.scheduler.prefix.pool.total, block_size)
        self._given_tokens = self._given_blocks = 0
        """Tokens of all requests that the engine has taken or is about to take, and the blocks that they were expected
        to need in the end."""
        self._taken_tokens = self._taken_blocks = 0
        self._steps, self._step_seconds, self._pace = 0, 0.0, 0.0
        """Figures of the latest reading; `_pace` is the recent time of a step, in seconds."""
        self._latest = self.read()
        self._report: asyncio.TimerHandle | None = None

    def attach(self, stream: RelayStream) -> None:
        """Tells this stream each change from now on."""
        self._streams.add(stream)

    def detach(self, stream: RelayStream) -> None:
        self._streams.discard(stream)

    def now(self) -> Load:
        """The current load."""
        load = Load()
        load.CopyFrom(self._latest.load)
        load.pending_tokens += self._given_tokens - self._latest.taken_tokens
        load.growth_blocks += self._given_blocks - self._latest.taken_blocks
        load.promised.CopyFrom(self._promised())
        return load

    def give(self, request: Request) -> None:
        """Counts a request that is on its way to the engine, which calls `take` when it has arrived."""
        self._given_tokens += len(request.tokens)
        self._given_blocks += self._room.wanted(request, len(request.tokens))

    def update(self, reading: LoadReading, *, tell: bool = False) -> bool:
        """Takes a new reading; with `tell` the routers get it at once. Returns whether blocks were freed."""
        freed = reading.load.blocks.held < self._latest.load.blocks.held
        self._latest = reading
        if freed or tell:
            self._tell()
        else:
            self.changed()
        return freed

    def changed(self) -> None:
        """Tells the routers soon, except those that an event of their own requests tells before."""
        if self._report is None:
            self._report = self._loop.call_later(REPORT_SECONDS, self._tell)

    def _tell(self) -> None:
        if self._report is not None:
            self._report.cancel()
            self._report = None
        for stream in self._streams:
            stream.report()

    # With the engine's lock.

    def take(self, request: Request) -> None:
        """Counts a request that the engine has taken."""
        self._taken_tokens += len(request.tokens)
        self._taken_blocks += self._room.wanted(request, len(request.tokens))

    def read(self) -> LoadReading:
        """The engine's load now."""
        self._note_pace()
        scheduler = self._engine.scheduler
        pool, use = scheduler.prefix.memory, scheduler.use(SOON_SECONDS / self._pace if self._pace else 0.0)
        read = Load(
            blocks=Blocks(total=pool.total, free=pool.free, cached=pool.cached, held=pool.held, size=self._block_size),
            requests=Requests(waiting=scheduler.waiting, running=scheduler.running, free_slots=scheduler.free_slots()),
            pending_tokens=scheduler.pending_tokens,
            computed_tokens=self._engine.computed_tokens,
            steps=self._engine.steps,
            step_seconds=self._engine.step_seconds,
            growth_blocks=use.growth,
            ending=Promised(requests=use.ending_requests, blocks=use.ending),
            holdings=[Holding(holder=holder, blocks=blocks) for holder, blocks in use.largest()],
        )
        return LoadReading(read, self._taken_tokens, self._taken_blocks)

    def _note_pace(self) -> None:
        engine = self._engine
        if steps := engine.steps - self._steps:
            latest = (engine.step_seconds - self._step_seconds) / steps
            self._pace = PACE_DECAY * self._pace + (1 - PACE_DECAY) * latest if self._pace else latest
            self._steps, self._step_seconds = engine.steps, engine.step_seconds
