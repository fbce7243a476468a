"""Measures the CPU time that a token costs a router's event loop, also on a machine that has other work.

    nice -n 5 python benchmarks/router_cpu.py [--face grpc http] [--streams 256] [--gathered 1 2] [--steps 60]

The router serves real connections of `router_clients.py`, which run in another process. Its worker is a script in the
router's own process: each step hands the router one message with `gathered` tokens for every stream, and the next one
comes when all was written. Counted is the CPU time of the loop's thread, without the making of the messages; gRPC's own
threads are not counted. So it says what a router can carry at best, and is good for comparing two versions in turns;
`router_throughput.py` measures what arrives.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import string
import time
from typing import Any, cast

from router_clients import Course, crowd
from router_echo import CONTEXT, MODEL, TOKEN, VOCAB_SIZE, prompt_of
from tokenizers import Tokenizer

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_COLOCATED, Member
from kvrelay.internal.v1.worker_pb2 import (
    Blocks,
    Load,
    ModelInfo,
    PrefillReport,
    RelayResponse,
    RequestEvent,
    Requests,
    Submit,
)
from kvrelay.models import resolve
from kvrelay.router.config import RouterConfig
from kvrelay.router.placing import registry
from kvrelay.router.placing.worker_stream import Listener, WorkerStream
from kvrelay.router.server import RouterServer
from kvrelay.router.session.output import Output
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.rpc.serve import fast_loop

CONNECTIONS = 8
LEAD = 16
"""Tokens of each stream that aren't measured."""
WAIT_SECONDS = 60.0
TOKENIZER = Tokenizer.from_file(str(resolve(MODEL, weights=False) / "tokenizer.json"))
LETTERS = [TOKENIZER.token_to_id(letter) for letter in string.ascii_letters]


class ScriptedStream(WorkerStream):
    """A worker that the benchmark plays."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.submits: list[Submit] = []

    async def run(self) -> None:
        self.model = ModelInfo(
            name=MODEL, vocab_size=VOCAB_SIZE, max_context=CONTEXT, eos_token_ids=[1], fingerprint="script"
        )
        blocks = Blocks(total=10**6, free=10**6, size=16)
        self._deliver(RelayResponse(load=Load(blocks=blocks, requests=Requests(free_slots=10**6))))
        self._on_change()
        await asyncio.Event().wait()

    def submit(self, submit: Submit, listener: Listener, *, cached_tokens: int = 0) -> None:
        super().submit(submit, listener, cached_tokens=cached_tokens)
        self.submits.append(submit)

    def step(self, index: int, token: int) -> bytes:
        """A message with token number `index` of every stream."""
        message = RelayResponse()
        for submit in self.submits:
            if index < 2:
                key = {"request_id": submit.request_id, "attempt": submit.attempt}
                report = {} if index else {"prefill": PrefillReport(prefill_seconds=0.001)}
                message.events.append(RequestEvent(**key, first_index=index, token_ids=[token], **report))
            else:
                message.slots.append(submit.slot)
                message.indices.append(index)
                message.token_ids.append(token)
        return message.SerializeToString()

    def take(self, data: bytes) -> None:
        self._deliver(RelayResponse.FromString(data))


class Writes:
    """Counts the writes towards clients."""

    def __init__(self) -> None:
        self.count = 0
        sent = Output._sent

        def counting(output: Output, now: float) -> None:
            self.count += 1
            sent(output, now)

        Output._sent = counting  # type: ignore[method-assign]

    async def reach(self, count: int) -> None:
        """Returns when there were so many."""
        await until(lambda: self.count >= count)


def client(face: str, address: str, streams: int, tokens: int) -> None:
    asyncio.run(crowd(face, address, Course(streams, 2 * tokens, prompt_of, time.monotonic()), CONNECTIONS))


async def measure(face: str, gathered: int, args: argparse.Namespace, writes: Writes) -> dict[str, Any]:
    server = RouterServer(RouterConfig(model=MODEL, grpc_port=0, http_port=0, coalesce_ms=args.coalesce_ms))
    await server.start()
    worker = Member(name="worker", role=ROLE_COLOCATED, incarnation="1", address="none", state=MEMBER_STATE_READY)
    server.registry.update([worker])
    tokens = LEAD + gathered * args.steps
    address = server.address if face == "grpc" else str(server.http_address)
    spawned = multiprocessing.get_context("spawn").Process(
        target=client, args=(face, address, args.streams, tokens + args.streams), daemon=True
    )
    spawned.start()
    try:
        await until(lambda: server.registry.complete)
        stream = cast(ScriptedStream, server.registry.stream(WorkerId("worker", "1")))
        await until(lambda: len(stream.submits) == args.streams)
        used = []
        letters = itertools.cycle(LETTERS)
        for index in range(LEAD):
            goal = writes.count + args.streams
            stream.take(stream.step(index, next(letters)))
            await writes.reach(goal)
        for index in range(LEAD, tokens, gathered):
            messages = [stream.step(at, next(letters)) for at in range(index, index + gathered)]
            # Tokens that come after the pace don't gather; those of one step come within it.
            await asyncio.sleep(0 if gathered > 1 else 2 * args.coalesce_ms / 1000)
            goal, begun = writes.count + args.streams, time.thread_time()
            for message in messages:
                stream.take(message)
            await writes.reach(goal)
            used.append((time.thread_time() - begun) / (args.streams * gathered) * 1e6)
    finally:
        spawned.kill()
        spawned.join()
        await server.stop(0)
    low, median, high = statistics.quantiles(used, n=4)
    return {"face": face, "gathered": gathered} | {
        name: round(value, 1) for name, value in (("us_per_token", median), ("quarter", low), ("three_quarters", high))
    }


async def until(condition: Any) -> None:
    """Sleeps between two looks: the loop's own waiting costs little CPU time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the streams have not come so far in time")
        await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--gathered", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--coalesce-ms", type=float, default=10.0)
    args = parser.parse_args()
    os.environ.setdefault(TOKEN_VARIABLE, TOKEN)
    registry.WorkerStream = ScriptedStream  # type: ignore[misc]
    writes = Writes()
    for face in args.face:
        for gathered in args.gathered:
            with asyncio.Runner(loop_factory=fast_loop()) as runner:
                print(json.dumps(runner.run(measure(face, gathered, args, writes))), flush=True)


if __name__ == "__main__":
    main()
