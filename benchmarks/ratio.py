"""Measures whether the ratio of prefill to decode workers follows the traffic: eight workers, traffic that flips and
flips back.

    python benchmarks/ratio.py [--seconds 50] [--splits 2] [--simulate] [--out FILE]

Three phases of `--seconds`: 20 input tokens for each output token, then 1 for 4, then as at the start. Requests come at
random times, whatever the answers do. Goodput is requests a second that met both targets, time to first token and mean
time between tokens, of those that were sent. Every static split is simulated; the best `--splits` of them, and the
policy, run on real processes: supervisor, router, the client of `kvrelay bench`, and eight workers on the hash model
whose steps last as long as an A100's (`ratio_simulator.py` has the cost table and its source). `--simulate` leaves the
processes out.

After a flip, the cluster has converged again from the moment on from which 90 % of the requests that arrive in any
CONVERGED_SECONDS of the phase meet both targets. The requests of a phase's last seconds are left out there: they run on
in the next one.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from clusters import plain_cluster
from ratio_simulator import A100_OPT_66B, BLOCK, Phase, Seen, Simulation, attained, goodput, traffic
from turns import end_on_signal, own_setting, save

from kvrelay.cli.bench.faces import GrpcFace, Sampling, Target
from kvrelay.cli.bench.figures import good
from kvrelay.cli.bench.load import Request, Schedule, drive
from kvrelay.cli.bench.workload import Ask
from kvrelay.cluster.scaling.config import ScalingConfig
from support.supervised import Supervised

WORKERS = 8
TARGETS = ScalingConfig(enabled=True, ttft_target_seconds=2.0, tpot_target_seconds=0.1)
PREFILL_HEAVY = (14.0, 640, 32)
"""Requests a second, tokens of prompt and completion: 20 to 1."""
DECODE_HEAVY = (12.0, 32, 128)
"""Requests a second, tokens of prompt and completion: 1 to 4."""
CONVERGED_SECONDS, CONVERGED_SHARE = 5.0, 0.9
TOUCHED_SECONDS = 10.0
"""Seconds before a flip; requests that arrive in them are touched by it."""
ASKED_SECONDS = 15.0
STEP = 0.5
REQUEST_SECONDS = 120.0
VOCAB = 250


def phases(seconds: float) -> list[Phase]:
    """The phases of the traffic: heavy on prefill, then on decode, then on prefill again."""
    return [Phase(seconds, *kind) for kind in (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY)]


def converged(requests: Sequence[Seen], begin: float, end: float) -> float | None:
    """Seconds from `begin` until requests met their targets for the rest of the phase; None if they never did."""

    def meets(since: float) -> bool:
        return attained(requests, since, min(end, since + CONVERGED_SECONDS)) >= CONVERGED_SHARE

    first = end
    while first - STEP >= begin and meets(first - STEP):
        first -= STEP
    return None if first > end - CONVERGED_SECONDS else first - begin


def figures(requests: Sequence[Seen], parts: Sequence[Phase]) -> dict[str, Any]:
    """Goodput and the other figures of one run."""
    total = sum(phase.seconds for phase in parts)
    edges = list(pairwise(accumulate((phase.seconds for phase in parts), initial=0.0)))
    return {
        "goodput": round(goodput(requests, total), 3),
        "offered": round(len(requests) / total, 3),
        "met_both_targets": [round(attained(requests, *each), 3) for each in edges],
        "converged_seconds": [converged(requests, begin, end - TOUCHED_SECONDS) for begin, end in edges[1:]],
        "asked_seconds": ASKED_SECONDS,
    }


def simulated(parts: Sequence[Phase], split: tuple[int, int], *, enabled: bool, seed: int) -> dict[str, Any]:
    """The figures of a run of the simulator."""
    done = Simulation(parts, seed, A100_OPT_66B, split, replace(TARGETS, enabled=enabled))
    found = figures(done.requests, parts)
    if enabled:
        found["decisions"] = [{"time": at, "reason": decision.reason} for at, decision in done.decisions]
    return found


@contextmanager
def cluster(split: tuple[int, int], scaling: ScalingConfig) -> Iterator[Supervised]:
    """A ready cluster with this split; nothing of it is left at the end."""
    limits = {"max_batch_tokens": A100_OPT_66B.max_chunk, "max_sequences": A100_OPT_66B.max_streams}
    engine = {"block_size": BLOCK, "prefix_cache": True, "threads": 1, **limits}
    roles = ["prefill"] * split[0] + ["decode"] * split[1]
    worker = {"model": "pico", "dtype": "float32", "engine": engine}
    members: dict[str, Any] = {
        f"worker-{index}": {"module": "paced_worker", "options": {"role": role, **worker}}
        for index, role in enumerate(roles)
    }
    targets = {name: getattr(scaling, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
    router = {"model": "pico", "grpc_port": 0, "http_port": None, "classes": {"interactive": targets}}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    # A busy machine may keep a process from its heartbeat.
    patience = {"suspect_seconds": 5.0, "dead_seconds": 15.0}
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-ratio-") as folder,
        plain_cluster(Path(folder), members, scaling=asdict(scaling), **patience) as running,
    ):
        yield running


async def ask_all(router: str, asks: Sequence[Ask]) -> list[Request]:
    """Sends requests at their times, as `kvrelay bench` does, and waits for all answers."""
    sampling = Sampling(ignore_eos=True, temperature=0.0, seed=0, cache_salt="")
    async with GrpcFace(Target(router, timeout=REQUEST_SECONDS)) as face:
        schedule = Schedule(asks, [each.at or 0.0 for each in asks], 0, sampling)
        return (await drive(face, schedule, lambda _: None)).requests


def real(running: Supervised, parts: Sequence[Phase], seed: int) -> dict[str, Any]:
    """The figures of a run of real processes."""
    before, began = len(running.status().scaling.decisions), datetime.now(UTC).timestamp()
    asks = [
        Ask(tuple(random.Random(each.number).choices(range(VOCAB), k=each.prompt_tokens)), each.answer_tokens, each.at)
        for each in traffic(parts, seed)
    ]
    done = asyncio.run(ask_all(running.member("router-0").member.address, asks))
    limits = {"ttft": 1e3 * TARGETS.ttft_target_seconds, "tpot": 1e3 * TARGETS.tpot_target_seconds}
    # A request counts from when it was sent: this client may have been late itself.
    met = [each.ok and good({"ttft": each.ttft, "tpot": each.tpot}, limits) for each in done]
    found = figures([(each.sent, met_both) for each, met_both in zip(done, met, strict=True)], parts)
    errors = [each.error for each in done if not each.ok]
    found |= {"requests": len(done), "failed": len(errors), "errors": sorted(set(errors))[:5]}
    decisions = list(running.status().scaling.decisions)[before:]
    if decisions:
        found["decisions"] = [{"time": round(each.time - began, 1), "reason": each.reason} for each in decisions]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="of each phase")
    parser.add_argument(
        "--splits", type=int, default=2, help="static splits that real processes run; 0: the policy alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulate", action="store_true", help="without real processes")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signal()
    parts, start = phases(args.seconds), (WORKERS // 2, WORKERS // 2)
    result: dict[str, Any] = {
        "setting": {
            **own_setting("grpcio"),
            "phases": [asdict(phase) for phase in parts],
            "targets": {"ttft_seconds": TARGETS.ttft_target_seconds, "tpot_seconds": TARGETS.tpot_target_seconds},
            "seed": args.seed,
        },
        "simulated": {},
    }

    def note(kind: str, name: str, found: dict[str, Any]) -> None:
        result.setdefault(kind, {})[name] = found
        print(json.dumps({"kind": kind, "split": name, **found}), flush=True)
        if args.out is not None:
            save(args.out, result)

    statics = {}
    for prefill in range(1, WORKERS):
        split = prefill, WORKERS - prefill
        found = simulated(parts, split, enabled=False, seed=args.seed)
        statics[split] = found["goodput"]
        note("simulated", f"{split[0]}:{split[1]}", found)
    note("simulated", "policy", simulated(parts, start, enabled=True, seed=args.seed))
    if args.simulate:
        return
    best = sorted(statics, key=lambda split: -statics[split])[: args.splits]
    with cluster(start, TARGETS) as running:
        note("real", "policy", real(running, parts, args.seed))
    for split in best:
        with cluster(split, replace(TARGETS, enabled=False)) as running:
            note("real", f"{split[0]}:{split[1]}", real(running, parts, args.seed))


if __name__ == "__main__":
    main()
