"""Real engines on this machine: workers in pairs or co-located, under a trace that is scaled to the model.

The conversation trace's prompts and answers are divided by PROMPT_SCALE and ANSWER_SCALE, its blocks of 512 tokens too,
so that equal prefixes stay equal. A request meets its targets if its first token comes within 5 times, and its others
come within 2 times, what they take on an idle pair at that length. The client is that of `kvrelay bench`.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clusters import plain_cluster, send, wait_answers
from simulated.traces import BLOCK, Arrival, at_rate

from kvrelay.cli.bench.load import Request
from kvrelay.cli.bench.workload import Ask
from support.processes import MODULES

PROMPT_SCALE, ANSWER_SCALE = 16, 8
VOCAB = 4_000
"""Tokens of prompts are smaller: all models have these."""
MOST_PROMPT = 2000
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
IDLE_LENGTHS = (32, 256, 768, MOST_PROMPT)
IDLE_ANSWER, IDLE_TIMES = 24, 3
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

    def met(self, request: Request) -> tuple[bool, bool]:
        """Whether a request met its targets of TTFT and of TPOT."""
        if not request.ok or request.ttft is None:
            return False, False
        ttft, tpot = (float(np.interp(request.prompt_tokens, IDLE_LENGTHS, each)) for each in (self.ttft, self.tpot))
        return request.ttft <= TTFT_FACTOR * ttft, (request.tpot or 0.0) <= TPOT_FACTOR * tpot


def drawn(key: object, count: int) -> list[int]:
    """Tokens of a prompt, or of a block of it; equal keys give equal ones."""
    return random.Random(str(key)).choices(range(5, VOCAB), k=count)


def scaled(arrival: Arrival) -> Ask:
    """The request of an arrival, scaled to the model."""
    tokens = [token for block in arrival.blocks for token in drawn(block, BLOCK // PROMPT_SCALE)]
    length = min(MOST_PROMPT, max(8, arrival.prompt_tokens // PROMPT_SCALE))
    return Ask(tuple(tokens[:length]), max(2, arrival.answer_tokens // ANSWER_SCALE), arrival.at)


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
    ttfts, tpots = [], []
    for length in IDLE_LENGTHS:
        asks = [Ask(tuple(drawn((length, number), length)), IDLE_ANSWER) for number in range(IDLE_TIMES + 1)]
        _, *requests = send(address, asks, "idle", at_once=1)
        if failed := [each.error for each in requests if not each.ok]:
            raise RuntimeError(f"the idle pair failed: {failed[0]}")
        ttfts.append(statistics.median(each.ttft or 0.0 for each in requests))
        tpots.append(statistics.median(each.tpot or 0.0 for each in requests))
    return Idle(tuple(ttfts), tuple(tpots))


def load(address: str, arrivals: Sequence[Arrival], rate: float, targets: Idle, salt: str) -> dict[str, Any]:
    """Sends requests, and returns the figures of those that came after the caches had filled."""
    requests = send(address, [scaled(each) for each in arrivals], salt)
    requests = requests[int(FIRST_COUNTED * len(requests)) :]
    served = [each for each in requests if each.ok and each.ttft is not None]
    met = [targets.met(each) for each in requests]
    ttft = [each.ttft or 0.0 for each in served]
    found: dict[str, Any] = {
        "rate": rate,
        "requests": len(requests),
        "met": round(statistics.fmean(map(all, met)), 4),
        "met_ttft": round(statistics.fmean(ttft for ttft, _ in met), 4),
        "met_tpot": round(statistics.fmean(tpot for _, tpot in met), 4),
        "goodput": round(rate * statistics.fmean(map(all, met)), 4),
        "ttft_p99": round(float(np.quantile(ttft, 0.99)), 4),
        "ttft_p50": round(statistics.median(ttft), 4),
        "tpot_p50": round(statistics.median(each.tpot or 0.0 for each in served), 5),
        "worst_gap_p99": round(float(np.quantile([max(each.itls, default=0.0) for each in served], 0.99)), 4),
        "errors": sorted({each.error for each in requests if not each.ok})[:3],
    }
    for name in ("first_token", "token"):
        if errors := [error for each in served if (error := prediction_error(each, name)) is not None]:
            found[f"{name}_error_p50"] = round(statistics.median(errors), 3)
    return found


def prediction_error(request: Request, name: str) -> float | None:
    """The relative error of what the router had predicted of a request; None if it had predicted nothing.

    Args:
        name: `first_token`, or `token` for the time between two.
    """
    stages = request.stages or {}
    came = stages["first_token_seconds"] - stages["route_seconds"] if name == "first_token" else request.tpot
    told = stages.get(f"predicted_{name}_seconds", 0.0)
    return abs(told / came - 1) if told and came else None


def measure(
    model: Path, kinds: Mapping[str, Kind], pair: Kind, trace: Sequence[Arrival], rates: Sequence[float], seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs each kind of cluster at each rate; yields its name and figures, and first the latencies of `pair` when it is
    idle, which the targets are made of."""
    with cluster(model, pair) as address:
        targets = idle(address)
    ttft, tpot = ([round(seconds, 5) for seconds in each] for each in (targets.ttft, targets.tpot))
    yield "idle", {"lengths": IDLE_LENGTHS, "ttft": ttft, "tpot": tpot}
    for name, kind in kinds.items():
        with cluster(model, kind) as address:
            for rate in rates:
                yield name, load(address, at_rate(trace, rate, seconds), rate, targets, f"{name} at {rate:g}")
