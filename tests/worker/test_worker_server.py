"""A worker as its routers see it: what it refuses, what it frees; no message of a router ends it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    PHASE_DECODE,
    PHASE_PREFILL,
    Cancel,
    Failure,
    PeerRef,
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
from kvrelay.rpc.metrics import families
from kvrelay.transfer.protocol.messages import Code
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, Constraint
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.relay.requests import request_of
from kvrelay.worker.server import RoleFactory, WorkerServer
from kvrelay.worker.worker import ColocatedRole
from support.access import METADATA
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.hash_runner import hash_spec

SECONDS = 10.0
ROLES: dict[WorkerRole, RoleFactory] = {"colocated": ColocatedRole, "prefill": PrefillRole, "decode": DecodeRole}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker") / "llama", "llama")


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


@asynccontextmanager
async def worker(checkpoint: Path, role: WorkerRole = "colocated", **options: Any) -> AsyncIterator[WorkerServer]:
    engine = EngineConfig(kv_memory_bytes=2**20, max_batch_tokens=64, threads=1)
    config = WorkerConfig(f"{role}-0", role, str(checkpoint), engine=engine, **options)
    server = WorkerServer(config, {role: ROLES[role]})
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
        await router.send(hello=RouterHello(router="router-0", router_incarnation="a", worker_incarnation=known))
        yield router


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def free_again(server: WorkerServer) -> None:
    """Waits until the engine holds no block."""
    async with asyncio.timeout(SECONDS):
        while server.worker.load().blocks.held:  # noqa: ASYNC110 # there is no event for it
            await asyncio.sleep(0.005)


def test_a_bad_submit_is_refused_and_the_worker_goes_on(checkpoint: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": [1, VOCAB_SIZE, 2]}, f"tokens has the id {VOCAB_SIZE}; allowed: 0 to {VOCAB_SIZE - 1}"),
        ({"prompt_tokens": 4}, "prompt_tokens is 4"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"token_ids": [], "prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"token_ids": [1] * 9, "prompt_tokens": 3}, "max_tokens is 4; 6 completion tokens are there already"),
        ({"sampling": Sampling(max_tokens=10**6, top_p=1.0)}, "prompt_tokens plus max_tokens"),
        ({"sampling": Sampling(max_tokens=4, top_p=1.0, temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": Sampling(max_tokens=4, top_k=2)}, "top_p is 0.0; allowed: above 0"),
    ]

    async def test() -> None:
        async with worker(checkpoint) as server, relay(server) as router:
            for number, (changes, why) in enumerate(bad):
                await router.send(submit=submit(f"bad-{number}", **changes))
                event = await router.event()
                assert event.failure.code == Failure.CODE_INVALID
                assert why in event.failure.message
            await router.send(submit=submit("good"))
            assert (await router.last()).finish_reason == FINISH_REASON_LENGTH

    run(test)


@given(top_k=st.integers(0, 2**32 - 1))
def test_a_top_k_of_the_whole_vocabulary_or_more_keeps_all(top_k: int) -> None:
    message = submit("any", sampling=Sampling(max_tokens=4, top_p=1.0, top_k=top_k))
    found = request_of(message, hash_spec()).sampling
    found.check()
    assert found.top_k == (top_k if top_k < hash_spec().vocab_size else 0)


def test_an_invalid_constraint_is_counted_and_its_text_is_in_no_log(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = Sampling(max_tokens=4, top_p=1.0, constraint=Constraint(regex="(secret"))

    async def test() -> None:
        async with worker(checkpoint) as server, relay(server) as router:
            await router.send(submit=submit("bad", sampling=sampling))
            failure = (await router.last()).failure
            assert failure.code == Failure.CODE_INVALID
            assert "(secret" in failure.message
            counted = server.worker.metrics.metrics.counter(families.REQUEST_FAILURES, "invalid")
            assert next(sample.value for sample in counted.collect()[0].samples) == 1

    run(test)
    (line,) = [vars(record) for record in caplog.records if record.message == "request failed"]
    assert "secret" not in str(line)


def test_a_phase_of_another_role_and_a_second_submit_are_defects(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint) as server, relay(server) as router:
            await router.send(submit=submit("decode", phase=PHASE_DECODE))
            assert (await router.event()).failure.code == Failure.CODE_INTERNAL
            endless = Sampling(max_tokens=500, top_p=1.0, ignore_eos=True)
            await router.send(submit=submit("twice", sampling=endless))
            await router.send(submit=submit("twice", sampling=endless))
            assert "submitted twice" in (await router.last()).failure.message
            await router.send(cancel=Cancel(request_id="twice", attempt=1))
            await free_again(server)

    run(test)


def test_a_full_worker_refuses_and_a_request_without_a_token_in_time_fails(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint, max_waiting=1) as server, relay(server) as router:
            release, loop = asyncio.Event(), asyncio.get_running_loop()

            def block() -> None:
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(SECONDS)

            server.worker.post_to_engine(block)
            await router.send(submit=submit("first", timeout_seconds=0.2))
            await router.send(submit=submit("second"))
            full, expired = await router.event(), await router.event()
            assert (full.request_id, full.failure.code) == ("second", Failure.CODE_FULL)
            assert "max_waiting is 1" in full.failure.message
            assert (expired.request_id, expired.failure.code) == ("first", Failure.CODE_FULL)
            release.set()
            await free_again(server)

    run(test)


@pytest.mark.parametrize(("role", "phase"), [("prefill", PHASE_PREFILL), ("decode", PHASE_DECODE)])
def test_a_cancel_by_the_peer_is_not_told_as_a_failure(checkpoint: Path, role: WorkerRole, phase: int) -> None:
    """The peer tells the router why it ended the request. This word must not come first and have it retried."""

    async def test() -> None:
        async with worker(checkpoint, role) as server, relay(server) as router:
            handoffs = server.worker.role
            assert isinstance(handoffs, HandoffRole)
            for name in ("refused by the peer", "late"):
                await router.send(submit=submit(name, phase=phase, peer=PeerRef(name="peer-0", incarnation="a")))
            async with asyncio.timeout(SECONDS):
                while server.worker.request(("late", 1)) is None:  # noqa: ASYNC110 # there is no event for it
                    await asyncio.sleep(0.005)
            handoffs.handoff_failed(("refused by the peer", 1), Code.CANCELLED, "cancelled on peer-0")
            handoffs.handoff_failed(("late", 1), Code.TIMEOUT, "no message")
            assert (await router.last()).request_id == "late"
            assert server.worker.request(("refused by the peer", 1)) is None
            await free_again(server)

    run(test)


def test_a_stream_that_ends_frees_what_was_submitted_on_it(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint) as server:
            async with relay(server) as router:
                for number in range(3):
                    sampling = Sampling(max_tokens=500, top_p=1.0, ignore_eos=True)
                    await router.send(submit=submit(f"endless-{number}", sampling=sampling))
                await router.event()
            await free_again(server)

    run(test)


def test_a_stream_to_another_incarnation_is_refused(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint) as server, relay(server, incarnation="yesterday's") as router:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await router.event()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "yesterday's" in (refused.value.details() or "")

    run(test)


def test_draining_lets_what_runs_end_and_takes_nothing_new(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint) as server, relay(server) as router:
            await router.send(submit=submit("running", sampling=Sampling(max_tokens=100, top_p=1.0, ignore_eos=True)))
            await router.event()
            stopping = asyncio.create_task(server.stop(SECONDS))
            await asyncio.sleep(0)
            await router.send(submit=submit("late"))
            ends = {event.request_id: event for event in (await router.last(), await router.last())}
            assert ends["late"].failure.code == Failure.CODE_RETRY
            assert ends["running"].finish_reason == FINISH_REASON_LENGTH
            await stopping

    run(test)
