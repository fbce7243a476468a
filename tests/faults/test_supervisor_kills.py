"""The supervisor is killed again and again under load: no client notices, and no zombie comes back through it."""

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.faults import Scene
from support.processes import START_SECONDS, wait_until

CLIENTS = 4


def heard(it: Scene) -> int:
    """Members that the present supervisor has heard of lately."""
    return sum(not status.restored and status.heartbeat_age_seconds < 1 for status in it.cluster.status().members)


@contextmanager
def load(it: Scene) -> Iterator[None]:
    """Clients that ask one request after another until the end; every one must be answered."""
    numbers = itertools.count()
    over = threading.Event()

    def client() -> int:
        done = 0
        while not over.is_set():
            it.ask(f"request {next(numbers)}")
            done += 1
        return done

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
        assert all(client.result() > 0 for client in clients)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recorded", [True, False], ids=["with a record", "without a record"])
def test_kills_of_the_supervisor_under_load_cost_nobody_anything(
    it: Scene, tmp_path: Path, recorded: bool, kills: int
) -> None:
    options = {"state_path": str(tmp_path / "record.json")} if recorded else {}
    members = len(it.cluster.processes) - 1
    with load(it):
        for number in range(kills):
            it.cluster.restart_supervisor(**options)
            # Every second one is killed before it has heard of all.
            enough = members if number % 2 else 1
            wait_until(lambda enough=enough: heard(it) >= enough, f"{enough} members are heard", START_SECONDS)
    wait_until(lambda: heard(it) == members, "all are back", START_SECONDS)
    assert [it.failures(router) for router in it.routers] == [[], []]
    assert all(it.cluster.is_ready(name) for name in it.cluster.processes if name != "supervisor")
    it.settle(5)


def test_a_zombie_that_wakes_after_a_restart_cannot_fence_its_replacement(it: Scene, tmp_path: Path) -> None:
    options = {"state_path": str(tmp_path / "record.json")}
    it.restart("supervisor", **options)
    zombie = it.cluster.processes["decode-0"]
    zombie.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: it.cluster.member("decode-0").member.state == MEMBER_STATE_DEAD, "dead")
    it.cluster.start("decode-0", *it.cluster.started["decode-0"]).address()
    wait_until(lambda: it.cluster.is_ready("decode-0"), "replaced", START_SECONDS)
    replacement = it.cluster.member("decode-0").member
    it.restart("supervisor", **options)
    zombie.popen.send_signal(signal.SIGCONT)
    assert zombie.popen.wait(START_SECONDS) == 1, "it is fenced and ends"
    zombie.popen.communicate()
    wait_until(lambda: heard(it) == len(it.cluster.processes) - 1, "all are heard", START_SECONDS)
    after = it.cluster.member("decode-0").member
    assert (after.incarnation, after.generation) == (replacement.incarnation, replacement.generation)
    assert it.cluster.is_ready("decode-0")
    it.ask("after it")
    it.settle(5)
