"""The supervisor is killed again and again under load: no client notices, and no zombie comes back through it."""

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_READY
from support.faults import Scene, scene
from support.processes import START_SECONDS, wait_until

CLIENTS = 4


def restart(it: Scene, record: Path | None) -> None:
    """Kills the supervisor and starts another one at its port."""
    it.signal("supervisor", signal.SIGKILL)
    it.cluster.processes["supervisor"].popen.communicate()
    options: dict[str, Any] = {"port": int(it.cluster.supervisor.rpartition(":")[2])}
    if record is not None:
        options["state_path"] = str(record)
    assert it.cluster.start("supervisor", "kvrelay.cluster.supervisor", options).address() == it.cluster.supervisor


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


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recorded", [True, False], ids=["with a record", "without a record"])
def test_kills_of_the_supervisor_under_load_cost_nobody_anything(tmp_path: Path, recorded: bool, kills: int) -> None:
    with scene(tmp_path) as it:
        record = tmp_path / "record.json" if recorded else None
        wait_until(lambda: it.ask("first"), "serves")
        with load(it):
            for number in range(kills):
                restart(it, record)
                # Every second one is killed before it has heard of all.
                enough = 5 if number % 2 else 1
                wait_until(lambda enough=enough: heard(it) >= enough, f"{enough} members are heard", START_SECONDS)
        wait_until(lambda: heard(it) == 5, "all are back", START_SECONDS)
        assert it.failures() == []
        assert {status.member.state for status in it.cluster.status().members} == {MEMBER_STATE_READY}
        it.settle(5)


def test_a_zombie_that_wakes_after_a_restart_cannot_fence_its_replacement(tmp_path: Path) -> None:
    with scene(tmp_path, prefill=1, decode=1, losses=True) as it:
        record = tmp_path / "record.json"
        restart(it, record)
        wait_until(lambda: heard(it) == 3, "all are heard", START_SECONDS)
        wait_until(lambda: it.ask("first"), "serves")
        zombie = it.cluster.processes["decode-0"]
        zombie.popen.send_signal(signal.SIGSTOP)
        wait_until(lambda: it.cluster.member("decode-0").member.state == MEMBER_STATE_DEAD, "dead", 20)
        module, config, variables = it.cluster.started["decode-0"]
        it.cluster.start("decode-0", module, config, variables).address()

        def replaced() -> bool:
            member = it.cluster.member("decode-0").member
            return member.state == MEMBER_STATE_READY and member.pid == it.cluster.processes["decode-0"].pid

        wait_until(replaced, "replaced", START_SECONDS)
        replacement = it.cluster.member("decode-0").member
        restart(it, record)
        zombie.popen.send_signal(signal.SIGCONT)
        assert zombie.popen.wait(START_SECONDS) == 1, "it is fenced and ends"
        zombie.popen.communicate()
        wait_until(lambda: heard(it) == 3, "all are heard", START_SECONDS)
        after = it.cluster.member("decode-0").member
        assert (after.incarnation, after.generation) == (replacement.incarnation, replacement.generation)
        assert replaced()
        it.ask("after it")
        it.settle(5)
