"""Two workers' events, in any order between them, make one sequence without a hole or a double."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import (
    FINISH_LENGTH,
    FINISH_UNSPECIFIED,
    Failure,
    RequestEvent,
    RouterHello,
    Sampling,
    Submit,
    TransferReport,
)
from kvrelay.router.attempt import Attempt
from kvrelay.router.completion import Finish
from kvrelay.router.placement import WorkerKey
from kvrelay.router.validation import CheckedRequest
from kvrelay.router.worker_stream import Listener, WorkerStream

PROMPT = (5, 6, 7)


@dataclass
class Wire:
    """What went out on a link."""

    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)


class ScriptedLink(WorkerStream):
    """A link without a stream."""

    def __init__(self, name: str) -> None:
        super().__init__(WorkerKey(name, "i"), "", RouterHello(), lambda: None)
        self.wire = Wire()

    def submit(self, submit: Submit, listener: Listener) -> None:
        self.wire.submitted.append(submit)

    def cancel(self, key: tuple[str, int]) -> None:
        self.wire.cancelled.append(key)


def attempt_of(total: int, generated: int) -> tuple[Attempt, ScriptedLink, ScriptedLink]:
    request = CheckedRequest("r", "r/1", PROMPT, Sampling(max_tokens=total), (), "")
    prefill, decode = ScriptedLink("prefill-0"), ScriptedLink("decode-0")
    attempt = Attempt(request, 2, tuple(range(100, 100 + generated)), prefill, decode)
    attempt.submit(1.0, 1.0)
    return attempt, prefill, decode


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int, int]]]:
    """(max_tokens, generated before, events): an event is (worker, first index, end index)."""
    generated = draw(st.integers(0, 5))
    total = generated + draw(st.integers(2, 12))
    at = generated + 1
    decode: list[tuple[str, int, int]] = []
    while at < total:
        end = draw(st.integers(at + 1, total))
        back = draw(st.integers(max(0, generated - 1), at))  # some are told again
        decode.append(("decode", back, end))
        at = end
    events = list(decode)
    events.insert(draw(st.integers(0, len(events))), ("prefill", generated, generated + 1))
    return total, generated, events


@settings(max_examples=400, deadline=None)
@given(interleavings(), st.data())
def test_every_index_comes_once_and_in_order(
    case: tuple[int, int, list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    total, generated, events = case

    async def test() -> None:
        attempt, prefill, decode = attempt_of(total, generated)
        taken: list[int] = []
        finish = None
        for worker, first, end in events:
            last = worker == "decode" and end == total
            event = RequestEvent(
                first_index=first,
                token_ids=[100 + index for index in range(first, end)],
                finish=FINISH_LENGTH if last else FINISH_UNSPECIFIED,
            )
            attempt.on_event(prefill if worker == "prefill" else decode, event)
            if data.draw(st.booleans()):
                tokens, finish = attempt.take()
                taken += tokens
                assert finish is None or len(taken) == total - generated
        tokens, ended = attempt.take()
        taken += tokens
        assert taken == [100 + index for index in range(generated, total)]
        assert Finish.LENGTH in (finish, ended)
        assert attempt.failure is None
        attempt.on_event(prefill, RequestEvent(transfer=TransferReport(transfer_bytes=1)))
        assert not attempt.transferring
        attempt.close()
        assert prefill.outstanding_tokens == decode.outstanding_tokens == 0
        assert not prefill.wire.cancelled
        assert not decode.wire.cancelled

    asyncio.run(test())


@settings(max_examples=300, deadline=None)
@given(interleavings(), st.data())
def test_whatever_is_cut_short_is_cancelled_where_it_was_and_claims_nothing(
    case: tuple[int, int, list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    total, generated, events = case

    async def test() -> None:
        attempt, prefill, decode = attempt_of(total, generated)
        links = {"prefill": prefill, "decode": decode}
        over: set[str] = set()
        for worker, first, end in events[: data.draw(st.integers(0, len(events)))]:
            last = worker == "decode" and end == total
            tokens = [100 + index for index in range(first, end)]
            finish = FINISH_LENGTH if last else FINISH_UNSPECIFIED
            attempt.on_event(links[worker], RequestEvent(first_index=first, token_ids=tokens, finish=finish))
            over |= {worker} if last else set()
        for worker in data.draw(st.lists(st.sampled_from(["prefill", "decode"]), unique=True)):
            if data.draw(st.booleans()):
                attempt.on_event(links[worker], RequestEvent(failure=Failure(code=Failure.CODE_RETRY)))
            else:
                links[worker].lost = "killed"
                attempt.on_lost(links[worker])
            over.add(worker)
        attempt.close()
        attempt.close()
        for worker, link in links.items():
            assert len(link.wire.cancelled) == (worker not in over)
            assert link.outstanding_tokens == 0

    asyncio.run(test())
