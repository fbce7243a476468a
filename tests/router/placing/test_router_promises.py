"""Placements of one router on a worker reach other routers through that worker's own report."""

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Completion
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, Member
from kvrelay.router.placing.placement import WorkerView
from kvrelay.router.server import RouterServer
from kvrelay.rpc.identity import ROLES, WorkerRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from kvrelay.worker.worker import ColocatedRole
from support.checkpoints import make_checkpoint
from support.router_fakes import FakeCluster, FakeWorker, fake, second_router, silent, until
from support.scenes import Serve

PROMPT = [5] * 40
TOKENS = 20
TRIES = 9
KNOWN_SECONDS, TURN_SECONDS = 0.1, 0.001


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker") / "llama", "llama")


Scene = tuple[FakeCluster, RouterServer, WorkerServer]


@pytest.fixture
def two_routers(serve: Serve, stack: AsyncExitStack, checkpoint: Path) -> Callable[..., Awaitable[Scene]]:
    async def start(role: WorkerRole, *beside: FakeWorker) -> Scene:
        """Starts two routers over a real worker, and scripted ones beside it."""
        engine = EngineConfig(kv_memory_bytes=2**20, max_batch_tokens=64, threads=1)
        config = WorkerConfig(f"{role}-0", role, str(checkpoint), engine=engine)
        server = WorkerServer(config, {"decode": DecodeRole, "colocated": ColocatedRole})
        await server.start()
        stack.push_async_callback(server.stop, 0)
        digest = server.worker.role.compatibility
        for worker in beside:
            worker.compatibility = digest
            worker.model.CopyFrom(server.worker.hello().model)
        member = Member(
            name=server.id.name,
            role=ROLES[role],
            incarnation=server.id.incarnation,
            address=server.address,
            state=MEMBER_STATE_READY,
            compatibility=digest,
        )
        cluster = await serve(*beside)
        second = await stack.enter_async_context(second_router(cluster))
        cluster.supervisor.announce(member, *(worker.member() for worker in beside))
        for router in (cluster.router, second):
            await until(lambda router=router: router.registry.complete, "both routers can place")
        return cluster, second, server

    return start


def view(router: RouterServer, role: str) -> WorkerView:
    return next(view for view in router.registry.view() if view.role == role)


async def seconds_until_known(condition: Callable[[], object]) -> float:
    """Counts the turns of the event loop, which both routers and the worker share, as an idle machine makes them: what
    keeps all of them from running at once is no part of it."""
    for turn in range(round(5 / TURN_SECONDS)):
        if condition():
            return turn * TURN_SECONDS
        await asyncio.sleep(TURN_SECONDS)
    raise AssertionError("the other router never knows")


async def test_blocks_promised_to_one_router_are_known_to_another(two_routers: Any) -> None:
    cluster, second, server = await two_routers("decode", fake("prefill-0", silent))
    blocks = -(-(len(PROMPT) + TOKENS) // server.worker.cache.block_size)

    def promised() -> tuple[int, int]:
        found = view(second, "decode").capacity
        return (0, 0) if found is None else (found.promised_requests, found.promised_blocks)

    took = []
    for number in range(TRIES):
        stream = cluster.client.generate(PROMPT, max_tokens=TOKENS, temperature=0)
        await cluster.job("prefill-0", number)
        took.append(await seconds_until_known(lambda: promised() != (0, 0)))
        assert promised() == (1, blocks)
        await stream.aclose()
        took.append(await seconds_until_known(lambda: promised() == (0, 0)))
    assert statistics.median(took) < KNOWN_SECONDS, took


async def test_tokens_that_wait_for_a_step_to_end_are_known_to_another_router(
    two_routers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, running, step = threading.Event(), threading.Event(), Engine.step

    def long_step(engine: Engine) -> object:
        running.set()
        release.wait(10)
        return step(engine)

    cluster, second, _ = await two_routers("colocated")
    monkeypatch.setattr(Engine, "step", long_step)

    def ask() -> "asyncio.Task[Completion]":
        return asyncio.create_task(cluster.client.complete(PROMPT, max_tokens=2, temperature=0))

    def pending() -> int:
        return view(second, "colocated").pending_tokens

    asked, took = [ask()], []
    await asyncio.to_thread(running.wait, 10)
    await seconds_until_known(lambda: pending() >= len(PROMPT))
    for number in range(2, 2 + TRIES):
        asked.append(ask())
        took.append(await seconds_until_known(lambda number=number: pending() >= number * len(PROMPT)))
    assert statistics.median(took) < KNOWN_SECONDS, took
    release.set()
    await asyncio.gather(*asked)
    assert await seconds_until_known(lambda: pending() == 0) < 1, "an idle worker says so"
