"""A whole benchmark: the workload, a warm-up, one run or those of a sweep, and their figures."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvrelay.cli.bench import result as results
from kvrelay.cli.bench.faces import Face, Sampling
from kvrelay.cli.bench.figures import figures
from kvrelay.cli.bench.load import Schedule, Tally, Watch, drive
from kvrelay.cli.bench.options import ArrivalOptions, BenchOptions
from kvrelay.cli.bench.workload import Ask, asks, offsets
from kvrelay.cluster.errors import RunError
from kvrelay.rpc.description import versions

WatchRun = Callable[[str, int], Watch]
"""Called before each run with its name and number of requests; gives what follows its progress."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark: its options, and the server that it measures."""

    options: BenchOptions
    sweep: tuple[str, Sequence[float]] | None
    """`rate` or `concurrency`, and its values; None for one run."""
    face_name: str
    target: str


async def measure(bench: Bench, face: Face, watch: WatchRun) -> results.Result:
    """Runs the benchmark. If the task is cancelled while requests are measured, what is done by then is the result.

    Raises:
        ClusterError: the server can't be used, or a file of the workload; or no request of the warm-up was completed.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    runs = []
    async with face:
        model = await face.model()
        found = await asks(bench.options.workload, face.tokenize, bench.options.seed)
        await _warm_up(bench.options, face, found, watch)
        for name, arrival in _points(bench):
            runs.append(await _run(bench.options, arrival, face, found, watch(name, len(found))))
            if runs[-1].interrupted:
                break
    return results.Result(
        results.FORMAT,
        started,
        bench.face_name,
        bench.target,
        model,
        _plain(asdict(bench.options)) | {"sweep": bench.sweep and list(bench.sweep)},
        results.this_machine(),
        versions(results.PACKAGES),
        runs,
    )


def _points(bench: Bench) -> list[tuple[str, ArrivalOptions]]:
    """Each run's name and arrivals."""
    arrival = bench.options.arrival
    if bench.sweep is None:
        return [("", arrival)]
    name, values = bench.sweep
    if name == "rate":
        return [(f"{value:g} requests/s", replace(arrival, request_rate=value)) for value in values]
    return [(f"{value:g} at once", replace(arrival, concurrency=int(value))) for value in values]


async def _warm_up(options: BenchOptions, face: Face, found: Sequence[Ask], watch: WatchRun) -> None:
    if not options.warmup:
        return
    follow, progress = watch("warm-up", options.warmup), Tally()
    sampling = _sampling(options)
    for at in range(options.warmup):
        reply = await face.send(found[at % len(found)], sampling)
        progress.sent += 1
        progress.done += 1
        progress.failed += not reply.ok
        follow(progress)
        if progress.failed == options.warmup:
            raise RunError(f"no request of the warm-up was completed; the last one: {reply.error}")


async def _run(
    options: BenchOptions, arrival: ArrivalOptions, face: Face, found: Sequence[Ask], watch: Watch
) -> results.Run:
    schedule = Schedule(
        found,
        _times(arrival, found, options.seed),
        arrival.concurrency,
        _sampling(options),
    )
    driven = await drive(face, schedule, watch)
    return results.Run(
        arrival.request_rate if math.isfinite(arrival.request_rate) else None,
        arrival.concurrency,
        figures(driven.requests, driven.duration, options.goodput, options.percentiles),
        driven.requests,
        driven.interrupted,
    )


def _times(arrival: ArrivalOptions, found: Sequence[Ask], seed: int) -> list[float] | None:
    """The times at which requests are due; None in a closed loop, where each is sent as soon as there is room."""
    if arrival.arrivals == "trace":
        return [(ask.at or 0.0) / arrival.speed for ask in found]
    if math.isinf(arrival.request_rate) and arrival.concurrency:
        return None
    return offsets(arrival, len(found), np.random.default_rng([seed, 2]))


def _sampling(options: BenchOptions) -> Sampling:
    """Sampling of the first request of a run. The warm-up and each run have a cache salt of their own."""
    workload = options.workload
    salt = "" if workload.warm_cache else uuid.uuid4().hex
    return Sampling(workload.ignore_eos, workload.temperature, options.seed, salt)


def _plain(value: Any) -> Any:
    """The options as JSON values: text for infinity and paths."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else str(value)
