"""Placements of one router on a worker reach other routers through that worker's own report."""

import asyncio
import statistics
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, Member
from kvrelay.router.placing.placement import WorkerView
from kvrelay.router.server import RouterServer
from kvrelay.rpc.identity import ROLES, WorkerRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from kvrelay.worker.worker import ColocatedRole
from support.checkpoints import make_checkpoint
from support.router_fakes import FakeCluster, FakeWorker, fake_cluster, run, second_router, silent, until

PROMPT = [5] * 40
TOKENS = 20
TRIES = 9
KNOWN_SECONDS = 0.1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker") / "llama", "llama")


@asynccontextmanager
async def real_worker(checkpoint: Path, role: WorkerRole) -> AsyncIterator[WorkerServer]:
    engine = EngineConfig(kv_memory_bytes=2**20, max_batch_tokens=64, threads=1)
    config = WorkerConfig(f"{role}-0", role, str(checkpoint), engine=engine)
    server = WorkerServer(config, {"decode": DecodeRole, "colocated": ColocatedRole})
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def two_routers(
    folder: Path, server: WorkerServer, *beside: FakeWorker
) -> AsyncIterator[tuple[FakeCluster, RouterServer]]:
    """Two routers that have reached the real worker, and the scripted ones beside it."""
    digest = server.worker.role.compatibility
    for worker in beside:
        worker.compatibility = digest
        worker.model.CopyFrom(server.worker.hello().model)
    member = Member(
        name=server.id.name,
        role=ROLES[server.config.role],
        incarnation=server.id.incarnation,
        address=server.address,
        state=MEMBER_STATE_READY,
        compatibility=digest,
    )
    async with fake_cluster(folder, *beside) as cluster, second_router(cluster) as second:
        cluster.supervisor.announce(member, *(worker.member() for worker in beside))
        for router in (cluster.router, second):
            await until(lambda router=router: router.registry.complete, "both routers can place")
        yield cluster, second


def view(router: RouterServer, role: str) -> WorkerView:
    return next(view for view in router.registry.view() if view.role == role)


async def seconds_until_known(condition: Callable[[], object]) -> float:
    clock = asyncio.get_running_loop().time
    started = clock()
    while not condition():
        assert clock() - started < 5, "the other router never knows"
        await asyncio.sleep(0.001)
    return clock() - started


def test_blocks_promised_to_one_router_are_known_to_another(tmp_path: Path, checkpoint: Path) -> None:
    async def test() -> None:
        prefill = FakeWorker("prefill-0", "prefill", silent)
        async with (
            real_worker(checkpoint, "decode") as server,
            two_routers(tmp_path / "model", server, prefill) as (cluster, second),
            AsyncClient(cluster.router.address) as client,
        ):
            size = server.worker.layout.block_size
            took = []
            for number in range(TRIES):
                stream = client.generate(PROMPT, max_tokens=TOKENS, temperature=0)
                await cluster.job("prefill-0", number)

                def capacity() -> tuple[int, int]:
                    found = view(second, "decode").capacity
                    return (0, 0) if found is None else (found.promised_requests, found.promised_blocks)

                took.append(await seconds_until_known(lambda: capacity() != (0, 0)))
                assert capacity() == (1, -(-(len(PROMPT) + TOKENS) // size))
                await stream.aclose()
                took.append(await seconds_until_known(lambda: capacity() == (0, 0)))
            assert statistics.median(took) < KNOWN_SECONDS, took

    run(test)


def test_tokens_that_wait_for_a_step_to_end_are_known_to_another_router(tmp_path: Path, checkpoint: Path) -> None:
    async def test() -> None:
        async with (
            real_worker(checkpoint, "colocated") as server,
            two_routers(tmp_path / "model", server) as (cluster, second),
            AsyncClient(cluster.router.address) as client,
        ):
            engine, release, running = server.worker._engine, threading.Event(), threading.Event()
            step = engine.step

            def long_step() -> object:
                running.set()
                release.wait(10)
                return step()

            engine.step = long_step  # type: ignore[assignment, method-assign]
            first = asyncio.create_task(client.complete(PROMPT, max_tokens=2, temperature=0))
            await asyncio.to_thread(running.wait, 10)
            await seconds_until_known(lambda: view(second, "colocated").pending_tokens >= len(PROMPT))
            took = []
            others = []
            for number in range(2, 2 + TRIES):
                others.append(asyncio.create_task(client.complete(PROMPT, max_tokens=2, temperature=0)))
                took.append(
                    await seconds_until_known(
                        lambda number=number: view(second, "colocated").pending_tokens >= number * len(PROMPT)
                    )
                )
            assert statistics.median(took) < KNOWN_SECONDS, took
            release.set()
            await asyncio.gather(first, *others)
            took = [await seconds_until_known(lambda: view(second, "colocated").pending_tokens == 0)]
            assert took[0] < 1, "an idle worker says so"

    run(test)
