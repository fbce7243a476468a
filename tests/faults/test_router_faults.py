"""Faults of workers that the router answers for: no client sees an error that its own request hasn't caused."""

import signal
from pathlib import Path

import pytest

from kvrelay.client import InternalError
from support.faults import asking, scene, until
from support.hash_worker import STEP_SECONDS
from support.processes import wait_until

CLIENTS = 60


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_twenty_streams_at_a_time_while_a_worker_freezes(tmp_path: Path, role: str) -> None:
    with scene(tmp_path, losses=True, variables={STEP_SECONDS: 0.01}) as it:
        frozen = f"{role}-0"
        with asking(it, "beside the frozen one", CLIENTS) as done:
            until(lambda: it.held(frozen), "it works", 30)
            it.signal(frozen, signal.SIGSTOP)
        retries = sum(completion.timeline.retries for completion in done)
        print(f"{retries} retries of {CLIENTS} requests")
        assert retries > 0
        it.settle(10, but=[frozen])


@pytest.mark.parametrize(
    ("place", "routers"),
    [
        ("decode.before_commit", 1),
        ("prefill.after_chunk,chunk=1", 2),
        pytest.param("prefill.before_offer", 1, marks=pytest.mark.slow),
        pytest.param("prefill.after_chunk,chunk=1", 1, marks=pytest.mark.slow),
    ],
)
def test_a_request_that_ends_its_workers_ends_two_and_fails_alone(tmp_path: Path, place: str, routers: int) -> None:
    role = place.partition(".")[0]
    counts = {"prefill": 2, "decode": 2, "routers": routers, role: 4}
    # Workers that get no CPU for a while are no part of this.
    calm = {"suspect_seconds": 30.0, "dead_seconds": 60.0}
    rules = [f"{place},request=poison:kill"]
    with scene(tmp_path, rules, losses=True, supervisor=calm, **counts) as it:  # type: ignore[arg-type]  # counts
        it.may_fail.add("poison")
        with asking(it, "innocent", CLIENTS) as done:
            # Not by heartbeats: all may be over before one of them tells of a running request.
            until(lambda: any(event.kind == "token" for event in list(it.history.events)), "they work", 30)
            with pytest.raises(InternalError, match="suspected of ending workers"):
                it.ask("poison")
        assert len(done) == CLIENTS
        dead = wait_until(lambda: len(it.ended()) >= 2 and it.ended(), "workers have ended", seconds=20)
        assert len(dead) == 2, dead
        it.settle(10, but=dead)
        lines = [line for router in it.routers for line in it.log(router)]
        (line,) = [line for line in lines if line["message"] == "request suspected of ending workers"]
        assert line["prompt_tokens"] == done[0].usage.prompt_tokens
