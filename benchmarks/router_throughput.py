"""Measures routers: tokens per second, and CPU time per token.

    python benchmarks/router_throughput.py [--face grpc http] [--streams 256] [--rate 40000 ...] [--seconds 10]
        [--coalesce-ms 10 0 ...] [--routers 1 ...] [--out FILE]

Real processes and real connections: supervisor, routers, one worker of each role, client. The workers compute nothing
(`paced_worker.py`): decode runs `rate / streams` steps a second, each with one token for every request that it has. The
client is that of `kvrelay bench`, in this process. Each run prints one JSON line.

    tokens_per_second    counted at the client after some seconds of warming up. Below the offered rate, some process
                         has no CPU time left; on a small machine perhaps another one than the router
    cores                CPU time of each process, user and system, over the same time; 1.0 is one core
    router_us_per_token  that of all routers together, by the tokens that came; `..._at_one_core` is its inverse
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from clusters import plain_cluster, wait_answers
from turns import own_setting, save

from kvrelay.cli.bench.faces import GrpcFace, HttpFace, Sampling, Target
from kvrelay.cli.bench.load import Request, Schedule, drive
from kvrelay.cli.bench.workload import Ask
from support.supervised import Supervised

HOST = "127.0.0.1"
PROMPT = 32
BLOCK, KV_TOKEN_BYTES = 16, 64
"""Tokens in a block of the workers' KV, and bytes of a token."""
WARM_SECONDS = 2.0
SPARE = 1.2
"""Requests beyond those that the measured time takes, so that none of it has fewer streams."""
PORTS = 29317, 29318
"""Ports of gRPC and HTTP that several routers share."""
SAMPLING = Sampling(ignore_eos=True, temperature=0.0, seed=0, cache_salt="")


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one run."""

    face: str
    offered: int
    """Tokens a second."""
    coalesce_ms: float
    routers: int


def asks(case: Case, args: argparse.Namespace) -> list[Ask]:
    """The requests. The first ones differ in length, so that those of many streams don't end together."""
    count = args.streams + int(SPARE * case.offered * (WARM_SECONDS + args.seconds) / args.tokens)
    lengths = [args.tokens // 2 + place * args.tokens // (2 * args.streams) for place in range(args.streams)]
    draw = random.Random(0)
    return [
        Ask(tuple(draw.choices(range(2, 4000), k=PROMPT)), length)
        for length in itertools.islice(itertools.chain(lengths, itertools.repeat(args.tokens)), count)
    ]


def messages_between(request: Request, begin: float, end: float) -> int:
    """Messages of a request that came in a time."""
    times = itertools.accumulate(request.itls, initial=request.sent + (request.ttft or 0.0))
    return sum(begin <= at < end for at in times)


async def measure(cluster: Supervised, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    grpc = cluster.member("router-0").member.address
    face = GrpcFace(Target(grpc)) if case.face == "grpc" else HttpFace(Target(f"http://{HOST}:{PORTS[1]}"))
    pids = {name: pid for name, pid in cluster.pids().items() if name != "prefill-0"} | {"client": os.getpid()}
    watched = {name: psutil.Process(pid) for name, pid in pids.items()}

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}

    async with face:
        await face.model()
        began = time.perf_counter()
        schedule = Schedule(asks(case, args), None, args.streams, SAMPLING)
        running = asyncio.create_task(drive(face, schedule, lambda _: None))
        await asyncio.sleep(WARM_SECONDS)
        begin, before = time.perf_counter() - began, used()
        await asyncio.wait((running,), timeout=args.seconds)
        end, after = time.perf_counter() - began, used()
        requests = (await running).requests
    if bad := [each for each in requests if not each.ok or each.output_tokens != each.wanted_tokens]:
        raise SystemExit(f"{len(bad)} requests failed: {bad[0].error or 'tokens are missing'}")
    counts = [messages_between(each, begin, end) for each in requests]
    tokens = sum(
        count * each.output_tokens / (len(each.itls) + 1) for count, each in zip(counts, requests, strict=True)
    )
    cores = {name: (value - before[name]) / (end - begin) for name, value in after.items()}
    spent = sum(share for name, share in cores.items() if name.startswith("router"))
    return {
        "tokens_per_second": round(tokens / (end - begin)),
        "tokens_per_message": round(tokens / sum(counts), 2),
        "cores": {name: round(share, 3) for name, share in cores.items()},
        "router_us_per_token": round(spent * (end - begin) / tokens * 1e6, 1),
        "tokens_per_second_at_one_core": round(tokens / (end - begin) / spent),
    }


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    shared = case.routers > 1
    kv_bytes = KV_TOKEN_BYTES * args.streams * (PROMPT + args.tokens + BLOCK)
    engine = {"block_size": BLOCK, "max_sequences": args.streams, "kv_memory_bytes": kv_bytes, "prefix_cache": False}
    members: dict[str, dict[str, Any]] = {
        f"{role}-0": {"module": "paced_worker", "options": {"role": role, "model": "pico", "engine": engine}}
        for role in ("prefill", "decode")
    }
    router = {"model": "pico", "coalesce_ms": case.coalesce_ms, "share_port": shared}
    router |= {"grpc_port": PORTS[0] if shared else 0, "http_port": PORTS[1]}
    names = [f"router-{number}" for number in range(case.routers)]
    members |= {name: {"module": "kvrelay.router", "options": router} for name in names}
    pace = {"PACE_SECONDS": str(args.streams / case.offered)}
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-router-") as folder,
        plain_cluster(Path(folder), members, pace) as cluster,
    ):
        for name in names:
            wait_answers(cluster.member(name).member.address, cluster)
        return asdict(case) | asyncio.run(measure(cluster, case, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=int, nargs="+", default=[40_000], help="tokens a second, over all streams")
    parser.add_argument("--tokens", type=int, default=512, help="of one request")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--coalesce-ms", type=float, nargs="+", default=[10.0, 0.0], help="router.coalesce_ms")
    parser.add_argument("--routers", type=int, nargs="+", default=[1], help="on one port")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = []
    cases = itertools.product(args.face, args.rate, args.coalesce_ms, args.routers)
    for values in cases:
        runs.append(run(Case(*values), args))
        print(json.dumps(runs[-1]), flush=True)
    if args.out is not None:
        results = own_setting("grpcio", "protobuf", "aiohttp", "uvloop")
        results |= {"streams": args.streams, "tokens_per_request": args.tokens}
        save(args.out, results | {"runs": runs})


if __name__ == "__main__":
    main()
