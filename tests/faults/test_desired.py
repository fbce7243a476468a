"""Commands change a cluster of real processes under load; no stream fails, and every token is the right one."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.desired_load import Load
from support.faults import ENGINE, TRANSFER
from support.hash_worker import STEP_SECONDS
from support.supervised import Supervised, all_ready, hash_members, supervised

SWITCH_SECONDS = 3.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """Two workers of each role on the hash model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEP_SECONDS, "0.005")
        options: dict[str, Any] = {"engine": ENGINE, "transfer": TRANSFER, "drain_seconds": 1.0}
        with supervised(
            tmp_path_factory.mktemp("desired"), hash_members(2, 2, **options), drain_seconds=1.0
        ) as cluster:
            all_ready(cluster)
            yield cluster
            assert cluster.process is not None
            assert cluster.process.stop() == 0
            assert cluster.alive() == []


def test_a_worker_takes_another_role_in_seconds_while_streams_run(cluster: Supervised) -> None:
    before = cluster.member("decode-1").member
    with Load(cluster.member("router-0").member.address) as load:
        load.until_running(8)
        began = time.monotonic()
        revision = cluster.control.set_role("decode-1", "prefill")
        cluster.settle(revision)
        assert time.monotonic() - began < SWITCH_SECONDS + 2
        after = cluster.member("decode-1").member
        load.more(10)
    assert after.pid == before.pid
    assert after.generation > before.generation
    assert after.incarnation != before.incarnation
    assert load.failures == []
    cluster.settle(cluster.control.set_role("decode-1", "decode"))


def test_pools_grow_and_shrink_under_load(cluster: Supervised) -> None:
    with Load(cluster.member("router-0").member.address) as load:
        load.until_running(8)
        cluster.settle(cluster.control.scale({"prefill": 3, "decode": 1}))
        assert sorted(cluster.desired().values()) == ["decode", "prefill", "prefill", "prefill", "router"]
        load.more(10)
        cluster.settle(cluster.control.scale({"prefill": 2, "decode": 2}))
        load.more(5)
    assert load.failures == []
    assert sorted(cluster.desired().values()) == ["decode", "decode", "prefill", "prefill", "router"]
