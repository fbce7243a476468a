"""Sends requests at their times, and notes what came of each.

An open loop never waits for answers: a request that is due is sent, however slow the server is. With a limit on the
requests in flight, one that is due may have to wait for its turn; its latency from its scheduled arrival shows that,
its latency from its sending does not. A benchmark that reports the latter only would hide the wait that a user has
(coordinated omission).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from kvrelay.cli.bench.faces import Face, Reply, Sampling
from kvrelay.cli.bench.workload import Ask


@dataclass(frozen=True, slots=True)
class Request:
    """One measured request. Times are in seconds."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    scheduled: float
    """Time at which it was due, since the start of its run; in a closed loop, at which it was sent."""
    sent: float
    """Time at which it was sent, since the start of its run."""
    ended: float
    """Time at which its answer was complete, or at which it had failed, since the start of its run."""
    ttft: float | None
    """Time from sending to the first message; null if none came."""
    latency: float | None
    """Time from sending to the last message; null if none came."""
    itls: list[float]
    """Times between each two messages."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wanted_tokens: int
    """Completion tokens that were asked for."""
    ok: bool
    error: str
    stages: dict[str, float] | None
    """The router's timeline of the request, over gRPC only."""

    @classmethod
    def of(cls, reply: Reply, wanted: int, scheduled: float, sent: float, ended: float) -> "Request":
        """The record of a reply; the times are since the start of the run."""
        return cls(
            scheduled,
            sent,
            ended,
            reply.arrivals[0] if reply.arrivals else None,
            reply.arrivals[-1] if reply.arrivals else None,
            [later - earlier for earlier, later in pairwise(reply.arrivals)],
            reply.prompt_tokens,
            reply.cached_tokens,
            reply.output_tokens,
            wanted,
            reply.ok,
            reply.error,
            reply.stages,
        )

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return sum(self.itls) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def late(self) -> float:
        """Seconds from its scheduled arrival to its sending."""
        return self.sent - self.scheduled


@dataclass(slots=True)
class Tally:
    """The progress of a benchmark, in requests."""

    sent: int = 0
    done: int = 0
    failed: int = 0


Watch = Callable[[Tally], object]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests that `drive` sends, their times and their limits."""

    asks: Sequence[Ask]
    times: Sequence[float] | None
    """Seconds from the start to each arrival; None: a closed loop."""
    concurrency: int
    """Most requests in flight; 0: no limit."""
    sampling: Sampling
    """Sampling of the first request; each later one has the next seed."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The measurements of one schedule."""

    requests: list[Request]
    """The requests that have ended, in the order in which they were due."""
    duration: float
    """Seconds from the start to the last answer."""
    interrupted: bool = False
    """Whether it was cancelled: requests that weren't done then are missing."""


async def drive(face: Face, schedule: Schedule, watch: Watch) -> LoadResult:
    """Sends all requests, and waits for all answers. If the calling task is cancelled, what is done by then counts.

    Args:
        watch: called after each change.
    """
    progress = Tally()
    gate = asyncio.Semaphore(schedule.concurrency) if schedule.concurrency else None
    began = time.perf_counter()

    async def one(index: int) -> Request:
        ask = schedule.asks[index]
        if gate is not None:
            await gate.acquire()
        try:
            sent = time.perf_counter() - began
            progress.sent += 1
            watch(progress)
            reply = await face.send(ask, replace(schedule.sampling, seed=(schedule.sampling.seed + index) % 2**63))
            ended = time.perf_counter() - began
        finally:
            if gate is not None:
                gate.release()
        progress.done += 1
        progress.failed += not reply.ok
        watch(progress)
        due = sent if schedule.times is None else schedule.times[index]
        return Request.of(reply, ask.output_tokens, min(due, sent), sent, ended)

    tasks: list[asyncio.Task[Request]] = []
    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(schedule.asks)):
                if schedule.times is not None and (wait := began + schedule.times[index] - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(index), name=f"request {index}"))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not any(each.done() and not each.cancelled() for each in tasks):
            raise
        task.uncancel()
        interrupted = True
    requests = [each.result() for each in tasks if not each.cancelled()]
    return LoadResult(requests, time.perf_counter() - began, interrupted)
