"""A router whose decode worker is full: requests wait in the router, in order, and no prefill starts for them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvrelay.client import Completion, DeadlineExceeded, Exhausted, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Promised, Requests
from kvrelay.router.placing.usual import RATE_SECONDS
from support.router_fakes import FakeCluster, after, decode_of, key_file, pair, silent, until
from support.scenes import Serve

Start = Callable[..., Awaitable[FakeCluster]]
BLOCKS = 100
PROMPT = [40] * 20
"""Tokens of a prompt that takes six blocks of four tokens, the first generated token included."""


def load(free: int, free_slots: int = 10, promised: int = 0) -> Load:
    return Load(
        blocks=Blocks(total=BLOCKS, free=free, held=BLOCKS - free, size=4),
        requests=Requests(running=0, free_slots=free_slots),
        promised=Promised(requests=promised, blocks=6 * promised),
    )


@pytest.fixture
def full(serve: Serve) -> Start:
    async def start(**config: object) -> FakeCluster:
        """Starts a router whose decode worker has reported that it is full."""
        cluster = await serve(*pair(), **config)
        await cluster.report("decode-0", load(free=2))
        return cluster

    return start


async def begin(cluster: FakeCluster, count: int = 1) -> list["asyncio.Task[Completion]"]:
    """Requests, which wait in the router."""
    tasks = [cluster.asking(PROMPT, 4) for _ in range(count)]
    await until(lambda: cluster.router.waiting == count, "all wait")
    return tasks


async def test_a_request_without_capacity_waits_before_its_prefill(full: Start) -> None:
    cluster = await full()
    gate = asyncio.Event()
    cluster.workers["decode-0"].script = after(gate, decode_of())
    tasks = await begin(cluster, 3)
    assert cluster.workers["prefill-0"].jobs == []
    # Slots count as blocks do.
    await cluster.report("decode-0", load(free=90, free_slots=0))
    assert cluster.router.waiting == 3
    # Capacity for one: the blocks promised to the first hold the second back, until decode reports more.
    await cluster.report("decode-0", load(free=6))
    await cluster.job("decode-0")
    assert cluster.router.waiting == 2
    await cluster.report("decode-0", load(free=7, promised=1))
    assert cluster.router.waiting == 2
    gate.set()
    await cluster.report("decode-0", load(free=90))
    await asyncio.gather(*tasks)
    assert cluster.router.waiting == 0
    assert cluster.outcomes == ["length"] * 3
    assert min(record.router_queue_seconds for record in cluster.records) > 0


async def test_prompts_wait_while_the_prefill_worker_has_enough_to_do_and_tenants_take_turns(
    serve: Serve, tmp_path: Path
) -> None:
    cluster = await serve(*pair(), prefill_ahead_tokens=100, api_keys=key_file(tmp_path, a="", b=""))
    prefill = cluster.workers["prefill-0"]
    prefill.script = silent
    await cluster.report("prefill-0", Load(pending_tokens=100))
    tasks = []
    for key, count, waiting in (("a", 10, 10), ("b", 2, 12)):
        tasks += [cluster.asking(PROMPT, 4, cluster.client_of(api_key=key)) for _ in range(count)]
        await until(lambda waiting=waiting: cluster.router.waiting == waiting, "all wait")
    # With 25 tokens to compute, four prompts of 20 tokens find fewer than 100 before them.
    await cluster.report("prefill-0", Load(pending_tokens=25))
    await cluster.job("prefill-0", 3)
    assert cluster.router.waiting == 8
    assert sorted(job.submit.tenant for job in prefill.jobs) == ["a", "a", "b", "b"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_wait_ends_with_a_cancel_the_clients_deadline_or_the_routers_limits(full: Start) -> None:
    """Nothing of the request is left anywhere."""
    cluster = await full(first_token_timeout_seconds=3.0, max_queue=2)
    with pytest.raises(DeadlineExceeded):
        await cluster.ask(PROMPT, timeout=0.2)
    await until(lambda: cluster.router.waiting == 0, "nobody waits")
    cancelled, shed = await begin(cluster, 2)
    with pytest.raises(Exhausted, match="max_queue") as refused:
        await cluster.ask(PROMPT)
    cancelled.cancel()
    await until(lambda: cluster.router.waiting == 1, "one waits no longer", 2.0)
    with pytest.raises(Exhausted, match="waited for workers with capacity") as late:
        await shed
    assert refused.value.retry_after == late.value.retry_after == RATE_SECONDS, "nothing has ended lately"
    await cluster.idle()
    assert set(cluster.outcomes[1:]) == {"exhausted", "cancelled"}
    assert cluster.workers["prefill-0"].jobs == cluster.workers["decode-0"].jobs == []


async def test_waiting_requests_are_refused_when_no_worker_is_left(full: Start) -> None:
    cluster = await full(worker_wait_seconds=0.2)
    (task,) = await begin(cluster)
    cluster.announce(decode_0=MEMBER_STATE_DEAD)
    with pytest.raises(Unavailable, match="no worker can take the request"):
        await task
