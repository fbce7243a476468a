"""Workers of real processes change their role under load with scaling on; no stream fails, every token is right."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.desired_load import Load
from support.faults import ENGINE, TRANSFER
from support.hash_worker import STEP_SECONDS
from support.processes import wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

DECISION_SECONDS = 60.0
SCALING = {"enabled": True, "ttft_target_seconds": 30.0, "tpot_target_seconds": 0.02}
"""Decode's steps take 20 ms with few streams, so a token every 20 ms needs more decode workers than one."""


@pytest.fixture
def cluster(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """Three prefill workers and one decode worker, which can't have all streams at once."""
    monkeypatch.setenv(STEP_SECONDS, "0.01")
    engine = ENGINE | {"max_sequences": 2}
    options: dict[str, Any] = {"engine": engine, "transfer": TRANSFER, "drain_seconds": 1.0}
    with supervised(tmp_path, hash_members(3, 1, **options), drain_seconds=1.0, scaling=SCALING) as cluster:
        all_ready(cluster)
        yield cluster
        assert cluster.process is not None
        assert cluster.process.stop() == 0
        assert cluster.alive() == []


@pytest.mark.slow
def test_the_role_that_is_short_gets_workers_while_streams_run(cluster: Supervised) -> None:
    with Load(cluster.member("router-0").member.address) as load:
        wait_until(lambda: cluster.status().scaling.decisions, lambda: str(cluster.status().scaling), DECISION_SECONDS)
        wait_until(lambda: cluster.status().settled, "the roles", DECISION_SECONDS)
        load.more(10)
    assert load.failures == []
    scaling = cluster.status().scaling
    assert "decode would be at" in scaling.decisions[0].reason
    assert not scaling.decisions[0].refused
    assert list(cluster.desired().values()).count("decode") > 1
    assert scaling.decode_queue_seconds > 0
    decided = len(scaling.decisions)
    time.sleep(3)  # without traffic, nothing more is decided
    assert len(cluster.status().scaling.decisions) == decided
