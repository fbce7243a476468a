"""The stages of a request on one time axis, whatever has been reported of them, and in whichever order."""

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import DecodeReport, PrefillReport, RequestEvent, TransferReport
from kvrelay.router.records.life import Life, life
from kvrelay.router.records.requests import RECENT, Requests
from kvrelay.router.trace import Outcome, RequestTrace

PREFILL = RequestEvent(token_ids=[1], prefill=PrefillReport(queue_seconds=0.1, prefill_seconds=0.4, cached_tokens=2))
TRANSFER = RequestEvent(transfer=TransferReport(transfer_seconds=0.5, handoff_seconds=0.2, transfer_bytes=1000))
DECODE = RequestEvent(token_ids=[2], decode=DecodeReport(queue_seconds=0.05))


def traced(*steps: tuple[float, Callable[[RequestTrace], object]]) -> RequestTrace:
    """A trace that was received at 100 and had these steps so many seconds later."""
    trace = RequestTrace(100.0, wire_id="r", prompt_tokens=8)
    for at, step in steps:
        with mock.patch.object(trace, "clock", return_value=100.0 + at):
            step(trace)
    return trace


def place(trace: RequestTrace) -> None:
    trace.placed_on("prefill-0", "decode-0")


def place_colocated(trace: RequestTrace) -> None:
    trace.placed_on("worker-0", "worker-0")


def note(event: RequestEvent) -> Callable[[RequestTrace], None]:
    return lambda trace: trace.note(event)


def sent(at: float) -> tuple[float, Callable[[RequestTrace], None]]:
    return at, lambda trace: trace.sent(100.0 + at)


def spans(shown: Life) -> dict[str, tuple[float, float | None]]:
    return {
        span.stage: (round(span.start, 6), None if span.end is None else round(span.end, 6)) for span in shown.spans
    }


def test_each_stage_has_its_place() -> None:
    chunk = note(RequestEvent(computed_tokens=4))
    trace = traced(
        (0.1, place),
        (0.4, chunk),
        (0.6, note(PREFILL)),
        sent(0.6),
        (0.8, note(TRANSFER)),
        (0.9, note(DECODE)),
        sent(2.0),
    )
    trace.outcome, trace.ended = "length", 102.1
    shown = life(trace)
    assert spans(shown) == {
        "router": (0.0, 0.1),
        "queue": (0.1, 0.2),
        "prefill": (0.2, 0.6),
        "transfer": (0.3, 0.8),
        "decode_queue": (0.8, 0.85),
        "decode": (0.85, 2.0),
    }
    assert shown.chunks == ((pytest.approx(0.4), 4),)
    assert (shown.ttft, shown.handoff, shown.cached_tokens) == (pytest.approx(0.6), 0.2, 2)


@pytest.mark.parametrize(
    ("steps", "going_on"),
    [
        ([], "router"),
        ([(0.1, place)], "queue"),
        ([(0.1, place), (0.2, note(RequestEvent(computed_tokens=4)))], "transfer"),
        ([(0.1, place), (0.6, note(PREFILL))], "transfer"),
        ([(0.1, place), (0.6, note(PREFILL)), (0.7, note(TRANSFER)), (0.8, note(DECODE))], "decode"),
        ([(0.1, place_colocated), (0.6, note(PREFILL)), sent(0.6)], "decode"),
    ],
)
def test_a_running_request_is_in_its_latest_stage(
    steps: list[tuple[float, Callable[[RequestTrace], object]]], going_on: str
) -> None:
    shown = life(traced(*steps), 101.0)
    assert shown.outcome is None
    assert [span.stage for span in shown.spans if span.end is None][-1] == going_on


STEPS = {
    "place": place,
    "colocated": place_colocated,
    "chunk": note(RequestEvent(computed_tokens=4)),
    "prefill": note(PREFILL),
    "transfer": note(TRANSFER),
    "decode": note(DECODE),
}
ATTEMPTS = ("place", "colocated")


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from(sorted(STEPS))), max_size=12).map(sorted),
    st.sampled_from([None, "stop", "cancelled", "internal"]),
)
def test_bars_stay_within_the_request(steps: list[tuple[float, str]], outcome: Outcome | None) -> None:
    """Steps come in any order after the first attempt, with several attempts, and times that are longer than the
    request."""
    begun = itertools.dropwhile(lambda step: step[1] not in ATTEMPTS, steps)
    trace = traced(*((at, STEPS[name]) for at, name in begun))
    if outcome is not None:
        trace.outcome, trace.ended = outcome, 105.0
    shown = life(trace, 105.0)
    for span in shown.spans:
        assert 0 <= span.start <= 5.0 + 1e-9
        assert span.end is None or span.start - 1e-9 <= span.end <= 5.0 + 1e-9
        assert span.end is not None or outcome is None
    stages = [span.stage for span in shown.spans]
    assert len(stages) == len(set(stages))


def test_the_latest_requests_are_kept_and_links_count_all() -> None:
    requests = Requests()
    for number in range(RECENT + 5):
        trace = traced((0.1, place), (0.6, note(PREFILL)))
        trace.wire_id, trace.tenant = f"r{number}", "ab"[number % 2]
        requests.begin(trace)
        assert requests.sending() == {("prefill-0", "decode-0"): 1}
        trace.note(TRANSFER)
        assert requests.sending() == {}
        assert requests.links()["prefill-0", "decode-0"].transfers == number + 1, "once, while it runs and afterwards"
        trace.end("stop")
        requests.end(trace)
    assert requests.links()["prefill-0", "decode-0"].nbytes == 1000 * (RECENT + 5)
    recent = requests.recent("a")
    assert recent[-1].life.id == f"r{RECENT + 4}"
    assert len(recent) + len(requests.recent("b")) == RECENT
    assert requests.recent("a", recent[-2].number) == recent[-1:]
    assert requests.recent("c") == []
