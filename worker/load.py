"""A worker's load and costs, as its routers are told: what the engine thread reads between two steps, and what waits
for it.

Everything here runs on the event loop, except `read` and `take`, which run with the engine's lock, on any thread.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvrelay.costs.handoff import KvBytes, LinkFit
from kvrelay.costs.worker import WorkerCosts
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.room import Room
from kvrelay.internal.v1.worker_pb2 import Blocks, Costs, Holding, Load, Promised, Requests
from kvrelay.rpc.costs import costs_message
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.worker.relay.stream import RelayStream

REPORT_SECONDS = 0.03
"""Longest time in seconds until a router learns of a load that others' requests have changed: routers should not choose
the same worker."""

SOON_SECONDS = 0.5
"""Seconds within which a request's end is soon: a prompt may be computed for its blocks meanwhile."""
COSTS_SECONDS = 1.0
"""Least time in seconds between two messages of costs."""
CHANGED = 0.05
"""Relative change of a coefficient from which on routers are told."""
MOST_LINKS = 256
"""Number of senders whose hand-offs are remembered."""
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
        """Adds a stream that is told each change from now on."""
        self._streams.add(stream)

    def detach(self, stream: RelayStream) -> None:
        self._streams.discard(stream)

    @property
    def running(self) -> int:
        """Requests that the engine computes, by the latest reading."""
        return self._latest.load.requests.running

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
            yielding_tokens=scheduler.yielding_tokens,
            computed_tokens=self._engine.computed_tokens,
            prompt_tokens=self._engine.prompt_tokens,
            steps=self._engine.steps,
            step_seconds=self._engine.step_seconds,
            growth_blocks=use.growth,
            ending=Promised(requests=use.ending_requests, blocks=use.ending),
            yielding=Promised(requests=use.yielding_requests, blocks=use.yielding),
            yielding_growth_blocks=use.yielding_growth,
            holdings=[Holding(holder=holder, blocks=blocks) for holder, blocks in use.largest()],
        )
        return LoadReading(read, self._taken_tokens, self._taken_blocks)

    def _note_pace(self) -> None:
        engine = self._engine
        if steps := engine.steps - self._steps:
            latest = (engine.step_seconds - self._step_seconds) / steps
            self._pace = PACE_DECAY * self._pace + (1 - PACE_DECAY) * latest if self._pace else latest
            self._steps, self._step_seconds = engine.steps, engine.step_seconds


class CostReports:
    """Costs of the worker's steps, which its engine fits, and of the hand-offs to it.

    A new message is made when one of them has changed by CHANGED, COSTS_SECONDS after the last look at the earliest.
    """

    def __init__(self, engine: Engine, kv: KvBytes, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            kv: bytes of a sequence's cache, as `kv_bytes` of the engine's layout.
            clock: in seconds.
        """
        self._engine, self._clock, self._kv = engine, clock, kv
        self._links: OrderedDict[str, LinkFit] = OrderedDict()
        """Fit by the sending worker's name; the latest used last."""
        self._due = -math.inf
        self._told: dict[str, float] = {}
        """Coefficients of the latest message, by name."""
        self._message: Costs | None = None

    def received(self, stats: TransferStats) -> None:
        """Notes that a hand-off to here was committed."""
        fit = self._links.setdefault(stats.sender, LinkFit())
        self._links.move_to_end(stats.sender)
        fit.add(stats.exposed_nbytes, stats.handoff_seconds)
        while len(self._links) > MOST_LINKS:
            self._links.popitem(last=False)

    def now(self) -> Costs | None:
        """The latest message; None before the engine's second step."""
        if (now := self._clock()) >= self._due:
            self._due = now + COSTS_SECONDS
            costs = self.costs()
            if costs is not None:
                figures, told = _figures(costs), self._told
                if figures.keys() != told.keys() or not all(_near(figures[name], told[name]) for name in told):
                    self._message, self._told = costs_message(costs), figures
        return self._message

    def costs(self) -> WorkerCosts | None:
        """The costs as the engine's thread has found them last; None before the second step. Doesn't take the engine's
        lock: that thread may hold it for long."""
        scheduler = self._engine.scheduler
        fit, step = scheduler.fit, scheduler.fit.latest
        if step is None:
            return None
        links = {name: link for name, each in self._links.items() if (link := each.cost()) is not None}
        config = scheduler.config
        return WorkerCosts(
            step,
            config.max_batch_tokens,
            config.step_seconds,
            fit.decode_error,
            fit.prompt_error,
            self._kv,
            links,
            max(0.0, fit.extra),
        )

    def errors(self) -> dict[str, float]:
        """Mean relative errors of predicted steps without prompts, steps with them, and hand-offs: the mean over all
        hand-offs to here."""
        fit = self._engine.scheduler.fit
        count = sum(link.handoffs for link in self._links.values())
        links = sum(link.error * link.handoffs for link in self._links.values()) / max(1, count)
        return {"decode": fit.decode_error, "prompt": fit.prompt_error, "handoff": links}


def kv_bytes(cache: CacheLayout) -> KvBytes:
    """Bytes that a hand-off of sequences of this layout has."""
    token, fixed, windows = 0.0, 0.0, []
    for group in cache.groups:
        each = float(sum(track.token_bytes for track in group.tracks))
        if group.kind == "state":
            fixed += each
        elif group.kind == "window":
            windows.append((each, group.window))
        else:
            token += each
    return KvBytes(token, tuple(windows), fixed)


def _figures(costs: WorkerCosts) -> dict[str, float]:
    """The coefficients by name."""
    found = asdict(costs.step) | {"extra": costs.extra}
    for sender, link in costs.links.items():
        found |= {f"fixed {sender}": link.fixed, f"byte {sender}": link.byte}
    return found


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= CHANGED * max(one, other)
