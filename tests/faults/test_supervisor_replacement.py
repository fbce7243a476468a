"""A supervisor replaces lost, ill and stuck members, and finds healthy ones again after its own death."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_READY, MEMBER_STATE_SUSPECT, Member
from support.faults import ENGINE, PROMPT, TRANSFER, oracle, prompt_of
from support.processes import START_SECONDS, wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

REPLACED_SECONDS = 5.0
SLACK_SECONDS = 1.5
"""Seconds that a busy machine may take longer."""
HEALTHY = ("prefill-0", "decode-0", "router-0")
ASK: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "timeout": 60.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A cluster on the hash model, and a member that never starts. In the end nothing of it is left."""
    members = hash_members(engine=ENGINE, transfer=TRANSFER, drain_seconds=2.0)
    members["prefill-1"] = {"module": "no.such.module"}
    with supervised(tmp_path_factory.mktemp("supervised"), members, drain_seconds=2.0) as cluster:
        wait_until(lambda: cluster.status().ready, lambda: cluster.log()[-4000:], START_SECONDS)
        yield cluster
        assert cluster.process is not None
        assert cluster.process.stop() == 0
        assert cluster.alive() == []


def healthy(cluster: Supervised) -> dict[str, Member]:
    """The members that can start, all of which are ready."""

    def states() -> set[int]:
        return {cluster.member(name).member.state for name in HEALTHY}

    wait_until(lambda: states() == {MEMBER_STATE_READY}, lambda: cluster.log()[-4000:], START_SECONDS)
    return {name: cluster.member(name).member for name in HEALTHY}


def pids(cluster: Supervised) -> dict[str, int]:
    return {name: cluster.pid(name) for name in HEALTHY}


def test_a_member_that_cannot_start_leaves_the_others_alone(cluster: Supervised) -> None:
    healthy(cluster)
    text = (cluster.folder / "supervisor-1.log").read_text()
    reasons = [json.loads(line) for line in text.splitlines() if '"prefill-1"' in line]
    assert any("exit code 1" in entry.get("reason", "") for entry in reasons), text[-2000:]


def test_a_killed_supervisor_finds_its_members_and_goes_on(cluster: Supervised) -> None:
    before, processes, address = healthy(cluster), pids(cluster), cluster.address
    with Client(before["router-0"].address) as client:
        prompt = prompt_of("over it", PROMPT)
        stream = client.generate(prompt, max_tokens=600, **ASK)
        tokens = list(next(stream).token_ids)
        for _ in range(2):
            cluster.kill()
            cluster.start()
            assert cluster.address == address, "where the members look for it"
            wait_until(
                lambda: (
                    not any(cluster.member(name).restored for name in HEALTHY)
                    and "found running" in (cluster.folder / f"supervisor-{cluster.lives}.log").read_text()
                ),
                "all have found it",
                START_SECONDS,
            )
            for name, member in healthy(cluster).items():
                assert (member.incarnation, member.generation) == (before[name].incarnation, before[name].generation)
        for chunk in stream:
            tokens += chunk.token_ids
        assert tokens == oracle(prompt, 600)
    assert pids(cluster) == processes, "no doubles"
    assert set(cluster.alive()) >= set(processes.values())

    # An adopted process is watched as one that this supervisor started.
    os.kill(processes["decode-0"], signal.SIGKILL)
    wait_until(lambda: cluster.pid("decode-0") != processes["decode-0"], "replaced", REPLACED_SECONDS)
    assert healthy(cluster)["decode-0"].generation > max(member.generation for member in before.values())


def test_a_member_that_died_while_the_supervisor_was_away_is_replaced(cluster: Supervised) -> None:
    healthy(cluster)
    processes = pids(cluster)
    cluster.kill()
    os.kill(processes["prefill-0"], signal.SIGKILL)
    cluster.start()
    wait_until(lambda: cluster.pid("prefill-0") != processes["prefill-0"], "replaced", REPLACED_SECONDS)
    address = healthy(cluster)["router-0"].address
    assert pids(cluster) == {**processes, "prefill-0": cluster.pid("prefill-0")}
    with Client(address) as client:
        prompt = prompt_of("after it", PROMPT)
        tokens = [token for chunk in client.generate(prompt, max_tokens=20, **ASK) for token in chunk.token_ids]
    assert tokens == oracle(prompt, 20)


@pytest.mark.parametrize(
    ("sickness", "seconds", "reason"),
    [
        ("failed", 3.0, "its engine failed"),
        ("stuck", 4.0, "its step has been running"),
        ("draining", 6.0, "it has been draining"),
    ],
)
def test_an_ill_member_that_ignores_sigterm_is_killed_and_replaced(
    tmp_path: Path, sickness: str, seconds: float, reason: str
) -> None:
    """`seconds`: from the illness to the replacement's start."""
    options = {"sickness": sickness, "marker": str(tmp_path / "ill")}
    sick = {"prefill-0": {"module": "support.sick_member", "options": options}}
    limits = {"step_suspect_seconds": 1.0, "step_dead_seconds": 3.0, "drain_seconds": 0.5}
    with supervised(tmp_path, sick, **limits) as cluster:
        all_ready(cluster)
        ill = time.monotonic()
        before = cluster.member("prefill-0").member
        pid = cluster.pid("prefill-0")
        if sickness != "draining":
            wait_until(lambda: cluster.member("prefill-0").member.state == MEMBER_STATE_SUSPECT, "suspected", 3)
        wait_until(lambda: cluster.pid("prefill-0") != pid, lambda: cluster.log()[-3000:], seconds + 2)
        assert time.monotonic() - ill < seconds + 2
        wait_until(
            lambda: (
                cluster.member("prefill-0").member.incarnation != before.incarnation
                and cluster.member("prefill-0").member.state == MEMBER_STATE_READY
            ),
            "replaced",
            START_SECONDS,
        )
        assert not any(status.member.state == MEMBER_STATE_DEAD for status in cluster.status().members)
        assert cluster.alive() == [cluster.pid("prefill-0")]
        text = (tmp_path / "supervisor-1.log").read_text()
        assert reason in text


@pytest.mark.parametrize("held", ["loop", "interpreter"])
def test_a_busy_member_is_left_alive_and_a_frozen_one_is_replaced(tmp_path: Path, held: str) -> None:
    """The busy member's event loop stops for far longer than dead_seconds; with `interpreter`, all of its Python
    threads stop."""
    options = {"sickness": held, "marker": str(tmp_path / "ill")}
    with supervised(tmp_path, {"router-0": {"module": "support.sick_member", "options": options}}) as cluster:
        all_ready(cluster)
        pid, ages = cluster.pid("router-0"), []

        def state() -> int:
            seen = cluster.member("router-0")
            ages.append((seen.heartbeat_age_seconds, seen.member.step_age_seconds))
            return seen.member.state

        wait_until(lambda: state() == MEMBER_STATE_SUSPECT, "suspected", 10)
        wait_until(lambda: state() == MEMBER_STATE_READY, lambda: cluster.log()[-3000:], 20)
        assert cluster.pid("router-0") == pid
        longest = max(age for age, _ in ages)
        print(f"no heartbeat for {longest:.1f} s")
        assert longest < 2.5 if held == "loop" else longest > 4.0
        os.kill(pid, signal.SIGSTOP)
        frozen = time.monotonic()
        wait_until(lambda: cluster.member("router-0").member.state == MEMBER_STATE_DEAD, "declared dead", 10)
        assert time.monotonic() - frozen < 3.5 + SLACK_SECONDS
        wait_until(lambda: cluster.pid("router-0") != pid, "replaced", 10)
        assert "no heartbeat for 3 s" in (tmp_path / "supervisor-1.log").read_text()
