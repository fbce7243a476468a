"""Faults of workers that the router answers for: no client sees an error that its own request hasn't caused."""

import signal
import time

import pytest

from kvrelay.client import InternalError
from kvrelay.router.session.suspects import TRIAL_SECONDS
from support.faults import Scene, asking, until
from support.hash_worker import STEP_SECONDS
from support.processes import wait_until

CLIENTS = 40


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.more)])
def test_twenty_streams_at_a_time_while_a_worker_freezes(it: Scene, role: str) -> None:
    it.order(**{STEP_SECONDS: 0.01})
    frozen = f"{role}-0"
    with asking(it, "beside the frozen one", CLIENTS) as done:
        until(lambda: it.held(frozen), "it works", 30)
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
            until(lambda: any(event.kind == "token" for event in list(it.history.events)), "they work", 30)
            begun = time.monotonic()
            with pytest.raises(InternalError, match="suspected of ending workers"):
                it.ask("poison")
            most = 2 if time.monotonic() - begun < TRIAL_SECONDS else 3
        assert len(done) == CLIENTS
        dead = wait_until(lambda: len(it.ended()) >= 2 and it.ended(), "workers have ended", seconds=20)
        assert 2 <= len(dead) <= most, dead
        it.settle(10, but=dead)
        lines = [line for router in it.routers for line in it.log(router)]
        (line,) = [line for line in lines if line["message"] == "request suspected of ending workers"]
        assert line["prompt_tokens"] == done[0].usage.prompt_tokens
