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

from kvrelay.cli.bench.faces import Face, Reply, Sampling
from kvrelay.cli.bench.workload import Ask


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request. Times are in seconds since the benchmark's start."""

    index: int
    scheduled: float
    """Time at which it was due; in a closed loop, at which it was sent."""
    sent: float
    ended: float
    """Time at which its answer was complete, or at which it had failed."""
    wanted_tokens: int
    reply: Reply

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first message."""
        return self.reply.arrivals[0]

    @property
    def latency(self) -> float:
        """Seconds from sending to the last message."""
        return self.reply.arrivals[-1]

    @property
    def itls(self) -> list[float]:
        """Seconds between each two messages."""
        return [later - earlier for earlier, later in pairwise(self.reply.arrivals)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        more = self.reply.output_tokens - 1
        return (self.latency - self.ttft) / more if more > 0 else None

    @property
    def late(self) -> float:
        """Seconds from its scheduled arrival to its sending."""
        return self.sent - self.scheduled


@dataclass(slots=True)
class Progress:
    """The progress of a benchmark, in requests."""

    sent: int = 0
    done: int = 0
    failed: int = 0


Watch = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that `drive` sends, their times and their limits."""

    asks: Sequence[Ask]
    times: Sequence[float] | None
    """Seconds from the start to each arrival; None: a closed loop."""
    concurrency: int
    """Most requests in flight; 0: no limit."""
    sampling: Sampling
    """Sampling of the first request; each later one has the next seed."""


@dataclass(frozen=True, slots=True)
class Driven:
    """The measurements of one load."""

    samples: list[Sample]
    """One sample for each request that has ended, in the order of the requests."""
    duration: float
    """Seconds from the start to the last answer."""
    interrupted: bool = False
    """Whether it was cancelled: requests that weren't done then have no sample."""


async def drive(face: Face, load: Load, watch: Watch) -> Driven:
    """Sends all requests, and waits for all answers. If the calling task is cancelled, what is done by then counts.

    Args:
        watch: called after each change.
    """
    progress = Progress()
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    began = time.perf_counter()

    async def one(index: int) -> Sample:
        ask = load.asks[index]
        if gate is not None:
            await gate.acquire()
        try:
            sent = time.perf_counter() - began
            progress.sent += 1
            watch(progress)
            reply = await face.send(ask, replace(load.sampling, seed=(load.sampling.seed + index) % 2**63))
            ended = time.perf_counter() - began
        finally:
            if gate is not None:
                gate.release()
        progress.done += 1
        progress.failed += not reply.ok
        watch(progress)
        due = sent if load.times is None else load.times[index]
        return Sample(index, min(due, sent), sent, ended, ask.output_tokens, reply)

    tasks: list[asyncio.Task[Sample]] = []
    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(load.asks)):
                if load.times is not None and (wait := began + load.times[index] - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(index), name=f"request {index}"))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not any(each.done() and not each.cancelled() for each in tasks):
            raise
        task.uncancel()
        interrupted = True
    samples = [each.result() for each in tasks if not each.cancelled()]
    return Driven(samples, time.perf_counter() - began, interrupted)
