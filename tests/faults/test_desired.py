"""Commands change a cluster of real processes under load; no stream fails, and every token is the right one."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.cluster.errors import RunError, UsageError
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, Member
from support.desired_load import Load
from support.faults import ENGINE, TRANSFER
from support.hash_worker import STEP_SECONDS
from support.processes import START_SECONDS, free_port, wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

PORT = free_port()
ROUTER = f"127.0.0.1:{PORT}"
SWITCH_SECONDS = 3.0
BUSY = 3.0
"""Factor by which a machine that runs other tests, too, may be slower."""


def members(checksum: bool = True, **worker: Any) -> dict[str, dict[str, Any]]:
    """A prefill and two decode workers on the hash model, and a router at a port that others may share."""
    options: dict[str, Any] = {"engine": ENGINE, "transfer": TRANSFER | {"checksum": checksum}, "drain_seconds": 1.0}
    found = hash_members(1, 2, **options, **worker)
    found["router-0"]["options"] |= {"grpc_port": PORT, "share_port": True, "drain_seconds": 1.0}
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """The cluster that all tests here change, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEP_SECONDS, "0.005")
        with supervised(tmp_path_factory.mktemp("desired"), members(), drain_seconds=1.0) as cluster:
            all_ready(cluster)
            yield cluster
            assert cluster.process is not None
            assert cluster.process.stop() == 0
            assert cluster.alive() == []


def test_a_worker_takes_another_role_in_seconds_while_streams_run(cluster: Supervised) -> None:
    before = cluster.member("decode-1").member
    with Load(ROUTER) as load:
        load.until_running(8)
        began = time.monotonic()
        revision = cluster.control.set_role("decode-1", "prefill")
        cluster.settle(revision)
        assert time.monotonic() - began < SWITCH_SECONDS * BUSY
        after = cluster.member("decode-1").member
        load.more(10)
    assert after.pid == before.pid
    assert after.generation > before.generation
    assert after.incarnation != before.incarnation
    assert load.failures == []
    cluster.settle(cluster.control.set_role("decode-1", "decode"))


def ready(cluster: Supervised) -> dict[str, Member]:
    return {
        entry.member.name: entry.member
        for entry in cluster.status().members
        if entry.member.state == MEMBER_STATE_READY
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"model": "pico-draft"}, {"checksum": False}], ids=["another fingerprint", "another option"]
)
def test_a_rolling_upgrade_under_load_survives_its_supervisor_and_a_change_that_separates_workers(
    cluster: Supervised, change: dict[str, Any]
) -> None:
    """The new workers can't be paired with the old ones: as those of an earlier version, whose fingerprints differ."""
    before = ready(cluster)
    with Load(ROUTER) as load:
        load.until_running()
        revision = cluster.control.upgrade(json.dumps({"members": members(**change)}))
        wait_until(lambda: ready(cluster).keys() - before.keys(), "a successor serves", START_SECONDS)
        cluster.kill()
        cluster.start()
        cluster.settle(revision, 3 * START_SECONDS)
        load.more(5)
    assert load.failures == []
    after = ready(cluster)
    assert sorted(member.role for member in after.values()) == sorted(member.role for member in before.values())
    assert not {member.pid for member in after.values()} & {member.pid for member in before.values()}
    digests = {member.compatibility for member in after.values() if member.compatibility}
    assert len(digests) == 1
    assert not digests & {member.compatibility for member in before.values()}


@pytest.mark.slow
def test_an_upgrade_that_cannot_start_stops_and_is_taken_back(cluster: Supervised) -> None:
    before = ready(cluster)
    with Load(ROUTER) as load:
        load.until_running()
        revision = cluster.control.upgrade(json.dumps({"members": members(checksum=False, max_waiting=0)}))
        with pytest.raises(RunError, match=r"does not come up: exit code 2: .*max_waiting"):
            cluster.settle(revision, START_SECONDS)
        load.more(2)
        cluster.settle(cluster.control.roll_back())
    assert load.failures == []
    assert {name: member.pid for name, member in ready(cluster).items()} == {
        name: member.pid for name, member in before.items()
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "Invalid JSON"),
        ('{"members": {"w": {"module": "m", "options": {"role": "cook"}}}}', "members.w.options.role is cook"),
        ('{"member": {}}', "member"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(cluster: Supervised, config: str, reason: str) -> None:
    revision = cluster.status().desired.revision
    with pytest.raises(UsageError, match=reason):
        cluster.control.upgrade(config)
    assert cluster.status().desired.revision == revision


def test_more_members_than_memory_holds_are_refused_with_the_number_that_fits(cluster: Supervised) -> None:
    revision = cluster.status().desired.revision
    with pytest.raises(UsageError, match=r"decode is 1000; allowed: at most \d+\. One more takes about \d") as refused:
        cluster.control.scale({"decode": 1000})
    assert 2 <= int(str(refused.value).partition("at most ")[2].partition(".")[0]) < 1000
    assert cluster.status().desired.revision == revision


def test_pools_go_to_zero_and_back(cluster: Supervised) -> None:
    cluster.settle(cluster.control.scale({"prefill": 0, "decode": 0}))
    assert list(cluster.desired().values()) == ["router"]
    assert not cluster.status().ready
    cluster.settle(cluster.control.scale({"prefill": 1, "decode": 1}))
    with Load(ROUTER) as load:
        load.more(2)
    assert load.failures == []


@pytest.mark.slow
def test_pools_grow_and_shrink_under_load(cluster: Supervised) -> None:
    with Load(ROUTER) as load:
        load.until_running(8)
        cluster.settle(cluster.control.scale({"prefill": 3, "decode": 1}))
        assert sorted(cluster.desired().values()) == ["decode", "prefill", "prefill", "prefill", "router"]
        load.more(10)
        cluster.settle(cluster.control.scale({"prefill": 1, "decode": 2}))
        load.more(5)
    assert load.failures == []
    assert sorted(cluster.desired().values()) == ["decode", "decode", "prefill", "router"]
