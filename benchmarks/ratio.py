"""Does the ratio of prefill to decode workers follow the traffic? Eight workers, traffic that flips and flips back.

    python benchmarks/ratio.py [--seconds 50] [--splits 2] [--simulate] [--out FILE]

Three phases of `--seconds`: 20 input tokens for each output token, then 1 for 4, then as at the start. Requests come at
random times, whatever the answers do. Goodput is requests a second that met both targets, time to first token and mean
time between tokens, of those that were sent. Every static split is simulated; the best `--splits` of them, and the
policy, run on real processes: supervisor, router, eight workers on the hash model whose steps last as long as an A100's
(`ratio_simulator.py` has the cost table and its source), clients over gRPC. `--simulate` leaves the processes out.

After a flip, the cluster has converged again from the moment on from which 90 % of the requests that arrive in any
CONVERGED_SECONDS of the phase meet both targets. The requests of a phase's last seconds are left out there: they run on
in the next one.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ratio_cluster import cluster, run, set_split
from ratio_simulator import A100_OPT_66B, Job, Phase, Simulation, attained, goodput, traffic
from turns import end_on_signal, own_setting, save

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
DRAIN_SECONDS = 30.0
"""Seconds for the last requests, in the simulation."""
STEP = 0.5


def phases(seconds: float) -> list[Phase]:
    """The phases of the traffic: heavy on prefill, then on decode, then on prefill again."""
    return [Phase(seconds, *kind) for kind in (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY)]


def converged(jobs: Sequence[Job], begin: float, end: float) -> float | None:
    """Seconds from `begin` until requests met their targets for the rest of the phase; None if they never did."""

    def meets(since: float) -> bool:
        return attained(jobs, TARGETS, since, min(end, since + CONVERGED_SECONDS)) >= CONVERGED_SHARE

    first = end
    while first - STEP >= begin and meets(first - STEP):
        first -= STEP
    return None if first > end - CONVERGED_SECONDS else first - begin


def figures(jobs: Sequence[Job], parts: Sequence[Phase]) -> dict[str, Any]:
    """Goodput and the other figures of one run."""
    total = sum(phase.seconds for phase in parts)
    edges = list(pairwise(accumulate((phase.seconds for phase in parts), initial=0.0)))
    return {
        "goodput": round(goodput(jobs, TARGETS, total), 3),
        "offered": round(len(jobs) / total, 3),
        "met_both_targets": [round(attained(jobs, TARGETS, *each), 3) for each in edges],
        "converged_seconds": [converged(jobs, begin, end - TOUCHED_SECONDS) for begin, end in edges[1:]],
        "asked_seconds": ASKED_SECONDS,
    }


def simulated(parts: Sequence[Phase], split: tuple[int, int], *, enabled: bool, seed: int) -> dict[str, Any]:
    """The figures of a run of the simulator."""
    total = sum(phase.seconds for phase in parts)
    config = replace(TARGETS, enabled=enabled)
    done = Simulation(traffic(parts, seed), A100_OPT_66B, split, config, total + DRAIN_SECONDS).run()
    found = figures(done.jobs, parts)
    if enabled:
        found["decisions"] = [{"time": at, "reason": decision.reason} for at, decision in done.decisions]
    return found


def real(running: Supervised, parts: Sequence[Phase], seed: int) -> dict[str, Any]:
    """The figures of a run of real processes."""
    before, began = len(running.status().scaling.decisions), datetime.now(UTC).timestamp()
    jobs = traffic(parts, seed)
    errors = [error for error in asyncio.run(run(running, jobs)) if error]
    found = figures(jobs, parts)
    found |= {"requests": len(jobs), "failed": len(errors), "errors": sorted(set(errors))[:5]}
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
    if best:
        with cluster(start, replace(TARGETS, enabled=False)) as running:
            for split in best:
                set_split(running, split[0])
                note("real", f"{split[0]}:{split[1]}", real(running, parts, args.seed))


if __name__ == "__main__":
    main()
