"""Measures routers: tokens per second, CPU time per token, and the time that tokens spend in a router.

    python benchmarks/router_throughput.py [--face grpc http] [--streams 256] [--rate 40000 ...] [--seconds 10]
        [--coalesce-ms 10 0 ...] [--routers 1 ...] [--repeats 1] [--out FILE]

Real processes and real connections: supervisor, routers, one worker of each role, client. The workers only echo
(`router_echo.py`): prefill answers with the first token; decode runs `rate / streams` steps a second, each with one
token for every request that it has, like an engine. The client costs little (`router_clients.py`). Each run prints one
JSON line.

    tokens_per_second    counted at the client after some seconds of warming up. Below the offered rate, some process
                         has no CPU time left; on a small machine perhaps another one than the router
    cores                CPU time of each process, user and system, over the same time; 1.0 is one core
    router_us_per_token  that of all routers together, by the tokens that came; `..._at_one_core` is its inverse
    held_ms              in the router: from its receipt of a token to the end of the write towards the client
    added_ms             from the step that yields a token to its receipt by the client, both hops included

Where the offered rate isn't reached, both times are those of a growing queue.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from router_clients import Course, crowd
from router_echo import HOST, MODEL, TOKEN, prompt_of
from turns import own_setting, save, spread

from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

HERE = Path(__file__).parent
WARM_UP = 999_999
"""The number of the request that is not measured."""
WARM_SECONDS = 2.0
START_SECONDS = 60.0
PORTS = 29317, 29318
"""Ports of gRPC and HTTP that several routers share."""
CONNECTIONS = 8
"""Connections that the gRPC client opens to each router."""


CASE = ("face", "offered", "coalesce_ms", "routers")
TIMES = (("held_ms", "p50"), ("held_ms", "p99"), ("added_ms", "p99"))


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one run."""

    face: str
    rate: int
    coalesce_ms: float
    routers: int


@contextmanager
def process(arguments: Sequence[object], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that is ended on exit."""
    popen = subprocess.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options)
    try:
        yield popen
    finally:
        end(popen)


def end(popen: "subprocess.Popen[str]") -> None:
    popen.terminate()
    try:
        popen.wait(10)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait(10)


def address_of(popen: "subprocess.Popen[str]") -> str:
    line = popen.stdout.readline() if popen.stdout is not None else ""
    if not line:
        raise SystemExit(f"{popen.args} ended with {popen.wait(10)}")
    return str(json.loads(line)["address"])


def quantiles(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    found = {f"p{round(100 * share)}": ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99)}
    return {name: round(value, 2) for name, value in (found | {"mean": statistics.mean(ordered)}).items()}


async def measure(address: str, pids: dict[str, int], case: Case, args: argparse.Namespace) -> dict[str, Any]:
    course = Course(args.streams, args.tokens, prompt_of, time.monotonic() + WARM_SECONDS + args.seconds)
    running = asyncio.create_task(crowd(case.face, address, course, CONNECTIONS * case.routers))
    watched = {name: psutil.Process(pid) for name, pid in pids.items()}

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}

    await asyncio.sleep(WARM_SECONDS)
    begin, count, messages, before = time.monotonic(), course.count, course.messages, used()
    await asyncio.wait((running,), timeout=args.seconds)
    seconds = time.monotonic() - begin
    cores = {name: (after - before[name]) / seconds for name, after in used().items()}
    tokens, writes = course.count - count, course.messages - messages
    await running
    spent = sum(share for name, share in cores.items() if name.startswith("router"))
    return {
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_message": round(tokens / writes, 2),
        "cores": {name: round(share, 3) for name, share in cores.items()},
        "router_us_per_token": round(spent * seconds / tokens * 1e6, 1),
        "tokens_per_second_at_one_core": round(tokens / seconds / spent),
        "_received": course.received,
    }


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    shared = case.routers > 1
    with tempfile.TemporaryDirectory(prefix="kvrelay-router-") as folder, ExitStack() as stack:

        def config(part: str, **options: Any) -> Path:
            path = Path(folder, f"{part}.json")
            path.write_text(json.dumps(options))
            return path

        supervising = process(
            ["-m", "kvrelay.cluster.supervisor", "--config", config("supervisor")], stderr=subprocess.DEVNULL
        )
        supervisor = address_of(stack.enter_context(supervising))
        echo = [HERE / "router_echo.py"]
        step = [supervisor, args.streams / case.rate]
        stack.enter_context(process([*echo, "prefill", *step], stdin=subprocess.PIPE))
        decode = stack.enter_context(process([*echo, "decode", *step], stdin=subprocess.PIPE))
        pids = {"decode": decode.pid, "client": os.getpid()}
        routers, held_files = [], []
        for number in range(case.routers):
            options = config(
                f"router-{number}",
                name=f"router-{number}",
                model=MODEL,
                supervisor=supervisor,
                coalesce_ms=case.coalesce_ms,
                grpc_port=PORTS[0] if shared else 0,
                http_port=PORTS[1],
                share_port=shared,
                # Requests of a rate that isn't reached still run at the end.
                drain_seconds=0.0,
            )
            held_files.append(Path(folder, f"held-{number}.json"))
            timed = [HERE / "router_process.py", "--config", options, "--held", held_files[-1]]
            routers.append(stack.enter_context(process(timed, stderr=subprocess.DEVNULL)))
            address = address_of(routers[-1])
            pids[f"router-{number}"] = routers[-1].pid
        with grpc.insecure_channel(address) as channel:
            wait_ready(channel)
        target = address if case.face == "grpc" else f"{HOST}:{PORTS[1]}"
        result = asyncio.run(measure(target, pids, case, args))
        sent = json.loads(decode.communicate(timeout=30)[0])
        for router in routers:
            end(router)
        held = [value for path in held_files for value in json.loads(path.read_text())]
    added = [
        (here - there) * 1e3
        for number, times in result.pop("_received").items()
        for here, there in zip(times[1:], sent[str(number)], strict=True)
    ]
    case_fields = {"face": case.face, "offered": case.rate, "coalesce_ms": case.coalesce_ms, "routers": case.routers}
    return case_fields | result | {"held_ms": quantiles(held), "added_ms": quantiles(added)}


def wait_ready(channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(channel)
    deadline = time.monotonic() + START_SECONDS
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(token_ids=TokenIds(ids=prompt_of(WARM_UP)), sampling=sampling)
    while True:
        try:
            list(stub.Generate(request, timeout=5))
            return
        except grpc.RpcError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the router serves nothing: {error}") from error
            time.sleep(0.1)


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the runs of each case, and their ranges."""
    cases = defaultdict(list)
    for each in runs:
        flat = {**each, **{f"{kind}_{share}": each[kind][share] for kind, share in TIMES}}
        cases[tuple(each[name] for name in CASE)].append(flat)
    figures = ("tokens_per_second", "router_us_per_token", "tokens_per_message", *map("_".join, TIMES))
    return [
        dict(zip(CASE, case, strict=True)) | {name: spread([each[name] for each in group]) for name in figures}
        for case, group in cases.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=int, nargs="+", default=[40_000], help="tokens a second, over all streams")
    parser.add_argument("--tokens", type=int, default=512, help="of one request")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=1, help="of all cases, in turn")
    parser.add_argument("--coalesce-ms", type=float, nargs="+", default=[10.0, 0.0], help="router.coalesce_ms")
    parser.add_argument("--routers", type=int, nargs="+", default=[1], help="on one port")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault(TOKEN_VARIABLE, TOKEN)
    runs = []
    cases = itertools.product(args.face, args.rate, args.coalesce_ms, args.routers)
    for case in [Case(*values) for values in cases] * args.repeats:
        runs.append(run(case, args))
        print(json.dumps(runs[-1]), flush=True)
    if args.out is not None:
        results = own_setting("grpcio", "protobuf", "aiohttp", "uvloop")
        results |= {"streams": args.streams, "tokens_per_request": args.tokens}
        save(args.out, results | {"cases": medians(runs), "runs": runs})


if __name__ == "__main__":
    main()
