"""A real worker in this process, and relay streams of routers to it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    RouterHello,
    Sampling,
    Submit,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.identity import WorkerRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import RoleFactory, WorkerServer
from kvrelay.worker.worker import ColocatedRole
from support.router_fakes import until
from support.secrets import METADATA

SECONDS = 30.0
LONG: dict[str, Any] = {"sampling": {"max_tokens": 400, "top_p": 1.0, "ignore_eos": True}}
"""Fields of a request that runs for two seconds, so that a busy machine doesn't see its end too early."""
STEP_SECONDS = 0.005
ROLES: dict[WorkerRole, RoleFactory] = {"colocated": ColocatedRole, "prefill": PrefillRole, "decode": DecodeRole}


class Router:
    """One relay stream to a worker."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._events: list[RequestEvent] = []
        self._slots: dict[int, Submit] = {}

    async def send(self, **message: Any) -> None:
        request = RelayRequest(**message)
        if request.HasField("submit"):
            request.submit.slot = len(self._slots) + 1
            self._slots[request.submit.slot] = request.submit
        await self.call.write(request)

    async def event(self) -> RequestEvent:
        """The next event, or the next token that comes by itself as one."""
        while not self._events:
            response: RelayResponse = await asyncio.wait_for(self.call.read(), SECONDS)
            assert response is not grpc.aio.EOF
            for slot, index, token in zip(response.slots, response.indices, response.token_ids, strict=True):
                key = {"request_id": self._slots[slot].request_id, "attempt": self._slots[slot].attempt}
                self._events.append(RequestEvent(**key, first_index=index, token_ids=[token]))
            self._events += response.events
        return self._events.pop(0)

    async def last(self) -> RequestEvent:
        """The next event that ends a request."""
        while True:
            event = await self.event()
            if event.finish_reason or event.HasField("failure"):
                return event


def submit(request_id: str, **changes: Any) -> Submit:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "phase": PHASE_COLOCATED,
        "token_ids": [1, 2, 3],
        "prompt_tokens": 3,
        "sampling": Sampling(max_tokens=4, top_p=1.0, ignore_eos=True),
    }
    return Submit(**(fields | changes))


class Built:
    """Builds a worker's engine, which the test may change. Its steps take STEP_SECONDS at least."""

    engine: Engine

    def __call__(self, *arguments: Any) -> tuple[Engine, Runner]:
        self.engine, runner = build_engine(*arguments)
        step = self.engine.step

        def slow_step() -> list[Progress]:
            time.sleep(STEP_SECONDS)
            return step()

        self.engine.step = slow_step  # type: ignore[method-assign]
        return self.engine, runner


@asynccontextmanager
async def worker(
    checkpoint: Path, role: WorkerRole = "colocated", built: Built | None = None, **options: Any
) -> AsyncIterator[WorkerServer]:
    engine = EngineConfig(kv_memory_bytes=2**20, max_batch_tokens=64, threads=1)
    config = WorkerConfig(f"{role}-0", role, str(checkpoint), engine=engine, **options)
    server = WorkerServer(config, {role: ROLES[role]}, built or Built())
    try:
        await server.start()
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def relay(server: WorkerServer, incarnation: str | None = None) -> AsyncIterator[Router]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        router = Router(WorkerServiceStub(channel).Relay(metadata=METADATA))
        known = server.id.incarnation if incarnation is None else incarnation
        await router.send(hello=RouterHello(router="router-0", worker_incarnation=known))
        yield router


async def free_again(server: WorkerServer) -> None:
    """Waits until the engine holds no block."""
    await until(lambda: not server.worker.load().blocks.held, "no block is held")
