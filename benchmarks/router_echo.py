"""A worker that computes nothing: it answers a router as a real one does, with one message for each step.

python -m router_echo --config FILE     # as `router_throughput.py` has it: role and step_seconds
"""

import asyncio
import json
import os
import string
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, Member
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
from kvrelay.models import resolve
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import ROLES
from kvrelay.rpc.options import server_options
from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH

HOST = "127.0.0.1"
MODEL = "pico"
VOCAB_SIZE, CONTEXT = 4096, 4096

Running = dict[tuple[str, int], tuple[Submit, Iterator[int]]]
"""The requests of one router, each with the indices of its next tokens."""


class EchoWorker(WorkerServiceServicer):
    """Serves the relay. Its tokens are letters, so that each has a text of its own."""

    def __init__(self, name: str, role: str, supervisor: str, step_seconds: float) -> None:
        self.name, self.incarnation = name, uuid.uuid4().hex
        self._role = role
        self._supervisor = supervisor
        self._step_seconds = step_seconds
        self._running: list[Running] = []
        """The requests of each router."""
        tokenizer = Tokenizer.from_file(str(resolve(MODEL, weights=False) / "tokenizer.json"))
        self._letters = [tokenizer.token_to_id(letter) for letter in string.ascii_letters]

    async def serve(self) -> None:
        """Serves until the supervisor wants the process to end."""
        until = asyncio.Event()
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
            self._supervisor,
            Credentials("worker", os.environ[TOKEN_VARIABLE]),
            lambda: (member, self._load()),
            lambda members: None,
            until.set,
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
                message = RelayResponse(load=self._load(), submits_seen=submits, events=firsts)
                firsts.clear()
                self._step(running, message)
                if message.events or message.slots:
                    await context.write(message)
        finally:
            reader.cancel()
            self._running = [other for other in self._running if other is not running]

    def _take(self, submit: Submit, running: Running, firsts: list[RequestEvent]) -> None:
        if submit.phase != PHASE_PREFILL:
            running[submit.request_id, submit.attempt] = submit, iter(range(1, submit.sampling.max_tokens))
            return
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        first = [self._letters[0]]
        firsts.append(RequestEvent(**key, first_index=0, token_ids=first, prefill=PrefillReport(prefill_seconds=0.001)))
        firsts.append(RequestEvent(**key, transfer=TransferReport(transfer_bytes=1)))

    def _step(self, running: Running, message: RelayResponse) -> None:
        """Adds a token of each request."""
        for (name, attempt), (submit, indices) in list(running.items()):
            index = next(indices)
            token = self._letters[index % len(self._letters)]
            if 1 < index < submit.sampling.max_tokens - 1:
                message.slots.append(submit.slot)
                message.indices.append(index)
                message.token_ids.append(token)
                continue
            event = message.events.add(request_id=name, attempt=attempt, first_index=index, token_ids=[token])
            if index == submit.sampling.max_tokens - 1:
                event.finish_reason = FINISH_REASON_LENGTH
                del running[name, attempt]


if __name__ == "__main__":
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    names = ("name", "role", "supervisor", "step_seconds")
    asyncio.run(EchoWorker(*(config[name] for name in names)).serve())
