"""A fault at one rank of a worker, or on the link of one pair of ranks, ends this worker's whole incarnation at most.

Every token is the right one, no stream stands still for more than STALL_SECONDS, no block stays held, and no process of
a rank is left. Some of the other scenes run with workers of several ranks too: `also_over(more=["ranks"])`.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faults import TENSOR_2, Scene, scene, until
from support.forks import CHILDREN, left_of
from support.hash_worker import FAILING_PID, LATE_RANKS, STEP_SECONDS, WORKER_LAYOUT
from support.processes import wait_until

ENDED_SECONDS = 8.0
"""Longest time from a rank's loss until no process of its worker is left. A frozen one is noticed within 3 s; all are
gone after 4 s, unless other work keeps all cores busy, as it may here."""
KERNEL_SECONDS = 2.5
"""Longest time for the kernel to end the ranks of a worker whose rank 0 was killed: less than it takes to notice."""
DRAINED_SECONDS = 8.0
STALL_SECONDS = 9.0
FREE_SECONDS = 3.0
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
PIPELINE_1 = {"pipeline_parallel": 1}
BY_RANKS: dict[str, dict[str, Any]] = {
    "1 to 2": {"prefill": 1, "decode_engine": TENSOR_2},
    "1 to 2 hosts": {"prefill": 1, "decode_engine": TENSOR_2 | {"hosts": 2}},
    "1 to 2 x 2 on 2 hosts": {"prefill": 1, "decode_engine": TENSOR_2 | {"pipeline_parallel": 2, "hosts": 2}},
    "2 to 1": {"decode": 1, "engine": TENSOR_2, "decode_engine": {"tensor_parallel": 1}},
    "1 x 2 to 2": {"prefill": 1, "engine": {"pipeline_parallel": 2}, "decode_engine": PIPELINE_1 | TENSOR_2},
    "2 x 2 to 4": {
        "prefill": 1,
        "decode": 1,
        "engine": TENSOR_2 | {"pipeline_parallel": 2},
        "decode_engine": PIPELINE_1 | {"tensor_parallel": 4, "block_size": 2 * WORKER_LAYOUT.block_size},
    },
}
"""Scenes by the ranks of prefill and of decode workers, tensor x pipeline."""


def ranks(*names: str) -> pytest.MarkDecorator:
    """Runs a test of `it` in these scenes; in `make test` in the first one only."""
    scenes = [pytest.param(name, marks=() if name == "1 to 2" else pytest.mark.more) for name in names]
    return pytest.mark.parametrize("cluster", scenes, indirect=True)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, worker = tmp_path_factory.mktemp("ranks"), {"drain_seconds": 0.5}
    with scene(folder, losses=True, worker=worker, **BY_RANKS[request.param]) as it:
        yield it


@pytest.fixture
def it(cluster: Scene) -> Iterator[Scene]:
    """The shared cluster, for one test."""
    yield cluster
    cluster.heal()


def pids(it: Scene, name: str) -> list[int]:
    return list(it.cluster.member(name).member.rank_pids)


def wait_for_end(it: Scene, name: str, seconds: float = ENDED_SECONDS) -> int:
    """Waits until no process of a worker is left; returns the exit code of rank 0."""
    process = it.cluster.processes[name]
    took = until(
        lambda: name in it.ended() and not left_of(process.pid), lambda: f"left: {left_of(process.pid)}", seconds
    )
    print(f"gone after {took:.2f} s")
    return process.popen.wait(1)


def settle(it: Scene, *but: str) -> None:
    """As `Scene.settle`; no stream has stood still for long."""
    silence = it.history.longest_silence()
    print(f"longest silence {silence:.2f} s")
    assert silence <= STALL_SECONDS
    it.settle(FREE_SECONDS, but=but)


SIGNALS = [
    pytest.param(1, KILL),
    pytest.param(1, STOP, marks=pytest.mark.more),
    pytest.param(0, KILL, marks=pytest.mark.more),
]


@ranks("1 to 2", "1 x 2 to 2")
@pytest.mark.parametrize(("rank", "number"), SIGNALS)
def test_a_rank_that_is_lost_in_decode_takes_its_worker_along(it: Scene, rank: int, number: signal.Signals) -> None:
    request, serving = it.decoding("mid-stream", 400)
    it.signal(serving, number, rank)
    assert wait_for_end(it, serving) == (1 if rank else -KILL)
    assert request.result().timeline.retries == 1
    settle(it, serving)


@ranks("1 to 2 hosts", "1 to 2 x 2 on 2 hosts")
@pytest.mark.parametrize("number", [KILL, STOP])
@pytest.mark.parametrize("lost", ["agent", "rank", "rank 0"])
def test_a_process_that_is_lost_takes_its_worker_along_on_both_machines(
    it: Scene, lost: str, number: signal.Signals
) -> None:
    """The process is the agent of the other machine, a rank there, or rank 0."""
    request, serving = it.decoding("mid-stream", 400)
    (host,), process = it.cluster.agents[serving], it.cluster.processes[serving]
    os.kill({"agent": host.pid, "rank": left_of(host.pid)[-1], "rank 0": process.pid}[lost], number)
    wait_until(lambda: not left_of(host.pid) and not left_of(process.pid), "other ranks have ended", ENDED_SECONDS)
    assert request.result().timeline.retries == 1
    if lost == "rank 0":
        process.popen.kill()
    assert wait_for_end(it, serving) == (-KILL if lost == "rank 0" else 1)
    host.popen.kill()
    host.popen.communicate(ENDED_SECONDS)
    settle(it, serving)


@ranks("1 to 2")
def test_sigterm_to_all_ranks_drains_their_worker(it: Scene) -> None:
    """As from a terminal, or from a manager of services: rank 0 drains, and what is left then moves elsewhere."""
    request, serving = it.decoding("leaving", 400)
    for rank in (1, 0):
        it.signal(serving, TERM, rank)
    assert wait_for_end(it, serving, DRAINED_SECONDS) == 0
    done = request.result().timeline
    assert (done.retries, done.migrations) == (0, 1)
    settle(it, serving)


@pytest.mark.more
@ranks("2 to 1", "1 x 2 to 2")
@pytest.mark.parametrize("number", [KILL, STOP])
def test_a_rank_that_is_lost_in_prefill_takes_its_worker_along(it: Scene, number: signal.Signals) -> None:
    it.order(**{STEP_SECONDS: 0.3})
    request = it.begin("in prefill")
    (busy,) = wait_until(lambda: [name for name in it.prefills if it.held(name)], "one computes")
    it.signal(busy, number, len(pids(it, busy)) - 1)
    it.order()
    assert wait_for_end(it, busy) == 1
    if len(it.prefills) == 1:  # the request waits for its replacement
        it.cluster.replace(busy)
    assert request.result().timeline.retries == 1
    it.settle(FREE_SECONDS, but=it.ended())


@pytest.mark.more
@ranks("2 to 1", "1 x 2 to 2")
def test_ranks_that_are_steps_behind_rank_0_send_no_frame_before_it_is_computed(it: Scene) -> None:
    it.order(**{LATE_RANKS: 0.1})
    assert it.ask_in_company("late").timeline.retries == 0
    settle(it)


LINKS = [
    # The sending end has ranks.
    ("2 to 1", "transfer.frame,rank=1:kill", "lost"),
    ("2 to 1", "transfer.read,rank=1:stop", "lost"),
    ("2 to 1", "transfer.frame,rank=1:raise", "survived"),
    ("2 to 1", "transfer.frame,rank=1:sleep(2)", "survived"),
    ("2 to 1", "sent,rank=1:corrupt(3)", "retried"),
    ("2 to 1", "sent,rank=1:lose", "retried"),
    # The receiving end has ranks.
    ("1 to 2", "decode.after_frame,rank=1:kill", "lost"),
    ("1 to 2", "decode.after_frame,rank=1:stop", "lost"),
    ("1 to 2", "arrived,rank=1:corrupt(1)", "retried"),
    ("1 to 2", "sent:lose", "retried"),
    # One pair of ranks among many.
    ("2 x 2 to 4", "transfer.frame,rank=1:raise", "survived"),
    ("2 x 2 to 4", "arrived,rank=3:corrupt(1)", "retried"),
    ("2 x 2 to 4", "sent,rank=2:skip", "retried"),
]
"""Faults of the first frame of a link, and what becomes of the rank's worker or of the request."""


@pytest.mark.more
@pytest.mark.parametrize(("cluster", "rule", "outcome"), LINKS, indirect=["cluster"])
def test_a_fault_at_one_rank_of_a_link(it: Scene, rule: str, outcome: str) -> None:
    place, action = rule.split(":")
    it.order(f"{place},request=hit,attempt=1,times=1:{action}")
    processes = {name: left_of(process.pid) for name, process in it.cluster.workers.items()}
    assert processes == {name: pids(it, name)[1:] for name in processes}
    done = it.ask_in_company("hit", 1)
    assert done.timeline.retries == (0 if outcome == "survived" else 1)
    if outcome != "lost":
        settle(it)
        now = {name: left_of(process.pid) for name, process in it.cluster.workers.items()}
        assert now == processes, "no rank has ended"
        return
    dead = it.lost(ENDED_SECONDS)
    assert wait_for_end(it, dead) == 1
    settle(it, dead)
    it.replace(dead)


@pytest.mark.more
@ranks("1 to 2")
def test_a_step_that_fails_at_one_rank_ends_all(it: Scene) -> None:
    request, serving = it.decoding("failing", 400)
    it.order(**{FAILING_PID: pids(it, serving)[1]})
    assert wait_for_end(it, serving) == 1
    assert request.result().timeline.retries == 1
    assert "RuntimeError" in it.cluster.processes[serving].log.read_text()
    settle(it, serving)


@pytest.mark.more
def test_ranks_end_with_rank_0_even_if_they_are_frozen_and_without_it_if_it_is(tmp_path: Path) -> None:
    with scene(tmp_path, losses=True, variables={CHILDREN: 1}, **BY_RANKS["1 to 2"]) as it:
        request, serving = it.decoding("killed", 400)
        assert left_of(it.cluster.processes[serving].pid) == pids(it, serving)[1:]
        it.signal(serving, STOP, 1)
        it.signal(serving, KILL)
        wait_for_end(it, serving, KERNEL_SECONDS)
        assert request.result().timeline.retries == 1
        (other,) = set(it.decodes) - {serving}
        it.cluster.replace(serving)
        pid = it.cluster.processes[other].pid
        assert left_of(pid)
        it.signal(other, STOP)
        until(lambda: not left_of(pid), lambda: f"left: {left_of(pid)}", ENDED_SECONDS)
        os.kill(pid, signal.SIGCONT)
        assert wait_for_end(it, other) == 1
        settle(it, other)
