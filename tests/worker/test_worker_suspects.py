"""Suspects in a worker: which ones may run beside each other, and when it begins to compute them."""

import asyncio
from typing import Any

import pytest

from kvrelay.internal.v1.worker_pb2 import Begin, Cancel, Failure, RequestEvent
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH
from kvrelay.worker.server import WorkerServer
from support.relays import LONG, Router, free_again, relay, submit

pytestmark = pytest.mark.anyio

TRIAL: dict[str, Any] = {"suspect_tokens": 4, "on_trial": True}
BESIDE: dict[str, Any] = {"suspect_tokens": 4}
NONE: dict[str, Any] = {}


async def offered(router: Router, name: str, **fields: Any) -> RequestEvent:
    """The worker's answer to a Submit."""
    await router.send(submit=submit(name, **fields))
    event = await router.event()
    assert event.request_id == name
    return event


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (TRIAL, TRIAL, True),
        (TRIAL, BESIDE, True),
        (BESIDE, TRIAL, True),
        (BESIDE, BESIDE, False),
        (TRIAL, NONE, False),
        (NONE, TRIAL, False),
    ],
)
async def test_a_suspect_on_trial_has_no_other_one_beside_it(
    server: WorkerServer, first: dict[str, Any], second: dict[str, Any], refused: bool
) -> None:
    """Whichever router sends it, and whether it has begun or not."""
    async with relay(server) as one, relay(server) as other:
        assert not (await offered(one, "first", **first, **LONG)).HasField("failure")
        failure = (await offered(other, "second", **second, **LONG)).failure
        assert (failure.cause == Failure.CAUSE_TRIAL) == (failure.code == Failure.CODE_RETRY) == refused
        await one.send(cancel=Cancel(request_id="first", attempt=1))
        while refused:  # a cancel has no answer
            refused_again = (await offered(other, "second", **second, **LONG)).HasField("failure")
            if not refused_again:
                break
            await asyncio.sleep(0.005)
        await other.send(cancel=Cancel(request_id="second", attempt=1))
        await free_again(server)


async def test_a_suspect_is_one_for_so_many_tokens(server: WorkerServer) -> None:
    async with relay(server) as one, relay(server) as other:
        assert (await offered(one, "first", suspect_tokens=200, on_trial=True, **LONG)).taken
        await one.send(begin=Begin(request_id="first", attempt=1))
        tokens = 0
        while tokens < 200:
            tokens += len((await one.event()).token_ids)
        assert (await offered(other, "second", **TRIAL)).taken, "the first one has proved harmless"
        await other.send(begin=Begin(request_id="second", attempt=1))
        assert (await other.last()).finish_reason == FINISH_REASON_LENGTH
        assert (await one.last()).finish_reason == FINISH_REASON_LENGTH
        await free_again(server)


async def test_a_suspect_is_computed_once_its_own_router_lets_it_begin(server: WorkerServer) -> None:
    async with relay(server) as one, relay(server) as other:
        before = server.worker.load().computed_tokens
        assert (await offered(one, "first", **TRIAL)).taken
        assert (await offered(one, "cancelled", attempt=1)).token_ids, "it was none, and keeps nobody waiting"
        assert (await one.last()).finish_reason == FINISH_REASON_LENGTH
        done = server.worker.load().computed_tokens
        assert done > before
        await other.send(begin=Begin(request_id="first", attempt=1))
        await other.send(begin=Begin(request_id="unknown", attempt=1))
        await other.send(submit=submit("no suspect"))
        assert (await other.last()).finish_reason == FINISH_REASON_LENGTH
        assert server.worker.load().computed_tokens == 2 * done - before, "nothing of the first one"
        for _ in range(2):  # the second one says nothing new
            await one.send(begin=Begin(request_id="first", attempt=1))
        event = await one.last()
        assert (event.request_id, event.finish_reason) == ("first", FINISH_REASON_LENGTH)
        await free_again(server)


async def test_a_suspect_that_never_begins_ends_by_its_time_limit(server: WorkerServer) -> None:
    async with relay(server) as one, relay(server) as other:
        assert (await offered(one, "first", timeout_seconds=0.2, **TRIAL)).taken
        assert (await one.last()).failure.code == Failure.CODE_FULL
        assert (await offered(other, "second", **TRIAL)).taken
        await other.send(cancel=Cancel(request_id="second", attempt=1))
        await free_again(server)
