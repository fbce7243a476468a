"""Real engines on this machine: workers in pairs or co-located, under a trace that is scaled to the model.

The conversation trace's prompts and answers are divided by PROMPT_SCALE and ANSWER_SCALE, its blocks of 512 tokens too,
so that equal prefixes stay equal. A request meets its targets if its first token comes within 5 times, and its others
come within 2 times, what they take on an idle pair at that length.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from clusters import plain_cluster, wait_answers
from simulated.traces import BLOCK, Arrival, at_rate

from kvrelay.client import AsyncClient, KvrelayError
from kvrelay.router.config import BATCH, INTERACTIVE
from nemesis.load import Stream
from support.processes import MODULES

PROMPT_SCALE, ANSWER_SCALE = 16, 8
VOCAB = 4_000
"""Tokens of prompts are smaller: all models have these."""
MOST_PROMPT = 2000
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
IDLE_LENGTHS = (32, 256, 768, MOST_PROMPT)
IDLE_ANSWER, IDLE_TIMES = 24, 3
REQUEST_SECONDS = 120.0
FIRST_COUNTED = 0.2
"""Share of a run at its beginning that doesn't count: caches fill."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A cluster."""

    roles: tuple[str, ...]
    router: Mapping[str, Any]
    """Options of the router."""
    engine: Mapping[str, Any]
    """Options of each worker's engine."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Latencies of an idle pair: seconds at each of IDLE_LENGTHS; between these, a line."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]

    def met(self, stream: Stream) -> tuple[bool, bool]:
        """Whether a request met its targets of TTFT and of TPOT."""
        first = stream.first_token
        if stream.error or first is None or len(stream.tokens) < stream.count:
            return False, False
        ttft, tpot = (float(np.interp(len(stream.prompt), IDLE_LENGTHS, each)) for each in (self.ttft, self.tpot))
        return first <= TTFT_FACTOR * ttft, tpot_of(stream) <= TPOT_FACTOR * tpot


def tpot_of(stream: Stream) -> float:
    """Mean seconds between two tokens."""
    return (stream.times[-1] - stream.times[0]) / max(1, len(stream.times) - 1)


def scaled(arrival: Arrival, tag: str) -> tuple[tuple[int, ...], int]:
    """The prompt of a request, scaled to the model, and the number of tokens of its answer. Those with other tags are
    other prompts."""
    size = BLOCK // PROMPT_SCALE
    tokens = [
        token for block in arrival.blocks for token in random.Random(f"{tag} {block}").choices(range(5, VOCAB), k=size)
    ]
    length = min(MOST_PROMPT, max(8, arrival.prompt_tokens // PROMPT_SCALE))
    return tuple(tokens[:length]), max(2, arrival.answer_tokens // ANSWER_SCALE)


async def ask(client: AsyncClient, stream: Stream, service_class: str = "") -> tuple[str, dict[str, float]]:
    """Runs a request to its end.

    Returns:
        The way in which it was served, and the relative errors of what the router had predicted of it, if it says so.
    """
    way, found = "", dict[str, float]()
    try:
        async for chunk in client.generate(
            stream.prompt,
            max_tokens=stream.count,
            ignore_eos=True,
            temperature=0.0,
            request_id=stream.name,
            timeout=REQUEST_SECONDS,
            slo_class=service_class,
        ):
            stream.tokens += chunk.token_ids
            stream.times += [time.monotonic()] * len(chunk.token_ids)
            if chunk.timeline is not None:
                timeline = chunk.timeline
                way = timeline.way
                came = timeline.first_token_seconds - timeline.route_seconds, tpot_of(stream)
                for name, seconds in zip(("first_token", "token"), came, strict=True):
                    if seconds > 0 and (told := getattr(timeline, f"predicted_{name}_seconds", 0.0)):
                        found[name] = abs(told / seconds - 1)
    except KvrelayError as error:
        stream.error = f"{error.code.name}: {error}"
    return way, found


@contextmanager
def cluster(model: Path, kind: Kind) -> Iterator[str]:
    """The address of a running cluster's router; nothing of it is left at the end."""
    engine = {"threads": 1, **kind.engine}
    worker = {"model": str(model.resolve()), "engine": engine}
    members: dict[str, Any] = {
        f"worker-{index}": {"module": MODULES[role], "options": {"role": role, **worker}}
        for index, role in enumerate(kind.roles)
    }
    router = {"model": str(model.resolve()), "grpc_port": 0, "http_port": None, **kind.router}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-routing-") as folder,
        plain_cluster(Path(folder), members, suspect_seconds=5.0, dead_seconds=15.0) as running,
    ):
        address = running.member("router-0").member.address
        wait_answers(address, running)
        yield address


def idle(address: str) -> Idle:
    """Measures an idle pair, one request at a time; the first of each length doesn't count."""

    async def main() -> Idle:
        ttfts, tpots = [], []
        async with AsyncClient(address) as client:
            for length in IDLE_LENGTHS:
                each = []
                for number in range(IDLE_TIMES + 1):
                    prompt = tuple(random.Random(f"{length} {number}").choices(range(5, VOCAB), k=length))
                    stream = Stream(f"idle-{length}-{number}", prompt, IDLE_ANSWER, None, time.monotonic())
                    await ask(client, stream)
                    if stream.error:
                        raise RuntimeError(f"the idle pair failed: {stream.error}")
                    each.append((stream.first_token or 0.0, tpot_of(stream)))
                ttfts.append(statistics.median(ttft for ttft, _ in each[1:]))
                tpots.append(statistics.median(tpot for _, tpot in each[1:]))
        return Idle(tuple(ttfts), tuple(tpots))

    return asyncio.run(main())


async def always(client: AsyncClient, trace: Sequence[Arrival], tag: str) -> None:
    """Sends requests of batch like those of the trace, one after another, until it is cancelled."""
    rng = random.Random(tag)
    for number in count():
        prompt, tokens = scaled(rng.choice(trace), f"{tag} {number}")
        await ask(client, Stream(f"{tag}-{number}", prompt, tokens, None, time.monotonic()), BATCH)


def load(
    address: str, trace: Sequence[Arrival], rate: float, seconds: float, targets: Idle, tag: str, batch: int = 0
) -> dict[str, Any]:
    """Sends the trace at a rate, and returns the figures of those that came after the caches had filled.

    Args:
        batch: requests of batch that are always under way besides.
    """
    arrivals = at_rate(trace, rate, seconds)

    async def main() -> list[tuple[Stream, tuple[str, dict[str, float]]]]:
        streams = []
        began = time.monotonic()
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
            others = [group.create_task(always(client, trace, f"{tag}-batch-{number}")) for number in range(batch)]
            for each in arrivals:
                await asyncio.sleep(began + each.at - time.monotonic())
                prompt, tokens = scaled(each, tag)
                stream = Stream(f"{tag}-{each.number}", prompt, tokens, None, time.monotonic())
                streams.append((stream, group.create_task(ask(client, stream, INTERACTIVE if batch else ""))))
            await asyncio.wait([task for _, task in streams])
            for other in others:
                other.cancel()
        return [(stream, task.result()) for stream, task in streams]

    done = asyncio.run(main())
    counted = done[int(FIRST_COUNTED * len(done)) :]
    streams = [stream for stream, _ in counted]
    served = [stream for stream in streams if not stream.error]
    gaps = sorted(max(np.diff(stream.times), default=0.0) for stream in served)
    met = [targets.met(stream) for stream in streams]
    found: dict[str, Any] = {
        "rate": rate,
        "requests": len(streams),
        "met": round(statistics.fmean(map(all, met)), 4),
        "met_ttft": round(statistics.fmean(ttft for ttft, _ in met), 4),
        "met_tpot": round(statistics.fmean(tpot for _, tpot in met), 4),
        "goodput": round(rate * statistics.fmean(map(all, met)), 4),
        **({"batch": batch} if batch else {}),
        "ttft_p99": round(float(np.quantile([stream.first_token or 0.0 for stream in served], 0.99)), 4),
        "ttft_p50": round(statistics.median(stream.first_token or 0.0 for stream in served), 4),
        "tpot_p50": round(statistics.median(map(tpot_of, served)), 5),
        "worst_gap_p99": round(float(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]), 4),
        "errors": sorted({stream.error for stream in streams if stream.error})[:3],
    }
    ways = Counter(way for _, (way, _) in counted)
    found["ways"] = {way: round(count / len(counted), 3) for way, count in sorted(ways.items()) if way}
    told = [each for _, (_, each) in counted if each]
    if told:
        for name in ("first_token", "token"):
            found[f"{name}_error_p50"] = round(statistics.median(each[name] for each in told if name in each), 3)
    return found


def measure(
    model: Path,
    kinds: Mapping[str, Kind],
    pair: tuple[str, ...],
    trace: Sequence[Arrival],
    rates: Sequence[float],
    seconds: float,
    batch: int = 0,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs each kind of cluster at each rate; yields its name and figures, and first the idle pair's.

    Args:
        pair: roles of the cluster whose idle latencies are the targets.
        batch: as for `load`.
    """
    with cluster(model, Kind(pair, {"placement": "least_work"}, {})) as address:
        targets = idle(address)
    ttft, tpot = ([round(seconds, 5) for seconds in each] for each in (targets.ttft, targets.tpot))
    yield "idle", {"lengths": IDLE_LENGTHS, "ttft": ttft, "tpot": tpot}
    for name, kind in kinds.items():
        with cluster(model, kind) as address:
            for number, rate in enumerate(rates):
                yield name, load(address, trace, rate, seconds, targets, f"{name.replace(' ', '-')}-{number}", batch)


def show(name: str, found: Mapping[str, Any]) -> None:
    print(json.dumps({"kind": name, **found}), flush=True)
