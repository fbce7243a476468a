"""The router may know a new worker before the worker's peers do; that costs no request a retry."""

import signal
import time
from pathlib import Path

import pytest

from support import hash_worker
from support.faults import scene
from support.processes import wait_until

NEWS_SECONDS = 0.5


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_requests_wait_for_the_news_of_a_new_worker(tmp_path: Path, name: str) -> None:
    with scene(tmp_path, prefill=1, decode=1, losses=True, variables={hash_worker.NEWS_SECONDS: NEWS_SECONDS}) as it:
        wait_until(lambda: it.ask(f"first at {time.monotonic()}"), "serves")
        it.signal(name, signal.SIGKILL)
        it.cluster.replace(name)
        started = time.monotonic()
        done = it.ask_all([f"early {number}" for number in range(8)])
        assert [answer.timeline.retries for answer in done] == [0] * 8
        assert time.monotonic() - started > NEWS_SECONDS / 2, "the router was ahead of the news"
        it.settle(3)


def test_a_peer_that_never_comes_is_refused_in_time(tmp_path: Path) -> None:
    with scene(tmp_path, prefill=1, decode=1, variables={hash_worker.NEWS_SECONDS: 60.0}) as it:
        started = time.monotonic()
        it.may_fail.add("stranger")
        with pytest.raises(Exception, match="unknown_peer"):
            it.ask("stranger")
        assert 1 <= time.monotonic() - started < 10
        it.settle(3)
