"""Start-up, TTFT, hand-off and memory of a small local cluster; one JSON line each, with its limit.

    python benchmarks/smoke.py [--requests 2000] [--out benchmarks/results/smoke.json]

All figures are those of a client: gRPC client, router, prefill and decode worker, one process each.
"""

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from local_cluster import LocalCluster, local_cluster
from turns import own_setting, save, spread

from kvrelay.client import Client, Completion


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def prompt(length: int, rng: random.Random) -> list[int]:
    return rng.choices(range(2, 4000), k=length)


def complete(client: Client, ids: list[int], max_tokens: int) -> Completion:
    return client.complete(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=120)


def latency(client: Client, length: int, field: str, repeat: int = 30) -> dict[str, float]:
    """Milliseconds of one timeline field over cold prompts on an idle cluster."""
    rng = random.Random(f"{length} {field}")
    times = [getattr(complete(client, prompt(length, rng), 8).timeline, field) for _ in range(repeat + 3)][3:]
    return spread([seconds * 1e3 for seconds in times], 2)


def steadiness(cluster: LocalCluster, requests: int) -> dict[str, Any]:
    """Growth of every worker's resident memory over `requests` mixed requests, and its block pool afterwards."""
    rng = random.Random(0)
    with Client(cluster.router) as client, ThreadPoolExecutor(8) as pool:

        def burst(count: int) -> None:
            jobs = [(prompt(rng.randrange(1, 300), rng), rng.randrange(1, 24)) for _ in range(count)]
            list(pool.map(lambda job: complete(client, *job), jobs))

        # The first quarter fills the prefix cache and the allocators; after it nothing may grow.
        burst(requests // 4)
        before = {worker["name"]: resident_bytes(worker["pid"]) for worker in cluster.status()["workers"]}
        burst(requests - requests // 4)
    time.sleep(1.0)  # heartbeats carry the block counts twice a second
    after = cluster.status()["workers"]
    return {
        "requests": requests,
        "growth_percent": {
            worker["name"]: round(100 * (resident_bytes(worker["pid"]) / before[worker["name"]] - 1), 2)
            for worker in after
        },
        "blocks": {worker["name"]: worker["blocks"] for worker in after},
        "whole": all(w["blocks"]["free"] + w["blocks"]["cached"] == w["blocks"]["total"] for w in after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = own_setting("torch", "ray", "grpcio")
    start = time.perf_counter()
    with local_cluster() as cluster:
        results["up_seconds"] = round(time.perf_counter() - start, 2)
        with Client(cluster.router) as client:
            results["ttft_64_ms (at most 60)"] = latency(client, 64, "first_token_seconds")
            results["handoff_512_ms (at most 10)"] = latency(client, 512, "handoff_seconds")
            results["transfer_512_ms"] = latency(client, 512, "transfer_seconds")
            results["ttft_512_ms"] = latency(client, 512, "first_token_seconds")
        results["memory (growth at most 5 %)"] = steadiness(cluster, args.requests)
    for key, value in results.items():
        print(json.dumps({key: value}))
    if args.out is not None:
        save(args.out, results)


if __name__ == "__main__":
    main()
