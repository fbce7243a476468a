"""A later call of a client ends what the earlier ones have submitted, and nobody else's."""

from pathlib import Path
from typing import Any

from test_worker_server import checkpoint, free_again, relay, run, submit, worker

from kvrelay.internal.v1.worker_pb2 import ClientCall, Failure
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH
from kvrelay.worker.relay import fences
from kvrelay.worker.relay.fences import Fences

__all__ = ["checkpoint"]
MINE, OTHERS = b"a key of sixteen", b"another client's"
LONG: dict[str, Any] = {"sampling": {"max_tokens": 400, "top_p": 1.0, "ignore_eos": True}}


def call(number: int, key: bytes = MINE) -> ClientCall:
    return ClientCall(key=key, call=number)


def test_a_fence_ends_earlier_calls_on_every_stream_and_refuses_late_ones(checkpoint: Path) -> None:
    async def test() -> None:
        async with worker(checkpoint) as server, relay(server) as old, relay(server) as new:
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

    run(test)


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
