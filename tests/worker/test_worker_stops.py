"""A worker's end, and what its heartbeat says of its engine."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Reservation
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.rpc import options
from kvrelay.worker import relay_service
from kvrelay.worker import worker as worker_module
from kvrelay.worker.engine_thread import EngineEndedError, EngineThread
from kvrelay.worker.server import WorkerServer
from support.relays import LONG, SECONDS, Built, relay, submit, worker
from support.router_fakes import until
from support.secrets import METADATA

pytestmark = pytest.mark.anyio


def forget(server: WorkerServer) -> Reservation:
    """Blocks that the test may forget to release."""
    with server.worker.engine.lock:
        reservation = server.worker.engine.scheduler.reserve(Request("forgotten by the test", 1, (1, 2, 3), 3))
    assert reservation is not None
    return reservation


def heartbeat(server: WorkerServer) -> Member:
    member = Member()
    server.worker.describe(member)
    return member


async def test_a_drained_worker_returns_its_streams_as_migrations(server: WorkerServer) -> None:
    async with relay(server) as router:
        await router.send(submit=submit("long", **LONG))
        await router.event()
        stopping = asyncio.create_task(server.stop(0.0))
        failure = (await router.last()).failure
        assert (failure.code, failure.cause) == (Failure.CODE_RETRY, Failure.CAUSE_DRAINING)
        assert [ref.name for ref in failure.blamed] == ["colocated-0"]
        await stopping


async def test_a_step_that_does_not_return_shows_in_the_heartbeat(checkpoint: Path) -> None:
    built, release = Built(), threading.Event()
    async with worker(checkpoint, built=built) as server, relay(server) as router:
        step = built.engine.step
        built.engine.step = lambda: (release.wait(SECONDS) and step()) or []  # type: ignore[method-assign, func-returns-value]
        await router.send(submit=submit("stuck"))
        await until(lambda: heartbeat(server).step_age_seconds > 0.2)
        release.set()
        await router.last()
        await until(lambda: heartbeat(server).step_age_seconds == 0)
        assert heartbeat(server).slow_step_seconds > 0


async def test_an_engine_that_raises_fails_its_worker_and_what_waits_for_it(checkpoint: Path) -> None:
    built = Built()

    def broken() -> None:
        raise RuntimeError("broken by the test")

    async with worker(checkpoint, "decode", built=built) as server, relay(server) as router:
        built.engine.step = broken  # type: ignore[assignment, method-assign]
        await router.send(submit=submit("first"))
        assert "broken" in str(await asyncio.wait_for(server.failed(), SECONDS))
        assert heartbeat(server).failed
        role, answers = server.worker.role, list[object]()
        assert isinstance(role, DecodeRole)
        role.reserve(("first", 1), answers.append, passing=False)
        await until(lambda: answers)
        assert isinstance(answers[0], EngineEndedError)
        stopping = asyncio.create_task(server.stop(30.0))
        failure = (await router.last()).failure
        assert (failure.code, failure.cause) == (Failure.CODE_RETRY, Failure.CAUSE_PEER_LOST)
        await asyncio.wait_for(stopping, SECONDS)


async def test_a_relay_without_hello_is_ended(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_service, "HELLO_SECONDS", 0.2)
    assert options.HELLO_SECONDS == 5.0
    async with worker(checkpoint) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = WorkerServiceStub(channel).Relay(metadata=METADATA)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(call.read(), SECONDS)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_only_the_router_that_submitted_a_request_can_cancel_it(server: WorkerServer) -> None:
    async with relay(server) as owner, relay(server) as other:
        await owner.send(submit=submit("mine"))
        await other.send(cancel={"request_id": "mine", "attempt": 1})
        assert not (await owner.last()).HasField("failure"), "another router's cancel ended it"


async def test_blocks_that_nobody_gave_back_end_an_idle_worker(
    server: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_SECONDS", 0.0)
    async with relay(server) as router:
        forget(server)
        await router.send(submit=submit("last"))
        await router.last()
        assert "forgotten by the test" in str(await asyncio.wait_for(server.failed(), SECONDS))


async def test_blocks_reserved_for_a_request_that_has_come_before_the_check_are_no_leak(
    server: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], None]] = []
    post = EngineThread.post

    def hold_check_back(self: EngineThread, command: Callable[[], None], *rest: Callable[[], None]) -> None:
        if not held and getattr(command, "__qualname__", "").startswith("Worker._check_blocks"):
            held.append(command)
        else:
            post(self, command, *rest)

    monkeypatch.setattr(worker_module, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(EngineThread, "post", hold_check_back)
    async with relay(server) as router:
        await router.send(submit=submit("first"))
        await router.last()
        await until(lambda: held)
        await router.send(submit=submit("second", **LONG))
        await router.event()
        checked = threading.Event()
        for command in (held[0], forget(server).release, checked.set):
            server.worker.thread.post(command)
        assert await asyncio.to_thread(checked.wait, SECONDS)
        assert not heartbeat(server).failed
        await router.send(cancel={"request_id": "second", "attempt": 1})


async def test_a_co_located_worker_has_a_digest_too(checkpoint: Path) -> None:
    """Routers prefer one group of equal digests, so one without would not be used beside prefill and decode workers."""
    async with worker(checkpoint) as server:
        assert heartbeat(server).compatibility


async def test_who_waits_for_blocks_hears_of_a_cancel_that_no_step_follows(checkpoint: Path) -> None:
    built, release, reports = Built(), threading.Event(), list[object]()
    async with worker(checkpoint, built=built) as server, relay(server) as router:
        server.worker.thread.post(lambda: release.wait(SECONDS))
        server.worker.role.on_step = reports.append  # type: ignore[assignment, method-assign]
        await router.send(submit=submit("only"))
        await until(lambda: server.worker.request(("only", 1)))
        await router.send(cancel={"request_id": "only", "attempt": 1})
        await until(lambda: not server.worker.request(("only", 1)))
        # The engine's thread takes up the request and its end together.
        release.set()
        await until(lambda: reports)
        assert reports == [()]
        assert built.engine.steps == 0
