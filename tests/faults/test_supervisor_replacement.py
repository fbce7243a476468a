"""What a supervisor keeps running: lost, ill and stuck members are replaced, healthy ones are found again
after its own death."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_READY, MEMBER_STATE_SUSPECT
from support.faults import ENGINE, PROMPT, TRANSFER, oracle, prompt_of
from support.processes import START_SECONDS, wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

REPLACED_SECONDS = 5.0
ASK: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "timeout": 60.0}


def members() -> dict[str, Any]:
    return hash_members(engine=ENGINE, transfer=TRANSFER, drain_seconds=2.0)


def router(cluster: Supervised) -> str:
    return cluster.member("router-0").member.address


def test_a_killed_supervisor_finds_its_members_and_goes_on(tmp_path: Path) -> None:
    with supervised(tmp_path, members(), drain_seconds=2.0) as cluster:
        all_ready(cluster)
        pids = cluster.pids()
        before = {status.member.name: status.member for status in cluster.status().members}
        address = cluster.address
        with Client(router(cluster)) as client:
            prompt = prompt_of("over it", PROMPT)
            stream = client.generate(prompt, max_tokens=600, **ASK)
            tokens = list(next(stream).token_ids)
            for _ in range(2):
                cluster.kill()
                cluster.start()
                assert cluster.address == address, "where the members look for it"
                assert {status.member.name for status in cluster.status().members} == before.keys()
                wait_until(
                    lambda: (
                        all(not status.restored for status in cluster.status().members)
                        and "found running" in (tmp_path / f"supervisor-{cluster.lives}.log").read_text()
                    ),
                    "all have found it",
                    START_SECONDS,
                )
                after = {status.member.name: status.member for status in cluster.status().members}
                for name, member in before.items():
                    assert (after[name].incarnation, after[name].generation) == (member.incarnation, member.generation)
            for chunk in stream:
                tokens += chunk.token_ids
            assert tokens == oracle(prompt, 600)
        assert cluster.pids() == pids, "no doubles"
        assert cluster.alive() == sorted(pids.values())

        # An adopted process is watched as one that this supervisor started.
        os.kill(pids["decode-0"], signal.SIGKILL)
        wait_until(lambda: cluster.pid("decode-0") != pids["decode-0"], "replaced", REPLACED_SECONDS)
        all_ready(cluster)
        assert cluster.member("decode-0").member.generation > max(member.generation for member in before.values())

        assert cluster.process is not None
        assert cluster.process.stop() == 0
        assert cluster.alive() == []


def test_a_member_that_died_while_the_supervisor_was_away_is_replaced(tmp_path: Path) -> None:
    with supervised(tmp_path, members(), drain_seconds=2.0) as cluster:
        all_ready(cluster)
        pids = cluster.pids()
        cluster.kill()
        os.kill(pids["prefill-0"], signal.SIGKILL)
        cluster.start()
        wait_until(lambda: cluster.pid("prefill-0") != pids["prefill-0"], "replaced", REPLACED_SECONDS)
        all_ready(cluster)
        assert {name: pid for name, pid in cluster.pids().items() if name != "prefill-0"} == {
            name: pid for name, pid in pids.items() if name != "prefill-0"
        }
        with Client(router(cluster)) as client:
            prompt = prompt_of("after it", PROMPT)
            tokens = [token for chunk in client.generate(prompt, max_tokens=20, **ASK) for token in chunk.token_ids]
        assert tokens == oracle(prompt, 20)


def test_a_member_that_cannot_start_leaves_the_others_alone(tmp_path: Path) -> None:
    broken = {"prefill-1": {"module": "no.such.module"}}
    with supervised(tmp_path, members() | broken, drain_seconds=2.0) as cluster:
        wait_until(lambda: cluster.status().ready, lambda: cluster.log()[-4000:], START_SECONDS)
        text = (tmp_path / "supervisor-1.log").read_text()
        reasons = [json.loads(line) for line in text.splitlines() if '"prefill-1"' in line]
        assert any("exit code 1" in entry.get("reason", "") for entry in reasons), text[-2000:]


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
