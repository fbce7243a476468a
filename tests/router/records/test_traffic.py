"""Traffic counts that a router keeps for the supervisor."""

import time

import pytest

from kvrelay.internal.v1.worker_pb2 import DecodeReport, PrefillReport
from kvrelay.router.config import RouterOptions, ServiceClass
from kvrelay.router.placing.placement import Demand
from kvrelay.router.records import traffic as module
from kvrelay.router.records.traffic import TrafficMeter
from kvrelay.router.trace import Outcome, RequestTrace
from kvrelay.rpc.identity import WorkerRole

CLASSES = {
    "interactive": ServiceClass(ttft_target_seconds=1.0, tpot_target_seconds=0.1),
    "patient": ServiceClass(ttft_target_seconds=5.0),
}
SERVICES = RouterOptions(classes=CLASSES).services()


def begun(
    meter: TrafficMeter, ttft: float | None, prompt: int = 100, tokens: int = 1, service: str = "default"
) -> RequestTrace:
    """A running request whose first token came `ttft` seconds after its arrival, just now."""
    now = time.monotonic()
    trace = RequestTrace(now - (ttft or 0.0), prompt_tokens=prompt, completion_tokens=0, service=service)
    meter.begin(trace)
    if ttft is not None:
        trace.placed_on("prefill-0", "decode-0")
        trace.sent(now)
        trace.completion_tokens = tokens
    return trace


def waits_for_prefill(demand: Demand) -> WorkerRole:
    return "prefill"


def waits_for_decode(demand: Demand) -> WorkerRole:
    return "decode"


def end(meter: TrafficMeter, trace: RequestTrace, outcome: Outcome) -> None:
    trace.end(outcome)
    meter.end(trace)


def test_first_tokens_count_while_requests_run() -> None:
    meter = TrafficMeter(SERVICES)
    traces = [begun(meter, 0.5), begun(meter, 2.0), begun(meter, None)]
    traces[1].router_queue_seconds = 1.0
    traces[1].latest.prefill = PrefillReport(queue_seconds=0.5, cached_tokens=60)
    report = meter.report([], waits_for_prefill)
    assert (report.requests, report.prompt_tokens) == (3, 300)
    assert (report.first_tokens, report.ttft_attained) == (2, 1)
    assert report.unqueued_seconds == pytest.approx(1.0, abs=0.1)
    assert report.cached_tokens == 60
    assert meter.report([], waits_for_prefill).first_tokens == 2, "each counts once"


def test_a_class_has_its_own_target_or_that_of_interactive_and_less_urgent_ones_are_not_counted() -> None:
    meter = TrafficMeter(SERVICES)
    for service, ttft in (("default", 2.0), ("interactive", 0.5), ("patient", 2.0), ("batch", 0.5), ("batch", None)):
        trace = begun(meter, ttft, service=service)
        end(meter, trace, "stop" if ttft else "exhausted")
    report = meter.report([], waits_for_prefill)
    assert (report.requests, report.first_tokens, report.ttft_attained) == (3, 3, 2)
    assert report.completion_tokens == 3


def test_ends_count_tokens_and_the_time_between_them() -> None:
    meter = TrafficMeter(SERVICES)
    for gap in (0.05, 0.2):
        trace = begun(meter, 0.1, tokens=11)
        trace.latest.decode = DecodeReport(queue_seconds=0.25)
        assert trace.first_sent is not None
        trace.sent(trace.first_sent + 10 * gap)
        end(meter, trace, "length")
    end(meter, begun(meter, 0.1, tokens=1), "stop")
    report = meter.report([], waits_for_prefill)
    assert (report.streams, report.tpot_attained) == (2, 1), "a single token has no time between tokens"
    assert report.completion_tokens == 23
    assert report.first_tokens == 3
    assert report.decode_queue_seconds == pytest.approx(0.5)


@pytest.mark.parametrize(("outcome", "missed"), [("deadline", 1), ("unavailable", 1), ("cancelled", 0), ("invalid", 0)])
def test_a_request_that_fails_before_its_first_token_has_missed_its_target(outcome: Outcome, missed: int) -> None:
    meter = TrafficMeter(SERVICES)
    end(meter, RequestTrace(time.monotonic()), "invalid")  # one that has not begun counts nothing
    end(meter, begun(meter, None), outcome)
    report = meter.report([], waits_for_prefill)
    assert (report.first_tokens, report.ttft_attained, report.streams) == (missed, 0, 0)


def test_young_requests_are_forgotten_when_they_grow_up(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = TrafficMeter(SERVICES)
    running, ended = begun(meter, 0.1, tokens=5), begun(meter, 0.1, tokens=7)
    meter.report([], waits_for_prefill)
    end(meter, ended, "length")
    report = meter.report([], waits_for_prefill)
    assert (report.young_tokens, report.young_ended) == (12, 1)
    running.completion_tokens = 50
    assert meter.report([], waits_for_prefill).young_tokens == 57
    monkeypatch.setattr(module, "YOUNG_SECONDS", 0.0)
    report = meter.report([], waits_for_prefill)
    assert (report.young_tokens, report.young_ended) == (0, 0)


def test_waiting_requests_count_for_the_role_that_they_wait_for() -> None:
    meter, queued = TrafficMeter(SERVICES), [Demand(100, 10), Demand(50, 10)]
    report = meter.report(queued, waits_for_prefill)
    assert (report.queued_prompts, report.queued_streams, report.queued_tokens) == (2, 0, 150)
    before = report.decode_queue_seconds
    time.sleep(0.02)  # time itself is measured
    report = meter.report(queued, waits_for_decode)
    assert (report.queued_prompts, report.queued_streams) == (0, 2)
    assert report.decode_queue_seconds >= before + 2 * 0.02
