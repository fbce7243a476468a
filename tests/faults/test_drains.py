"""SIGTERM: a worker that is asked to stop completes what it can in its grace, and moves the rest; no client notices."""

import signal

import pytest

from support.faults import TRANSFER, Scene, until
from support.hash_worker import STEP_SECONDS
from support.processes import wait_until

STREAMS = 16
STOPPED_SECONDS = 8.0
ROLES = ["decode", pytest.param("prefill", marks=pytest.mark.more)]


@pytest.mark.parametrize("role", ROLES)
def test_a_drained_worker_moves_its_streams(it: Scene, role: str) -> None:
    leaving = f"{role}-0"
    it.restart(leaving, drain_seconds=0.5)
    it.order(**{STEP_SECONDS: 0.01})
    running = [it.begin(f"stream {number}", count=160) for number in range(STREAMS)]
    until(lambda: all(stream.tokens >= 3 for stream in running), "all streams decode", 20)
    it.signal(leaving, signal.SIGTERM)
    until(lambda: it.ended() == [leaving], "the drained worker has ended", STOPPED_SECONDS)
    assert it.cluster.processes[leaving].popen.wait(1) == 0
    done = [stream.result() for stream in running]
    assert not sum(each.timeline.retries for each in done), "moves are no retries"
    moved = sum(each.timeline.migrations for each in done)
    assert moved > 0 if role == "decode" else moved == 0, moved
    it.settle(3, but=[leaving])


def test_new_requests_go_elsewhere_while_a_worker_drains(it: Scene) -> None:
    it.order(**{STEP_SECONDS: 0.01})
    long = it.begin("long", count=250)
    until(lambda: long.tokens >= 3, "it decodes", 10)
    serving = it.serving()
    it.signal(serving, signal.SIGTERM)
    for number in range(6):
        assert it.ask(f"later {number}").timeline.retries == 0
    assert long.result().timeline.migrations == 0, "its own grace was long enough"
    until(lambda: it.ended() == [serving], "the drained worker has ended", STOPPED_SECONDS)
    it.settle(3, but=[serving])


@pytest.mark.more
@pytest.mark.parametrize("role", ROLES)
def test_a_hand_off_with_a_drained_worker_moves(it: Scene, role: str) -> None:
    """The drained worker's peer reports the move as a migration too, and its report may come first."""
    leaving, peers = f"{role}-0", it.prefills if role == "decode" else it.decodes
    # A busy machine must end no hand-off by its time limit.
    transfer = TRANSFER | {"frame_timeout_seconds": 20.0, "transfer_timeout_seconds": 30.0}
    it.restart(*(name for name in (*it.prefills, *it.decodes) if name != leaving), transfer=transfer)
    it.restart(leaving, drain_seconds=0.0, transfer=transfer)
    # Last frames take so long that each pair of workers has a hand-off under way at any time.
    it.order("transfer.frame,index=3:sleep(1)", **{STEP_SECONDS: 0.05})
    running = [it.begin(f"stream {number} over {leaving}", count=4) for number in range(STREAMS)]
    wait_until(lambda: it.held(leaving), "hand-offs are under way", 20)
    wait_until(lambda: all(it.held(name) for name in peers), "hand-offs are under way", 20)
    it.signal(leaving, signal.SIGTERM)
    done = [stream.result() for stream in running]
    assert [it.failures(router) for router in it.routers] == [[], []], "no attempt failed"
    assert not sum(each.timeline.retries for each in done)
    assert sum(each.timeline.migrations for each in done)
    until(lambda: it.ended() == [leaving], "the drained worker has ended", STOPPED_SECONDS)

    def told() -> list[str]:
        return [line["reason"] for peer in peers for line in it.log(peer) if line["message"] == "request failed"]

    until(lambda: f"hand-off draining: draining on {leaving}" in told(), "peers had hand-offs with it", STOPPED_SECONDS)
    it.settle(3, but=[leaving])
