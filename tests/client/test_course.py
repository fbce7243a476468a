"""A request's course: which router gets its next call, when, and when the client gives up."""

from collections import Counter
from typing import Any

import grpc
import pytest

from kvrelay.client.course import LONGEST_PAUSE_SECONDS, SHUNNED_SECONDS, START_SECONDS, Course, Routers
from kvrelay.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    InvalidRequest,
    KvrelayError,
    Unavailable,
    from_grpc,
)
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateRequest, GenerateResponse

LOST = Unavailable("lost", grpc.StatusCode.UNAVAILABLE)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def course(clock: Clock, target: str = "a:1,b:1", timeout: float | None = None, resume_seconds: float = 30.0) -> Course:
    return Course(GenerateRequest(text="x"), Routers(target, clock), timeout, resume_seconds, clock)


def lives(clock: Clock, request: Course, error: KvrelayError) -> float:
    """Fails every call at once until the request is over; returns how long that took, and leaves the last error."""
    started = clock.now

    def again_and_again() -> None:
        while True:
            request.call()
            clock.now += request.failed(error) + 0.001

    with pytest.raises(type(error)) as over:
        again_and_again()
    assert over.value is error
    return clock.now - started


def test_requests_begin_at_the_routers_in_turn_and_avoid_one_that_failed() -> None:
    clock = Clock()
    routers = Routers(["a:1", " b:1", "c:1", "a:1"], clock)
    assert routers.addresses == ("a:1", "b:1", "c:1")
    assert Counter(routers.first() for _ in range(30)) == {0: 10, 1: 10, 2: 10}
    assert {routers.after(1) for _ in range(50)} == {0, 2}, "its streams are spread over the others"
    assert set(Counter(routers.first() for _ in range(30))) == {0, 2}
    clock.now += SHUNNED_SECONDS
    assert set(Counter(routers.first() for _ in range(30))) == {0, 1, 2}
    for router in range(3):
        routers.after(router)
    assert set(Counter(routers.first() for _ in range(30))) == {0, 1, 2}, "all have failed"


@pytest.mark.parametrize("target", ["", ",", "a:1,", [], [""]])
def test_an_empty_address_is_refused(target: Any) -> None:
    with pytest.raises(InvalidRequest, match="allowed: host:port of a router"):
        Routers(target)


def test_all_calls_ask_for_the_same() -> None:
    clock = Clock()
    request, other = course(clock), course(clock)
    first = GenerateRequest.FromString(request.call().SerializeToString())
    assert (first.resume.call, list(first.resume.token_ids)) == (1, [])
    assert len(first.resume.key) == 16
    assert first.resume.key != other.call().resume.key
    assert first.sampling.HasField("seed")
    assert first.request_id
    request.received(GenerateResponse(token_ids=[5, 6]))
    request.received(GenerateResponse(text="x"))
    request.received(GenerateResponse(token_ids=[7]))
    before = request.router
    request.failed(LOST)
    assert request.router != before
    again = GenerateRequest.FromString(request.call().SerializeToString())
    assert (again.resume.call, list(again.resume.token_ids)) == (2, [5, 6, 7])
    for message in (first, again):
        message.resume.ClearField("call")
        message.resume.ClearField("token_ids")
    assert first == again

    asked = GenerateRequest(text="x", request_id="mine")
    asked.sampling.seed = 0
    kept = Course(asked, Routers("a:1"), None, 30.0).call()
    assert (kept.request_id, kept.sampling.seed) == ("mine", 0)
    assert not asked.HasField("resume"), "the caller's message is left alone"


def test_each_of_several_completions_goes_on_where_it_was() -> None:
    clock = Clock()
    request = Course(GenerateRequest(text="x", n=4), Routers("a:1,b:1", clock), None, 30.0, clock)
    assert not request.call().resume.others
    assert request.received(GenerateResponse(token_ids=[1]))
    assert request.received(GenerateResponse(token_ids=[7, 8], index=2))
    assert request.received(GenerateResponse(token_ids=[9], index=2, finish_reason=FINISH_REASON_LENGTH))
    request.failed(LOST)
    again = request.call().resume
    assert (again.call, list(again.token_ids)) == (2, [1])
    assert [list(other.ids) for other in again.others] == [[], [7, 8, 9]]
    assert not request.received(GenerateResponse(index=2, finish_reason=FINISH_REASON_LENGTH)), "it has ended before"
    assert request.received(GenerateResponse(token_ids=[5], index=3))
    request.failed(LOST)
    assert [list(other.ids) for other in request.call().resume.others] == [[], [7, 8, 9], [5]]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad"),
        DeadlineExceeded("late"),
        InternalError("defect"),
        KvrelayError("aborted", grpc.StatusCode.ABORTED),
        Unavailable("in vain", grpc.StatusCode.UNAVAILABLE, given_up=True),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_an_error_of_the_request_itself_is_raised_at_once(error: KvrelayError, begun: bool) -> None:
    request = course(Clock())
    request.call()
    if begun:
        request.received(GenerateResponse(token_ids=[5]))
    with pytest.raises(type(error)) as caught:
        request.failed(error)
    assert caught.value is error


@pytest.mark.parametrize("error", [LOST, Cancelled("by the other side", grpc.StatusCode.CANCELLED)])
def test_a_lost_request_looks_for_a_router_for_a_limited_time(error: KvrelayError) -> None:
    clock = Clock()
    # One that has got nothing yet: an address that is wrong should show soon.
    assert lives(clock, only := course(clock, "a:1"), error) < 0.2
    assert only.call().resume.call == 3, "twice in all"
    assert START_SECONDS <= lives(clock, course(clock), error) < START_SECONDS + 0.1
    # A stream that has begun.
    for target in ("a:1", "a:1,b:1,c:1"):
        request = course(clock, target, resume_seconds=12.0)
        for _ in range(2):  # the time begins anew with each message
            request.received(GenerateResponse(token_ids=[5]))
            clock.now += 1000
            assert 12.0 <= lives(clock, request, error) < 12.1
            request.received(GenerateResponse(token_ids=[5]))
    request = course(clock, resume_seconds=0.0)
    request.received(GenerateResponse(token_ids=[5]))
    assert lives(clock, request, error) == 0


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Unavailable),
        (grpc.StatusCode.UNKNOWN, "Stream removed", Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Unavailable),
        (grpc.StatusCode.INTERNAL, "a defect in the router", InternalError),
    ],
)
def test_a_broken_connection_is_told_from_a_defect(code: grpc.StatusCode, text: str, kind: type[KvrelayError]) -> None:
    error = from_grpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text))
    assert type(error) is kind


def test_pauses_begin_short_and_stay_short() -> None:
    clock = Clock()
    request = course(clock)
    request.received(GenerateResponse(token_ids=[5]))
    pauses = [request.failed(LOST) for _ in range(40)]
    assert pauses[0] <= 0.05
    assert max(pauses) <= LONGEST_PAUSE_SECONDS
    assert len(set(pauses)) == len(pauses), "clients that lost one router don't come back as one"


def test_a_full_router_is_left_for_each_other_one_once() -> None:
    full = Exhausted("full", grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0)
    clock = Clock()
    for target, calls in (("a:1", 1), ("a:1,b:1", 2), ("a:1,b:1,c:1", 3)):
        request = course(clock, target)
        assert lives(clock, request, full) < 0.2
        assert request.call().resume.call == calls + 1
    # A stream that has begun is not lost because the routers that are left are full; it waits as they ask.
    request = course(clock)
    request.received(GenerateResponse(token_ids=[5]))
    assert request.failed(full) < 0.1
    assert request.failed(full) >= 1.0
    assert 29.9 < lives(clock, request, full) < 30.1


def test_the_timeout_holds_over_all_calls() -> None:
    clock = Clock()
    assert course(clock).timeout is None
    request = course(clock, timeout=10.0)
    request.received(GenerateResponse(token_ids=[5]))
    clock.now += 9.99
    assert request.timeout == pytest.approx(0.01)
    for _ in range(10):
        assert request.failed(LOST) <= 0.011, "no pause outlasts it"
    clock.now += 5
    assert request.timeout == 0.0
