"""The router may know a new worker before the worker's peers do; that costs no request a retry."""

import time
from pathlib import Path

import pytest

from support.faults import Scene, scene
from support.hash_worker import NEWS_SECONDS

SECONDS = 0.5


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.more)])
def test_requests_wait_for_the_news_of_a_new_worker(it: Scene, role: str) -> None:
    workers = it.decodes if role == "decode" else it.prefills
    it.order(**{NEWS_SECONDS: SECONDS})
    it.restart(*workers)
    started = time.monotonic()
    done = it.ask_all([f"early {number}" for number in range(8)])
    assert [answer.timeline.retries for answer in done] == [0] * 8
    assert time.monotonic() - started > SECONDS / 2, "the router was ahead of the news"
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
