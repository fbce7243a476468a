"""Workers that drain, freeze, end with a request or are new: no client sees an error that its request hasn't caused."""

import signal
import time
from pathlib import Path

import pytest

from kvrelay.client import InternalError
from kvrelay.router.session.suspects import TRIAL_SECONDS
from kvrelay.rpc.options import PING_VARIABLE
from support.faults import TRANSFER, Scene, asking, scene, until
from support.hash_worker import NEWS_SECONDS, STEP_SECONDS
from support.processes import wait_until

STREAMS = 16
CLIENTS = 40
STOPPED_SECONDS = 8.0
LATE_SECONDS = 0.5
"""Seconds by which peers hear later of a new worker than the router does."""
FROZEN_SECONDS = 4.0
ROLES = ["decode", pytest.param("prefill", marks=pytest.mark.more)]


# SIGTERM: a worker that is asked to stop completes what it can in its grace, and moves the rest.


@pytest.mark.parametrize("role", ROLES)
def test_a_drained_worker_moves_its_streams(it: Scene, role: str) -> None:
    leaving = f"{role}-0"
    it.restart(leaving, drain_seconds=0.5)
    it.order(**{STEP_SECONDS: 0.01})
    running = [it.begin(f"stream {number}", count=160) for number in range(STREAMS)]
    until(lambda: all(stream.tokens >= 3 for stream in running), "all streams decode")
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
    long, serving = it.decoding("long", 250)
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
    wait_until(lambda: it.held(leaving), "hand-offs are under way")
    wait_until(lambda: all(it.held(name) for name in peers), "hand-offs are under way")
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


# A worker freezes, or a request ends each worker that computes it.


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.more)])
def test_twenty_streams_at_a_time_while_a_worker_freezes(it: Scene, role: str) -> None:
    it.order(**{STEP_SECONDS: 0.01})
    frozen = f"{role}-0"
    with asking(it, "beside the frozen one", CLIENTS) as done:
        until(lambda: it.held(frozen), "it works")
        it.signal(frozen, signal.SIGSTOP)
    retries = sum(completion.timeline.retries for completion in done)
    print(f"{retries} retries of {CLIENTS} requests")
    assert retries > 0
    it.settle(10, but=[frozen])


@pytest.mark.parametrize(
    "place",
    [
        "decode.before_commit",
        pytest.param("prefill.after_chunk,chunk=1", marks=pytest.mark.more),
        pytest.param("prefill.before_offer", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_ends_its_workers_ends_two_and_fails_alone(it: Scene, place: str) -> None:
    """It ends three where the trials of others let it wait for its own for too long, as a busy machine may."""
    # Workers that get no CPU for a while are no part of this.
    it.restart("supervisor", suspect_seconds=30.0, dead_seconds=60.0)
    with it.cluster.more(place.partition(".")[0], 2):
        it.order(f"{place},request=poison:kill")
        it.may_fail.add("poison")
        with asking(it, "innocent", CLIENTS) as done:
            # Not by heartbeats: all may be over before one of them tells of a running request.
            until(lambda: any(event.kind == "token" for event in list(it.history.events)), "they work")
            begun = time.monotonic()
            with pytest.raises(InternalError, match="suspected of ending workers"):
                it.ask("poison")
            most = 2 if time.monotonic() - begun < TRIAL_SECONDS else 3
        assert len(done) == CLIENTS
        dead = wait_until(lambda: len(it.ended()) >= 2 and it.ended(), "workers have ended")
        assert 2 <= len(dead) <= most, dead
        it.settle(10, but=dead)
        lines = [line for router in it.routers for line in it.log(router)]
        (line,) = [line for line in lines if line["message"] == "request suspected of ending workers"]
        assert line["prompt_tokens"] == done[0].usage.prompt_tokens


# The router may know a new worker before the worker's peers do; that costs no request a retry.


@pytest.mark.parametrize("role", ROLES)
def test_requests_wait_for_the_news_of_a_new_worker(it: Scene, role: str) -> None:
    workers = it.decodes if role == "decode" else it.prefills
    it.order(**{NEWS_SECONDS: LATE_SECONDS})
    it.restart(*workers)
    started = time.monotonic()
    done = it.ask_all([f"early {number}" for number in range(8)])
    assert [answer.timeline.retries for answer in done] == [0] * 8
    assert time.monotonic() - started > LATE_SECONDS / 2, "the router was ahead of the news"
    it.settle(3)


@pytest.mark.more
def test_a_peer_that_never_comes_is_refused_in_time(tmp_path: Path) -> None:
    with scene(tmp_path, prefill=1, decode=1, variables={NEWS_SECONDS: 60.0}) as it:
        started = time.monotonic()
        it.may_fail.add("stranger")
        with pytest.raises(Exception, match="unknown_peer"):
            it.ask("stranger")
        assert 1 <= time.monotonic() - started < 10
        it.settle(3)


@pytest.mark.more
@pytest.mark.parametrize(("answer_seconds", "retries"), [("1", 1), ("20", 0)])
def test_pings_wait_for_a_process_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer_seconds: str, retries: int
) -> None:
    """A worker that is frozen for a moment loses its stream only if its answer to a ping comes too late."""
    monkeypatch.setenv(PING_VARIABLE, answer_seconds)
    limits = {"suspect_seconds": 30.0, "dead_seconds": 60.0, "step_suspect_seconds": 30.0, "step_dead_seconds": 60.0}
    with scene(tmp_path, losses=True, supervisor=limits) as it:
        it.order(**{STEP_SECONDS: 0.01})
        request, serving = it.decoding("stream", 200)
        it.signal(serving, signal.SIGSTOP)
        time.sleep(FROZEN_SECONDS)  # the fault's duration
        it.signal(serving, signal.SIGCONT)
        assert request.result().timeline.retries == retries
        it.settle(3)
