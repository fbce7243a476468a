"""A router whose decode worker is full: requests wait in the router, in order, and no prefill starts for them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, DeadlineExceeded, Exhausted, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Promised, Requests
from kvrelay.router.placing.usual import RATE_SECONDS
from support.router_fakes import FakeCluster, Job, fake_cluster, pair, run, silent, until

TOTAL = 4
BLOCKS = 100
PROMPT = [40] * 20
"""Tokens of a prompt that takes six blocks of four tokens, the first generated token included."""


def token_at(index: int) -> int:
    return 40 + index


def load(free: int, free_slots: int = 10, promised: int = 0) -> Load:
    return Load(
        blocks=Blocks(total=BLOCKS, free=free, held=BLOCKS - free, size=4),
        requests=Requests(running=0, free_slots=free_slots),
        promised=Promised(requests=promised, blocks=6 * promised),
    )


@asynccontextmanager
async def full_cluster(folder: Path, **config: object) -> AsyncIterator[tuple[FakeCluster, AsyncClient]]:
    """A cluster whose decode worker has reported that it is full."""
    async with (
        fake_cluster(folder, *pair(token_at), **config) as cluster,
        AsyncClient(cluster.router.address, timeout=10) as client,
    ):
        await tell(cluster, load(free=2))
        yield cluster, client


async def tell(cluster: FakeCluster, report: Load) -> None:
    """The decode worker reports a load, and the router has received it."""
    cluster.workers["decode-0"].report_load(report)

    def known() -> bool:
        capacity = next(view.capacity for view in cluster.router.registry.view() if view.role == "decode")
        return capacity is not None and (capacity.free, capacity.free_slots) == (
            report.blocks.free,
            report.requests.free_slots,
        )

    await until(known, "the router has the load")


def waiting(cluster: FakeCluster) -> int:
    return cluster.router.waiting


def ask(client: AsyncClient, **options: object) -> "asyncio.Task[tuple[int, ...]]":
    async def complete() -> tuple[int, ...]:
        completion = await client.complete(PROMPT, max_tokens=TOTAL, **options)  # type: ignore[arg-type]  # options
        return completion.token_ids

    return asyncio.create_task(complete())


def test_a_request_without_capacity_waits_before_its_prefill(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path) as (cluster, client):
            gate, decode = asyncio.Event(), cluster.workers["decode-0"]
            script = decode.script

            async def gated(job: Job) -> None:
                await gate.wait()
                await script(job)

            decode.script = gated
            tasks = [ask(client) for _ in range(3)]
            await until(lambda: waiting(cluster) == 3, "three wait")
            assert cluster.workers["prefill-0"].jobs == []
            # Capacity for one: the blocks promised to the first hold the second back, until decode reports more.
            await tell(cluster, load(free=6))
            await cluster.job("decode-0")
            assert waiting(cluster) == 2
            await tell(cluster, load(free=7, promised=1))
            assert waiting(cluster) == 2
            gate.set()
            await tell(cluster, load(free=90))
            for task in tasks:
                assert await task == tuple(token_at(index) for index in range(TOTAL))
            assert waiting(cluster) == 0
            assert [record.outcome for record in cluster.records] == ["length"] * 3
            assert min(record.router_queue_seconds for record in cluster.records) > 0

    run(test)


def test_prompts_wait_while_the_prefill_worker_has_enough_to_do_and_tenants_take_turns(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}" for name in "ab"))

    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), prefill_ahead_tokens=100, api_keys=str(keys)) as cluster,
            AsyncClient(cluster.router.address, api_key="a", timeout=10) as a,
            AsyncClient(cluster.router.address, api_key="b", timeout=10) as b,
        ):
            prefill = cluster.workers["prefill-0"]

            def pending() -> int:
                return sum(view.pending_tokens for view in cluster.router.registry.view())

            async def busy(tokens: int) -> None:
                prefill.report_load(Load(pending_tokens=tokens))
                await until(lambda: pending() == tokens, "the router has the load")

            await busy(100)
            prefill.script = silent
            tasks = []
            for client, count in ((a, 10), (b, 2)):
                tasks += [ask(client) for _ in range(count)]
                expected = len(tasks)
                await until(lambda expected=expected: waiting(cluster) == expected, "all wait")
            # With 25 tokens to compute, four prompts of 20 tokens find fewer than 100 before them.
            await busy(25)
            await cluster.job("prefill-0", 3)
            assert waiting(cluster) == 8
            assert sorted(job.submit.tenant for job in prefill.jobs) == ["a", "a", "b", "b"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_slots_count_as_blocks_do(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path) as (cluster, client):
            await tell(cluster, load(free=90, free_slots=0))
            task = ask(client)
            await until(lambda: waiting(cluster) == 1, "it waits")
            await tell(cluster, load(free=90, free_slots=1))
            await task

    run(test)


def test_a_cancel_in_the_queue_leaves_nothing_anywhere(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path) as (cluster, client):
            task = ask(client)
            await until(lambda: waiting(cluster) == 1, "it waits")
            started = time.monotonic()
            task.cancel()
            await until(lambda: waiting(cluster) == 0, "it no longer waits")
            assert time.monotonic() - started < 0.5
            await until(lambda: cluster.records, "it has ended")
            assert cluster.records[0].outcome == "cancelled"
            assert cluster.workers["prefill-0"].jobs == cluster.workers["decode-0"].jobs == []

    run(test)


def test_the_clients_deadline_and_the_routers_limit_hold_in_the_queue(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path, first_token_timeout_seconds=0.5) as (cluster, client):
            with pytest.raises(DeadlineExceeded):
                await ask(client, timeout=0.2)
            with pytest.raises(Exhausted, match="waited for workers with capacity") as shed:
                await ask(client)
            assert shed.value.retry_after == RATE_SECONDS, "nothing has ended lately"
            await until(lambda: waiting(cluster) == 0, "nobody waits")

    run(test)


def test_a_request_beyond_the_queues_limit_gets_a_retry_delay(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path, max_queue=2) as (cluster, client):
            tasks = [ask(client) for _ in range(2)]
            await until(lambda: waiting(cluster) == 2, "two wait")
            with pytest.raises(Exhausted, match="max_queue") as refused:
                await ask(client)
            assert refused.value.retry_after == RATE_SECONDS
            await tell(cluster, load(free=90))
            await asyncio.gather(*tasks)

    run(test)


def test_waiting_requests_are_refused_when_no_worker_is_left(tmp_path: Path) -> None:
    async def test() -> None:
        async with full_cluster(tmp_path, worker_wait_seconds=0.2) as (cluster, client):
            task = ask(client)
            await until(lambda: waiting(cluster) == 1, "it waits")
            cluster.announce(decode_0=MEMBER_STATE_DEAD)
            with pytest.raises(Unavailable, match="no worker can take the request"):
                await task

    run(test)
