"""A worker as its routers see it: what it refuses, what it frees; no message of a router ends it."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.request import Request
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_PREFILL, Member
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_DECODE,
    PHASE_PREFILL,
    WAIT_BLOCKS,
    Cancel,
    ClientCall,
    Failure,
    PeerRef,
    Sampling,
)
from kvrelay.rpc.identity import WorkerId, WorkerRole
from kvrelay.rpc.metrics import families
from kvrelay.transfer.protocol.events import tokens_digest
from kvrelay.transfer.protocol.messages import Code, Message, Offer
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, Constraint
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.relay import fences
from kvrelay.worker.relay.fences import Fences
from kvrelay.worker.relay.requests import request_of
from kvrelay.worker.server import WorkerServer
from support.checkpoints import VOCAB_SIZE
from support.hash_runner import hash_spec
from support.relays import LONG, SECONDS, free_again, relay, submit, worker
from support.router_fakes import until

pytestmark = pytest.mark.anyio


async def test_a_bad_submit_is_refused_and_the_worker_goes_on(server: WorkerServer) -> None:
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

    async with relay(server) as router:
        for number, (changes, why) in enumerate(bad):
            await router.send(submit=submit(f"bad-{number}", **changes))
            event = await router.event()
            assert event.failure.code == Failure.CODE_INVALID
            assert why in event.failure.message
        await router.send(submit=submit("good"))
        assert (await router.last()).finish_reason == FINISH_REASON_LENGTH


async def test_a_degree_that_the_model_cant_have_is_refused_before_any_rank_is_started(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.worker.server.RankGroup", lambda *given: pytest.fail("ranks are started"))
    config = WorkerConfig("w", "colocated", str(checkpoint), engine=EngineConfig(tensor_parallel=3))
    server = WorkerServer(config)
    try:
        with pytest.raises(
            ValueError, match=r"tensor_parallel is 3; allowed: 1, 2, 4, for 4 query heads and 2 KV heads"
        ):
            await server.start()
    finally:
        await server.stop(0)


@given(top_k=st.integers(0, 2**32 - 1))
def test_a_top_k_of_the_whole_vocabulary_or_more_keeps_all(top_k: int) -> None:
    message = submit("any", sampling=Sampling(max_tokens=4, top_p=1.0, top_k=top_k))
    found = request_of(message, hash_spec(), 0.0).sampling
    found.check()
    assert found.top_k == (top_k if top_k < hash_spec().vocab_size else 0)


async def test_an_invalid_constraint_is_counted_and_its_text_is_in_no_log(
    server: WorkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = Sampling(max_tokens=4, top_p=1.0, constraint=Constraint(regex="(secret"))

    async with relay(server) as router:
        await router.send(submit=submit("bad", sampling=sampling))
        failure = (await router.last()).failure
        assert failure.code == Failure.CODE_INVALID
        assert "(secret" in failure.message
        counted = server.worker.metrics.metrics.counter(families.REQUEST_FAILURES, "invalid")
        assert next(sample.value for sample in counted.collect()[0].samples) == 1
    (line,) = [vars(record) for record in caplog.records if record.message == "request failed"]
    assert "secret" not in str(line)


async def test_a_phase_of_another_role_and_a_second_submit_are_defects(server: WorkerServer) -> None:
    async with relay(server) as router:
        await router.send(submit=submit("decode", phase=PHASE_DECODE))
        assert (await router.event()).failure.code == Failure.CODE_INTERNAL
        for _ in range(2):
            await router.send(submit=submit("twice", **LONG))
        assert "submitted twice" in (await router.last()).failure.message
        await router.send(cancel=Cancel(request_id="twice", attempt=1))
        await free_again(server)


async def test_a_full_worker_refuses_and_a_request_without_a_token_in_time_fails(checkpoint: Path) -> None:
    async with worker(checkpoint, max_waiting=1) as server, relay(server) as router:
        release, loop = asyncio.Event(), asyncio.get_running_loop()

        def block() -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(SECONDS)

        server.worker.thread.post(block)
        await router.send(submit=submit("first", timeout_seconds=1.0))
        await router.send(submit=submit("second"))
        full, expired = await router.event(), await router.event()
        assert (full.request_id, full.failure.code) == ("second", Failure.CODE_FULL)
        assert "max_waiting is 1" in full.failure.message
        assert (expired.request_id, expired.failure.code) == ("first", Failure.CODE_FULL)
        release.set()
        await free_again(server)


async def test_a_request_that_runs_takes_no_place_of_those_that_wait(checkpoint: Path) -> None:
    async with worker(checkpoint, max_waiting=1) as server, relay(server) as router:
        await router.send(submit=submit("runs", **LONG))
        await until(lambda: server.worker.load().requests.running == 1)
        await router.send(submit=submit("second"))
        last = await router.last()
        assert (last.request_id, last.finish_reason) == ("second", FINISH_REASON_LENGTH)


@pytest.mark.parametrize(("role", "phase"), [("prefill", PHASE_PREFILL), ("decode", PHASE_DECODE)])
async def test_a_cancel_by_the_peer_is_not_told_as_a_failure(checkpoint: Path, role: WorkerRole, phase: int) -> None:
    """The peer tells the router why it ended the request. This word must not come first and have it retried."""
    async with worker(checkpoint, role) as server, relay(server) as router:
        handoffs = server.worker.role
        assert isinstance(handoffs, HandoffRole)
        for name in ("refused by the peer", "late"):
            await router.send(submit=submit(name, phase=phase, peer=PeerRef(name="peer-0", incarnation="a")))
        await until(lambda: server.worker.request(("late", 1)))
        handoffs.handoff_failed(("refused by the peer", 1), Code.CANCELLED, "cancelled on peer-0")
        handoffs.handoff_failed(("late", 1), Code.TIMEOUT, "no message")
        assert (await router.last()).request_id == "late"
        assert server.worker.request(("refused by the peer", 1)) is None
        await free_again(server)


class Control:
    """Control stream of a peer, which is told nothing."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def put(self, *messages: Message) -> None:
        """Drops the messages."""

    def end(self, code: Code, message: str) -> None:
        """Stays as it is."""


async def test_an_offer_gets_the_blocks_that_another_one_gives_back(checkpoint: Path) -> None:
    """Nothing decodes, so no step tells of them."""
    peer = WorkerId("prefill-0", "a")
    async with worker(checkpoint, "decode") as server, relay(server) as router:
        decode, role = server.worker, server.worker.role
        assert isinstance(role, DecodeRole)
        receiver = role.endpoint
        assert isinstance(receiver, KVReceiver)
        ready: dict[str, Any] = {"role": ROLE_PREFILL, "state": MEMBER_STATE_READY, "address": "127.0.0.1:1"}
        role.members_changed([Member(name=peer.name, incarnation=peer.incarnation, **ready)])
        known = receiver.peers.get(peer)
        assert known is not None
        control = Control(known)
        receiver.accept(control, replace(role.local, id=peer).hello(decode.id, decode.config.transfer))
        scheduler = decode.engine.scheduler
        count = min(decode.spec.max_context, scheduler.prefix.pool.total * decode.cache.block_size) * 2 // 3
        ids, given = [1] * count, []
        # Each has another first token, so that nothing of it is in the prefix cache.
        for number in itertools.count(2):
            with decode.engine.lock:
                found = scheduler.reserve(Request("other", number, (number, *ids[1:]), count))
            if found is None:
                break
            given.append(found)
        await router.send(
            submit=submit(
                "waits",
                phase=PHASE_DECODE,
                token_ids=ids,
                prompt_tokens=count,
                peer=PeerRef(name=peer.name, incarnation=peer.incarnation),
            )
        )
        await until(lambda: receiver.active, "the request has come")
        receiver.on_message(control, Offer("waits", 1, count, tokens_digest(ids)))
        assert (await router.event()).waits == WAIT_BLOCKS
        assert role.promised().requests == 1
        for each in given:
            role.release(each)
        await until(lambda: decode.load().blocks.held and not role.promised().requests, "it has its blocks")


async def test_a_stream_that_ends_frees_what_was_submitted_on_it(server: WorkerServer) -> None:
    async with relay(server) as router:
        for number in range(3):
            await router.send(submit=submit(f"long-{number}", **LONG))
        await router.event()
    await free_again(server)


async def test_a_stream_to_another_incarnation_is_refused(server: WorkerServer) -> None:
    async with relay(server, incarnation="yesterday's") as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.event()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "yesterday's" in (refused.value.details() or "")


async def test_draining_lets_what_runs_end_and_takes_nothing_new(server: WorkerServer) -> None:
    async with relay(server) as router:
        await router.send(submit=submit("running", **LONG))
        await router.event()
        stopping = asyncio.create_task(server.stop(SECONDS))
        await asyncio.sleep(0)
        await router.send(submit=submit("late"))
        ends = {event.request_id: event for event in (await router.last(), await router.last())}
        assert ends["late"].failure.code == Failure.CODE_RETRY
        assert ends["running"].finish_reason == FINISH_REASON_LENGTH
        await stopping


# A later call of a client ends what the earlier ones have submitted, and nobody else's.

MINE, OTHERS = b"a key of sixteen", b"another client's"


def call(number: int, key: bytes = MINE) -> ClientCall:
    return ClientCall(key=key, call=number)


async def test_a_fence_ends_earlier_calls_on_every_stream_and_refuses_late_ones(server: WorkerServer) -> None:
    async with relay(server) as old, relay(server) as new:
        await old.send(submit=submit("mine/1", client_call=call(1), **LONG))
        await old.send(submit=submit("other/1", client_call=call(1, OTHERS), **LONG))
        await old.event()
        await new.send(submit=submit("mine/3", client_call=call(3), **LONG))
        await new.event()
        await new.send(fence=call(2))
        ended = await old.last()
        assert (ended.request_id, ended.failure.code) == ("mine/1", Failure.CODE_FENCED)
        await old.send(submit=submit("mine/1", attempt=2, client_call=call(1)))
        late = await old.last()
        assert (late.request_id, late.attempt, late.failure.code) == ("mine/1", 2, Failure.CODE_FENCED)
        # Neither the later call nor another client's request, and none without a key.
        await old.send(submit=submit("no key"))
        assert (await old.last()).finish_reason == FINISH_REASON_LENGTH
        assert (await old.last()).request_id == "other/1"
        assert (await new.last()).finish_reason == FINISH_REASON_LENGTH
        await free_again(server)


def test_fences_are_kept_up_to_a_number(monkeypatch: Any) -> None:
    monkeypatch.setattr(fences, "MAX_FENCES", 3)
    known = Fences()
    for number in range(4):
        known.add(call(5, bytes([number])))
    assert [known.passed(call(4, bytes([number]))) for number in range(4)] == [False, True, True, True]
    known.add(call(2, bytes([1])))
    assert known.passed(call(4, bytes([1]))), "an earlier fence that comes late takes nothing back"
    known.add(call(5, bytes([4])))
    assert [known.passed(call(4, bytes([number]))) for number in range(5)] == [False, True, False, True, True]
