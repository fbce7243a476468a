"""Start-up, TTFT, hand-off and memory of a small local cluster; one JSON line each, the limit asked for beside it.

    python benchmarks/smoke.py [--requests 2000] [--out benchmarks/results/smoke.json]

Everything is measured through the public road (gRPC client, router, prefill, decode; one process each).
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvrelay.client import Client, Completion

KVRELAY = Path(sys.executable).parent / "kvrelay"


def run(*arguments: str) -> str:
    return subprocess.run([KVRELAY, *arguments], check=True, capture_output=True, text=True, timeout=180).stdout


def workers() -> list[dict[str, Any]]:
    return list(json.loads(run("status", "--json"))["workers"])


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prompt(length: int, rng: random.Random) -> list[int]:
    return rng.choices(range(2, 4000), k=length)


def complete(client: Client, ids: list[int], max_tokens: int) -> Completion:
    return client.complete(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=120)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def latency(client: Client, length: int, field: str, repeat: int = 30) -> dict[str, float]:
    """Milliseconds of one timeline field over cold prompts on an idle cluster."""
    rng = random.Random(f"{length} {field}")
    times = [getattr(complete(client, prompt(length, rng), 8).timeline, field) for _ in range(repeat + 3)][3:]
    return {key: round(value * 1e3, 2) if key != "n" else value for key, value in spread(times).items()}


def steadiness(target: str, requests: int) -> dict[str, Any]:
    """Resident memory of every worker over `requests` mixed requests, and its pool afterwards."""
    rng = random.Random(0)
    with Client(target) as client, ThreadPoolExecutor(8) as pool:

        def burst(count: int) -> None:
            jobs = [(prompt(rng.randrange(1, 300), rng), rng.randrange(1, 24)) for _ in range(count)]
            list(pool.map(lambda job: complete(client, *job), jobs))

        # The first quarter fills the prefix cache and the allocators; from there on nothing may grow.
        burst(requests // 4)
        before = {worker["name"]: resident_bytes(worker["pid"]) for worker in workers()}
        burst(requests - requests // 4)
    time.sleep(1.0)  # heartbeats carry the block counts twice a second
    after = workers()
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
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {cpu_name()}",
        "versions": {name: version(name) for name in ("kvrelay", "torch", "ray", "grpcio")}
        | {"python": platform.python_version()},
    }
    with tempfile.TemporaryDirectory(prefix="kvrelay-smoke-") as state:
        os.environ["KVRELAY_STATE_DIR"] = state
        start = time.perf_counter()
        run("up", "--detach", "--grpc-port", "0")
        results["up_seconds"] = round(time.perf_counter() - start, 2)
        try:
            target = json.loads(run("status", "--json"))["router"]
            with Client(target) as client:
                results["ttft_64_ms (at most 60)"] = latency(client, 64, "first_token_seconds")
                results["handoff_512_ms (at most 10)"] = latency(client, 512, "handoff_seconds")
                results["transfer_512_ms"] = latency(client, 512, "transfer_seconds")
                results["ttft_512_ms"] = latency(client, 512, "first_token_seconds")
            results["memory (growth at most 5 %)"] = steadiness(target, args.requests)
        finally:
            run("down")
    for key, value in results.items():
        print(json.dumps({key: value}))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


if __name__ == "__main__":
    main()
