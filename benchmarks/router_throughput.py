"""Measures a router: tokens per second, CPU cores used, and the latency that it adds to each token.

    python benchmarks/router_throughput.py [--streams 64] [--rate 8000 ...] [--seconds 15] [--repeats 1] [--out FILE]
        [--coalesce-ms 10 0 ...] [--routers 1]

Real processes and real gRPC: supervisor, router, one worker of each role, client. The workers only echo: prefill
answers with the first token; decode runs `rate / streams` steps a second, each with one token for every request that
it has, like an engine. Each run prints one JSON line, with the target beside the figures.

    tokens/s   counted at the client after a second of warming up. If it is below the offered rate, some process has no
               CPU time left: on a small machine perhaps the client or the decode worker, whose CPU is reported too
    cores      CPU time of a process, user and system, over the same time; 1.0 is one core
    added ms   from the step that yields a token to its receipt by the client, both hops included; where the offered
               rate isn't reached, it is the time in a growing queue
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import psutil

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_DECODE, ROLE_PREFILL, Member
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_PREFILL,
    Blocks,
    Load,
    ModelInfo,
    PrefillReport,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    Requests,
    Submit,
    TransferReport,
    WorkerHello,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.options import channel_options, server_options
from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

HOST = "127.0.0.1"
CREDENTIALS = Credentials("worker", os.environ.setdefault(TOKEN_VARIABLE, "the-token-of-this-benchmark"))
"""The supervisor and the router inherit the token."""
MODEL = "pico"
VOCAB_SIZE, CONTEXT = 4096, 4096
ASKED_RATE, ASKED_CORES = 8000, 1.0
PROMPT = 32
WARM_UP = 999_999
"""The number of the request that is not measured."""
WARM_SECONDS = 1.0
START_SECONDS = 60.0
PORT = 29317
"""Of several routers, which share it."""
CONNECTIONS = 8
"""Of the client, for each of several routers."""
ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE}


Running = dict[tuple[str, int], tuple[Submit, Iterator[int]]]
"""The requests of one router, each with the indices of its next tokens."""


class EchoWorker(WorkerServiceServicer):
    """Serves the relay as a worker does, with one message per step, but computes nothing."""

    def __init__(self, role: str, supervisor: str, step_seconds: float) -> None:
        self.name, self.incarnation = f"{role}-0", uuid.uuid4().hex
        self._role = role
        self._supervisor = supervisor
        self._step_seconds = step_seconds
        self._running: list[Running] = []
        """The requests of each router."""
        self.sent: dict[int, list[float]] = {}
        """Times at which each token was sent, by the number in the request's prompt."""

    async def serve(self, until: asyncio.Event) -> None:
        server = grpc.aio.server(options=server_options())
        add_WorkerServiceServicer_to_server(self, server)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        member = Member(
            name=self.name,
            role=ROLES[self._role],
            incarnation=self.incarnation,
            address=f"{HOST}:{port}",
            pid=os.getpid(),
            state=MEMBER_STATE_READY,
        )
        heartbeat = HeartbeatClient(
            self._supervisor, CREDENTIALS, lambda: (member, self._load()), lambda members: None, until.set
        )
        heartbeat.start()
        await until.wait()
        await heartbeat.stop()

    def _load(self) -> Load:
        count = sum(map(len, self._running))
        blocks = Blocks(total=10**6, free=10**6 - count, held=count, size=16)
        return Load(blocks=blocks, requests=Requests(running=count, free_slots=10**6))

    async def Relay(self, request_iterator: AsyncIterator[RelayRequest], context: Any) -> None:
        await anext(request_iterator)
        info = ModelInfo(name=MODEL, vocab_size=VOCAB_SIZE, max_context=CONTEXT, eos_token_ids=[1], fingerprint="echo")
        hello = WorkerHello(name=self.name, incarnation=self.incarnation, model=info)
        await context.write(RelayResponse(hello=hello, load=self._load()))
        firsts: list[RequestEvent] = []
        running: Running = {}
        self._running.append(running)
        submits = 0

        async def read() -> None:
            nonlocal submits
            async for request in request_iterator:
                match request.WhichOneof("message"):
                    case "submit":
                        submits += 1
                        self._take(request.submit, running, firsts)
                    case "cancel":
                        running.pop((request.cancel.request_id, request.cancel.attempt), None)

        reader = asyncio.create_task(read())
        try:
            step = time.monotonic()
            while not reader.done():
                step = max(step + self._step_seconds, time.monotonic() - self._step_seconds)
                await asyncio.sleep(step - time.monotonic())
                events = [*firsts, *self._step(running)]
                firsts.clear()
                if events:
                    load = self._load()
                    await context.write(RelayResponse(events=events, load=load, submits_seen=submits))
        finally:
            reader.cancel()
            self._running = [other for other in self._running if other is not running]

    def _take(self, submit: Submit, running: Running, firsts: list[RequestEvent]) -> None:
        if submit.phase != PHASE_PREFILL:
            running[submit.request_id, submit.attempt] = submit, iter(range(1, submit.sampling.max_tokens))
            self.sent[number_of(submit.token_ids)] = []
            return
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        firsts.append(RequestEvent(**key, first_index=0, token_ids=[100], prefill=PrefillReport(prefill_seconds=0.001)))
        firsts.append(RequestEvent(**key, transfer=TransferReport(transfer_bytes=1)))

    def _step(self, running: Running) -> list[RequestEvent]:
        now = time.monotonic()
        events = []
        for (name, attempt), (submit, indices) in list(running.items()):
            index = next(indices)
            event = RequestEvent(request_id=name, attempt=attempt, first_index=index, token_ids=[100 + index % 3900])
            if index == submit.sampling.max_tokens - 1:
                event.finish_reason = FINISH_REASON_LENGTH
                del running[name, attempt]
            self.sent[number_of(submit.token_ids)].append(now)
            events.append(event)
        return events


def number_of(prompt: Sequence[int]) -> int:
    """The number that `prompt_of` encoded."""
    return int((prompt[0] - 2) * 4000 + prompt[1] - 2)


def prompt_of(number: int) -> list[int]:
    return [2 + number // 4000, 2 + number % 4000, *random.Random(number).choices(range(2, 4000), k=PROMPT - 2)]


def request_of(number: int, length: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=prompt_of(number)), sampling=sampling)


async def work(role: str, supervisor: str, step_seconds: float) -> None:
    """Runs one worker until its standard input closes, then prints when it sent each token."""
    until = asyncio.Event()
    worker = EchoWorker(role, supervisor, step_seconds)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), until.set)
    await worker.serve(until)
    print(json.dumps(worker.sent), flush=True)
    # An orderly stop would report the streams that it cuts as errors.
    os._exit(0)


class Crowd:
    """The clients: a number of streams, each with one request after the other."""

    def __init__(self, router: str, tokens: int) -> None:
        self._router = router
        self._tokens = tokens
        self._numbers = itertools.count()
        self.received: dict[int, list[float]] = {}
        """Times at which each token but the first was received, by the number in the request's prompt."""
        self.messages = self.count = 0

    async def run(self, streams: int, seconds: float, connections: int) -> None:
        options = (*channel_options(), ("grpc.use_local_subchannel_pool", 1))
        async with AsyncExitStack() as stack:
            channels = [grpc.aio.insecure_channel(self._router, options=options) for _ in range(connections)]
            stubs = [InferenceServiceStub(await stack.enter_async_context(channel)) for channel in channels]
            end = time.monotonic() + seconds
            await asyncio.gather(
                *(self._stream(stubs[place % connections], end, streams, place) for place in range(streams))
            )

    async def _stream(self, stub: InferenceServiceStub, end: float, streams: int, place: int) -> None:
        # Staggered lengths, since requests of many clients don't end at the same time.
        length = self._tokens // 2 + place * self._tokens // (2 * streams)
        while time.monotonic() < end:
            number = next(self._numbers)
            times = self.received[number] = []
            request = request_of(number, length)
            length = self._tokens
            seen = 0
            async for message in stub.Generate(request, timeout=120):
                now = time.monotonic()
                new = len(message.token_ids)
                self.messages += 1
                self.count += new
                times += [now] * (new if seen else max(0, new - 1))
                seen += new


@contextmanager
def process(arguments: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that is ended on exit."""
    popen = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, **options)
    try:
        yield popen
    finally:
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


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(router: str, pids: dict[str, int], rate: int, args: argparse.Namespace) -> dict[str, Any]:
    crowd = Crowd(router, args.tokens)
    connections = 1 if args.routers == 1 else CONNECTIONS * args.routers
    running = asyncio.create_task(crowd.run(args.streams, WARM_SECONDS + args.seconds, connections))
    watched = {name: psutil.Process(pid) for name, pid in pids.items()}

    def used() -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for name, process in watched.items():
            spent[name.partition("-")[0]] += sum(process.cpu_times()[:2])
        return spent

    await asyncio.sleep(WARM_SECONDS)
    begin, count, messages, before = time.monotonic(), crowd.count, crowd.messages, used()
    await asyncio.sleep(args.seconds)
    seconds = time.monotonic() - begin
    cores = {name: (after - before[name]) / seconds for name, after in used().items()}
    tokens, writes = crowd.count - count, crowd.messages - messages
    await running
    return {
        "tokens_per_second": round(tokens / seconds),
        "offered_tokens_per_second": rate,
        "messages_per_second": round(writes / seconds),
        "cores": {name: round(share, 3) for name, share in cores.items()},
        "asked_router_cores": ASKED_CORES if rate == ASKED_RATE else None,
        "router_us_per_token": round(cores["router"] * seconds / tokens * 1e6, 1),
        "_received": crowd.received,
    }


def run(rate: int, coalesce_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    sharing = {"grpc_port": 0, "share_port": False} if args.routers == 1 else {"grpc_port": PORT, "share_port": True}
    with tempfile.TemporaryDirectory(prefix="kvrelay-router-") as folder:

        def config(part: str, **options: Any) -> list[str]:
            path = Path(folder, f"{options.get('name', part)}.json")
            path.write_text(json.dumps(options))
            return ["-m", f"kvrelay.{'cluster.' if part == 'supervisor' else ''}{part}", "--config", str(path)]

        with process(config("supervisor"), stderr=subprocess.DEVNULL) as supervising:
            supervisor = address_of(supervising)
            here = [__file__, "--supervisor", supervisor, "--streams", str(args.streams), "--rate", str(rate)]
            with (
                process([*here, "--worker", "prefill"], stdin=subprocess.PIPE),
                process([*here, "--worker", "decode"], stdin=subprocess.PIPE) as decode,
                ExitStack() as stack,
            ):
                common = {
                    "model": MODEL,
                    "http_port": None,
                    "supervisor": supervisor,
                    "coalesce_ms": coalesce_ms,
                    **sharing,
                }
                pids = {"decode": decode.pid, "client": os.getpid()}
                for number in range(args.routers):
                    options = config("router", name=f"router-{number}", **common)
                    routing = stack.enter_context(process(options, stderr=subprocess.DEVNULL))
                    router = address_of(routing)
                    pids[f"router-{number}"] = routing.pid
                with grpc.insecure_channel(router) as channel:
                    wait_ready(channel)
                result = asyncio.run(measure(router, pids, rate, args)) | {
                    "coalesce_ms": coalesce_ms,
                    "routers": args.routers,
                }
                sent = json.loads(decode.communicate(timeout=30)[0])
    added = [
        (here - there) * 1e3
        for number, times in result.pop("_received").items()
        for here, there in zip(times, sent[str(number)], strict=True)
    ]
    for share in (0.5, 0.99):
        result[f"added_ms_p{round(share * 100)}"] = round(quantile(added, share), 2)
    result["added_ms_mean"] = round(statistics.mean(added), 2)
    return result


def wait_ready(channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(channel)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            list(stub.Generate(request_of(WARM_UP, 2), timeout=5))
            return
        except grpc.RpcError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the router serves nothing: {error}") from error
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=int, nargs="+", default=[ASKED_RATE], help="tokens a second, over all streams")
    parser.add_argument("--tokens", type=int, default=256, help="of one request")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--coalesce-ms", type=float, nargs="+", default=[10.0], help="router.coalesce_ms, in turn")
    parser.add_argument("--routers", type=int, default=1, help="on one port")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--supervisor", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        asyncio.run(work(args.worker, args.supervisor, args.streams / args.rate[0]))
        return
    runs = []
    for rate, coalesce_ms in list(itertools.product(args.rate, args.coalesce_ms)) * args.repeats:
        runs.append(run(rate, coalesce_ms, args))
        print(json.dumps(runs[-1]), flush=True)
    if args.out is not None:
        results = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load_at_end": round(os.getloadavg()[0], 2),
            "versions": {name: version(name) for name in ("kvrelay", "grpcio", "protobuf")}
            | {"python": platform.python_version()},
            "streams": args.streams,
            "tokens_per_request": args.tokens,
            "runs": runs,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
