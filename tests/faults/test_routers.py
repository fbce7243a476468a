"""One of two routers is lost under load: no client sees an error, and every stream goes on with equal tokens."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvrelay.client import Client, Completion
from kvrelay.client.messages import PING_OTHERS_SECONDS
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from support.drawn import sampling_options, seed_of
from support.faults import (
    AT_ONCE,
    ENGINE,
    OUT,
    PROMPT,
    TRANSFER,
    Running,
    Scene,
    asking,
    oracle_of_all,
    prompt_of,
    scene,
    until,
)
from support.hash_worker import STEP_SECONDS
from support.history import History, violations
from support.processes import START_SECONDS, free_port, wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

CLIENTS = 40
BUSY_SECONDS = 6.0
"""Seconds for the other router and the workers, which serve twenty streams at a time, on a busy machine."""
SLOW = {STEP_SECONDS: 0.01}


def longest_silence(history: History) -> float:
    """Longest time between two tokens of a request, or from its begin to its first one."""
    longest, last = 0.0, dict[str, float]()
    for event in sorted(history.events, key=lambda event: event.at):
        longest = max(longest, event.at - last.get(event.request, event.at))
        last[event.request] = event.at
    return longest


def working(it: Scene, router: str) -> bool:
    """Whether requests run on this router."""
    return it.cluster.member(router).load.requests.running >= AT_ONCE // 4


STOPPED = ((signal.SIGTERM, 0),)
KILLED_OR_FROZEN = ((signal.SIGKILL, -9), (signal.SIGSTOP, 1))


@pytest.mark.parametrize("ways", [STOPPED, pytest.param(KILLED_OR_FROZEN, marks=pytest.mark.slow)])
def test_one_of_two_routers_is_lost_under_load(tmp_path: Path, ways: tuple[tuple[signal.Signals, int], ...]) -> None:
    """The router is lost by a signal; `code` is the exit code of its process."""
    with scene(tmp_path, routers=2, variables=SLOW, router={"drain_seconds": 0.1}) as it:
        for how, code in ways:
            with asking(it, how.name, CLIENTS) as done:
                until(lambda: working(it, "router-1"), "requests run on both", 30)
                it.signal("router-1", how)
                if how == signal.SIGSTOP:
                    it.frozen.add("router-1")
            resumes = sum(completion.timeline.resumes for completion in done)
            silence = longest_silence(it.history)
            print(f"{how.name}: {resumes} of {CLIENTS} requests went on elsewhere, after {silence:.1f} s at most")
            assert resumes > 0
            assert silence < 2 * PING_OTHERS_SECONDS + BUSY_SECONDS
            assert not any(completion.timeline.retries for completion in done)
            it.settle(10)
            # One that wakes up finds that it was declared dead, and none of its requests.
            it.signal("router-1", signal.SIGCONT)
            assert it.cluster.processes["router-1"].popen.wait(START_SECONDS) == code
            it.replace("router-1")
            it.settle(5)


@dataclass
class Load:
    """Clients that ask one request after another; every one must be answered."""

    client: Client
    history: History = field(default_factory=History)
    done: list[Completion] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self) -> None:
        name = f"request {next(self._numbers)}"
        prompt, seed = prompt_of(name, PROMPT), seed_of(name)
        self.history.add(name, "invoke", prompt=tuple(prompt), count=OUT, seed=seed)
        options = sampling_options(seed) | {"max_tokens": OUT, "ignore_eos": True, "request_id": name}
        self.done.append(Running(name, self.client.generate(prompt, timeout=60.0, **options), self.history).result())

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()

        def client() -> None:
            while not over.is_set():
                self.ask()

        with ThreadPoolExecutor(AT_ONCE // 2) as pool:
            clients = [pool.submit(client) for _ in range(AT_ONCE // 2)]
            try:
                yield
            finally:
                over.set()
            for one in clients:
                one.result()


def test_a_killed_router_is_replaced_and_used_again_and_then_the_other_one_is_killed(tmp_path: Path) -> None:
    members = hash_members(engine=ENGINE, transfer=TRANSFER, drain_seconds=2.0)
    ports = [free_port(), free_port()]
    for index, port in enumerate(ports):
        members[f"router-{index}"] = {
            "module": "kvrelay.router",
            "options": {"model": "pico", "grpc_port": port, "http_port": None},
        }
    target = ",".join(f"127.0.0.1:{port}" for port in ports)
    with supervised(tmp_path, members, drain_seconds=2.0) as cluster, Client(target) as client:
        all_ready(cluster)
        load = Load(client)
        with load.running():
            for name in ("router-0", "router-1"):
                wait_until(lambda name=name: running(cluster, name) > 0, "requests run on it", 30)
                pid = cluster.pid(name)
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda name=name, pid=pid: cluster.pid(name) != pid, "replaced", 5)
                wait_until(
                    lambda name=name, pid=pid: (
                        cluster.member(name).member.pid not in (0, pid) and running(cluster, name)
                    ),
                    lambda: f"requests run on the replacement: {cluster.log()[-4000:]}",
                    START_SECONDS,
                )
        found = violations(load.history, oracle_of_all)
        assert not found, "\n".join(found)
        assert sum(completion.timeline.resumes for completion in load.done) > 0
        assert {status.member.state for status in cluster.status().members} == {MEMBER_STATE_READY}
        wait_until(lambda: idle(cluster), "no block is held", 10)


def running(cluster: Supervised, router: str) -> int:
    """Requests that run on a router, by its latest heartbeat."""
    return cluster.member(router).load.requests.running


def idle(cluster: Supervised) -> bool:
    loads = [status.load for status in cluster.status().members]
    return not any(load.blocks.held or load.requests.running or load.requests.waiting for load in loads)
