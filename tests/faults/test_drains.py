"""SIGTERM: a worker that is asked to stop completes what it can in its grace, and moves the rest; no client notices."""

import signal
from pathlib import Path

import pytest

from support.faults import scene, until
from support.hash_worker import STEP_SECONDS
from support.processes import wait_until

STREAMS = 24
STOPPED_SECONDS = 8.0


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_drained_worker_moves_its_streams(tmp_path: Path, role: str) -> None:
    options = {"worker": {"drain_seconds": 0.5}, "engine": {"kv_memory_bytes": 16 * 2**20}}
    with scene(tmp_path, losses=True, variables={STEP_SECONDS: 0.01}, **options) as it:
        running = [it.begin(f"stream {number}", count=160) for number in range(STREAMS)]
        until(lambda: all(stream.tokens >= 3 for stream in running), "all streams decode", 20)
        leaving = f"{role}-0"
        it.signal(leaving, signal.SIGTERM)
        until(lambda: it.ended() == [leaving], "the drained worker has ended", STOPPED_SECONDS)
        assert it.cluster.processes[leaving].popen.wait(1) == 0
        done = [stream.result() for stream in running]
        assert not sum(each.timeline.retries for each in done), "moves are no retries"
        moved = sum(each.timeline.migrations for each in done)
        assert moved > 0 if role == "decode" else moved == 0, moved
        it.settle(3, but=[leaving])


def test_new_requests_go_elsewhere_while_a_worker_drains(tmp_path: Path) -> None:
    options = {"worker": {"drain_seconds": 20.0}}
    with scene(tmp_path, losses=True, variables={STEP_SECONDS: 0.01}, **options) as it:
        long = it.begin("long", count=400)
        until(lambda: long.tokens >= 3, "it decodes", 10)
        (serving,) = wait_until(lambda: [name for name in it.decodes if it.held(name)], "its worker reports it", 5)
        it.signal(serving, signal.SIGTERM)
        for number in range(6):
            assert it.ask(f"later {number}").timeline.retries == 0
        assert long.result().timeline.migrations == 0, "its own grace was long enough"
        until(lambda: it.ended() == [serving], "the drained worker has ended", STOPPED_SECONDS)
        it.settle(3, but=[serving])


def test_a_hand_off_with_a_drained_worker_moves(tmp_path: Path) -> None:
    """The drained worker's peer reports the move as a migration too, and its report may come first."""
    options = {"worker": {"drain_seconds": 0.0}}
    # Last frames take so long that each pair of workers has a hand-off under way at any time.
    with scene(
        tmp_path, ["transfer.frame,index=3:sleep(0.25)"], losses=True, variables={STEP_SECONDS: 0.05}, **options
    ) as it:
        for leaving, peers in (("decode-0", it.prefills), ("prefill-0", ["decode-1"])):
            running = [it.begin(f"stream {number} over {leaving}", count=4) for number in range(STREAMS)]
            wait_until(lambda leaving=leaving: it.held(leaving), "hand-offs are under way", 20)
            wait_until(lambda peers=peers: all(it.held(name) for name in peers), "hand-offs are under way", 20)
            it.signal(leaving, signal.SIGTERM)
            done = [stream.result() for stream in running]
            assert it.failures() == [], "no attempt failed"
            assert not sum(each.timeline.retries for each in done)
            assert sum(each.timeline.migrations for each in done)
            until(lambda leaving=leaving: leaving in it.ended(), "the drained worker has ended", STOPPED_SECONDS)
            told = [line["reason"] for peer in peers for line in it.log(peer) if line["message"] == "request failed"]
            assert f"hand-off draining: draining on {leaving}" in told, "peers had hand-offs with it"
        it.settle(3, but=it.ended())
