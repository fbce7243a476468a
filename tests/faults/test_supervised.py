"""A supervisor of real processes: it follows commands under load, replaces members that are lost or ill, and finds them
again after its own death. No stream fails, and every token is the right one."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from kvrelay.client import Client, KvrelayError
from kvrelay.cluster.errors import RunError, UsageError
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    ROLE_DECODE,
    Member,
)
from support.faults import CLIENT_SECONDS, ENGINE, TRANSFER, oracle, prompt_of
from support.forks import left_of
from support.hash_worker import LOAD_SECONDS, STEP_SECONDS
from support.history import sampling_options, seed_of
from support.processes import START_SECONDS, free_port, wait_until
from support.supervised import Supervised, all_ready, hash_members, supervised

PORTS = [free_port(), free_port()]
ROUTERS = ",".join(f"127.0.0.1:{port}" for port in PORTS)
REPLACED_SECONDS = 10.0
"""Longest time until a member that was killed has a successor: far more than the 0.1 s that it takes, for a busy
machine."""
LOST_SECONDS = 10.0
"""Longest time until a worker that has lost a rank has a successor: a frozen rank is noticed within 3 s."""
LEFT_SECONDS = 4.0
"""Longest time from there until no rank of the lost worker is left."""
SLACK_SECONDS = 4.0
"""Seconds by which a busy machine may delay what is measured."""
DECISION_SECONDS = 60.0
SICK = "support.sick_member"
STREAMS, TOKENS = 6, 120
"""Clients of a load, and tokens of each of their requests."""
MORE_SECONDS = 90.0
ONE_RANK: Mapping[str, int] = {"tensor_parallel": 1}


def members(
    ports: Sequence[int] = PORTS, checksum: bool = True, degree: Mapping[str, int] = ONE_RANK, **worker: Any
) -> dict[str, dict[str, Any]]:
    """A prefill worker on the hash model; and for each port a decode worker, and a router that lets others share it.

    Args:
        degree: of each worker, as options of its engine.
    """
    options: dict[str, Any] = {
        "engine": {**ENGINE, **degree},
        "transfer": TRANSFER | {"checksum": checksum},
        "drain_seconds": 1.0,
    }
    found = hash_members(1, len(ports), **options, **worker)
    router = {"model": "pico", "http_port": None, "share_port": True, "drain_seconds": 1.0}
    for index, port in enumerate(ports):
        found[f"router-{index}"] = {"module": "kvrelay.router", "options": {**router, "grpc_port": port}}
    return found


def stop(cluster: Supervised) -> None:
    """Ends a cluster; nothing of it is left."""
    assert cluster.process is not None
    assert cluster.process.stop() == 0
    assert cluster.alive() == []


@contextmanager
def running(folder: Path, ports: Sequence[int], degree: Mapping[str, int] = ONE_RANK) -> Iterator[Supervised]:
    """A cluster of `members` that is ready, and ends by SIGTERM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEP_SECONDS, "0.005")
        with supervised(folder, members(ports, degree=degree), True, drain_seconds=1.0) as cluster:
            all_ready(cluster)
            yield cluster
            stop(cluster)


RANKS = [
    pytest.param({"tensor_parallel": 2}, marks=pytest.mark.more, id="2 ranks"),
    pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.more, id="2 stages"),
]


@pytest.fixture(scope="module", params=[pytest.param(ONE_RANK, id="1 rank"), *RANKS])
def degree(request: pytest.FixtureRequest) -> Mapping[str, int]:
    """The degree of each worker of `cluster`."""
    degree: Mapping[str, int] = request.param
    return degree


@pytest.fixture(scope="module")
def cluster(degree: Mapping[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """The cluster that most tests here change, one after another."""
    with running(tmp_path_factory.mktemp("supervised"), PORTS, degree) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """The cluster of `make test`: a member that only sends heartbeats, which takes no second to start and ignores
    SIGTERM, and a decode worker that can't start."""
    folder = tmp_path_factory.mktemp("small")
    members = hash_members(0, 1, engine=ENGINE, transfer=TRANSFER)
    members["decode-0"]["module"] = "no.such.module"
    members["prefill-0"] = {"module": SICK, "options": {"sickness": "", "marker": str(folder / "ill")}}
    del members["router-0"]
    with supervised(folder, members, drain_seconds=0.5) as cluster:
        wait_until(lambda: "prefill-0" in ready(cluster), cluster.log, START_SECONDS)
        yield cluster
        stop(cluster)


def ready(cluster: Supervised) -> dict[str, Member]:
    """The members that are ready."""
    found = [entry.member for entry in cluster.status().members]
    return {member.name: member for member in found if member.state == MEMBER_STATE_READY}


def is_running(pid: int) -> bool:
    """Whether there is such a process, which isn't merely waited for."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def pids(member: Member) -> list[int]:
    """Process ids of all ranks of a member."""
    return list(member.rank_pids) or [member.pid]


def first(cluster: Supervised, role: str) -> str:
    """The first desired member of a role."""
    return min(name for name, found in cluster.desired().items() if found == role)


def all_members(cluster: Supervised) -> dict[str, Member]:
    """All desired members, once they are ready."""
    all_ready(cluster)
    return {name: ready(cluster)[name] for name in cluster.desired()}


def replaced(cluster: Supervised, name: str, pid: int, seconds: float = REPLACED_SECONDS) -> None:
    wait_until(lambda: cluster.pid(name) != pid, lambda: cluster.log()[-3000:], seconds)


class Load:
    """STREAMS clients, each with one request after another, from `with` on until its end. Each stream's tokens are
    compared with the model's."""

    def __init__(self, router: str) -> None:
        self.failures: list[str] = []
        """Descriptions of what went wrong: errors, and wrong tokens."""
        self.resumes = 0
        """Times that a stream went on over another router."""
        self.done = 0
        """Requests that are over."""
        self._router = router
        self._running: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until_running(self, count: int = STREAMS) -> None:
        """Waits until so many streams have begun to yield tokens."""
        wait_until(lambda: self.done + len(self._running) >= count, "streams run", MORE_SECONDS)

    def more(self, count: int) -> None:
        """Waits until so many more requests are over."""
        enough = self.done + count
        wait_until(lambda: self.done >= enough, lambda: f"{count} more requests: {self.failures}", MORE_SECONDS)

    def _ask(self, number: int) -> None:
        round_ = 0
        with Client(self._router) as client:
            while not self._stop.is_set():
                round_ += 1
                self._one(client, f"load {self._router} {id(self)} {number} {round_}")
                self.done += 1

    def _one(self, client: Client, name: str) -> None:
        prompt, seed = prompt_of(name, 90), seed_of(name)
        tokens: list[int] = []
        options = sampling_options(seed) | {"max_tokens": TOKENS, "ignore_eos": True}
        try:
            for chunk in client.generate(prompt, timeout=CLIENT_SECONDS, **options):
                tokens += chunk.token_ids
                self._running.add(name)
                self.resumes += 0 if chunk.timeline is None else chunk.timeline.resumes
            if tokens != oracle(prompt, TOKENS, seed):
                self.failures.append(f"{name}: wrong tokens")
        except KvrelayError as error:
            self.failures.append(f"{name}: {error}")
        finally:
            self._running.discard(name)


# The supervisor's own death, and that of its members.


@pytest.mark.more
def test_a_member_that_died_while_the_supervisor_was_away_is_replaced(cluster: Supervised) -> None:
    all_ready(cluster)
    processes = cluster.pids()
    cluster.kill()
    os.kill(processes["prefill-0"], signal.SIGKILL)
    cluster.start()
    replaced(cluster, "prefill-0", processes["prefill-0"])
    all_ready(cluster)
    assert cluster.pids() == {**processes, "prefill-0": cluster.pid("prefill-0")}
    with Load(ROUTERS) as load:
        load.more(2)
    assert load.failures == []


@pytest.mark.more
def test_a_killed_router_is_replaced_and_used_again_and_then_the_other_one_is_killed(cluster: Supervised) -> None:
    def running(name: str) -> int:
        return cluster.member(name).load.requests.running

    with Load(ROUTERS) as load:
        for name in ("router-0", "router-1"):
            wait_until(lambda name=name: running(name) > 0, "requests run on it", 30)
            pid = cluster.pid(name)
            os.kill(pid, signal.SIGKILL)
            replaced(cluster, name, pid)
            wait_until(
                lambda name=name, pid=pid: cluster.member(name).member.pid not in (0, pid) and running(name),
                lambda: f"requests run on the replacement: {cluster.log()[-4000:]}",
                START_SECONDS,
            )
    assert load.failures == []
    assert load.resumes > 0
    all_ready(cluster)
    loads = [status.load for status in cluster.status().members]
    wait_until(lambda: not any(load.blocks.held for load in loads), "no block is held", 10)


# Commands.


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "Invalid JSON"),
        ('{"members": {"w": {"module": "m", "options": {"role": "cook"}}}}', "members.w.options.role is cook"),
        ('{"member": {}}', "member"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(small: Supervised, config: str, reason: str) -> None:
    revision = small.status().desired.revision
    with pytest.raises(UsageError, match=reason):
        small.control.upgrade(config)
    assert small.status().desired.revision == revision


def test_more_members_than_memory_holds_are_refused_with_the_number_that_fits(small: Supervised) -> None:
    revision = small.status().desired.revision
    with pytest.raises(UsageError, match=r"decode is 1000; allowed: at most \d+\. One more takes about \d") as refused:
        small.control.scale({"decode": 1000})
    assert 1 <= int(str(refused.value).partition("at most ")[2].partition(".")[0]) < 1000
    assert small.status().desired.revision == revision


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"model": "pico-draft"}, {"checksum": False}], ids=["another fingerprint", "another option"]
)
def test_a_rolling_upgrade_under_load_survives_its_supervisor_and_a_change_that_separates_workers(
    cluster: Supervised, degree: Mapping[str, int], change: dict[str, Any]
) -> None:
    """The new workers can't be paired with the old ones: as those of an earlier version, whose fingerprints differ."""
    before = ready(cluster)
    with Load(ROUTERS) as load:
        load.until_running()
        revision = cluster.control.upgrade(json.dumps({"members": members(degree=degree, **change)}))
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
def test_an_upgrade_that_cannot_start_stops_and_is_taken_back(cluster: Supervised, degree: Mapping[str, int]) -> None:
    before = ready(cluster)
    with Load(ROUTERS) as load:
        load.until_running()
        revision = cluster.control.upgrade(
            json.dumps({"members": members(checksum=False, degree=degree, max_waiting=0)})
        )
        with pytest.raises(RunError, match=r"does not come up: exit code 2: .*max_waiting"):
            cluster.settle(revision, START_SECONDS)
        load.more(2)
        cluster.settle(cluster.control.roll_back())
    assert load.failures == []
    assert {name: member.pid for name, member in ready(cluster).items()} == {
        name: member.pid for name, member in before.items()
    }


@pytest.mark.more
def test_pools_go_to_zero_and_back_and_grow_and_shrink_under_load(cluster: Supervised) -> None:
    def roles() -> list[str]:
        return sorted(cluster.desired().values())

    cluster.settle(cluster.control.scale({"prefill": 0, "decode": 0}))
    assert roles() == ["router"] * 2
    assert not cluster.status().ready
    cluster.settle(cluster.control.scale({"prefill": 1, "decode": 1}))
    with Load(ROUTERS) as load:
        load.until_running(8)
        cluster.settle(cluster.control.scale({"prefill": 3, "decode": 1}))
        assert roles() == ["decode"] + ["prefill"] * 3 + ["router"] * 2
        load.more(10)
        cluster.settle(cluster.control.scale({"prefill": 1, "decode": 2}))
        load.more(5)
    assert load.failures == []
    assert roles() == ["decode"] * 2 + ["prefill"] + ["router"] * 2


# Workers of several ranks.

LOSSES = [
    ("decode", 1, signal.SIGKILL),
    ("prefill", 1, signal.SIGSTOP),
    pytest.param("prefill", 0, signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("decode", 0, signal.SIGSTOP, marks=pytest.mark.slow),
]


@pytest.mark.more
@pytest.mark.parametrize("degree", RANKS, indirect=True)
@pytest.mark.parametrize(("role", "rank", "number"), LOSSES)
def test_a_worker_that_has_lost_a_rank_is_replaced_while_streams_run(
    cluster: Supervised, role: str, rank: int, number: signal.Signals
) -> None:
    name = first(cluster, role)
    before = all_members(cluster)[name]
    assert len(before.rank_pids) == 2
    with Load(ROUTERS) as load:
        load.until_running()
        os.kill(before.rank_pids[rank], number)
        replaced(cluster, name, before.pid, LOST_SECONDS)
        wait_until(lambda: not any(map(is_running, before.rank_pids)), "no rank is left", LEFT_SECONDS)
        after = all_members(cluster)[name]
        load.more(STREAMS)
    assert load.failures == []
    assert not set(after.rank_pids) & set(before.rank_pids)


@pytest.mark.more
def test_a_worker_is_drained_and_another_one_takes_its_place(cluster: Supervised) -> None:
    before, name = all_members(cluster), first(cluster, "decode")
    with Load(ROUTERS) as load:
        load.until_running()
        cluster.settle(cluster.control.drain(name, replace=True))
        load.more(STREAMS)
    assert load.failures == []
    after = all_members(cluster)
    assert [member.role for member in after.values()].count(ROLE_DECODE) == 2
    gone = {pid for member in before.values() for pid in pids(member)}
    gone -= {pid for member in after.values() for pid in pids(member)}
    assert gone == set(pids(before[name]))
    assert not any(map(is_running, gone))


@pytest.mark.more
@pytest.mark.parametrize("signalled", ["supervisor", "rank 0", "all ranks"])
def test_sigterm_ends_ranks_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: str) -> None:
    monkeypatch.setenv(LOAD_SECONDS, "20")
    options: dict[str, Any] = {"engine": {**ENGINE, "tensor_parallel": 2}, "drain_seconds": 1.0}
    only = {name: each for name, each in hash_members(1, 0, **options).items() if name == "prefill-0"}
    with supervised(tmp_path, only, True, drain_seconds=1.0) as cluster:
        wait_until(lambda: (tmp_path / "prefill-0.pid").exists(), "it is started")
        pid = cluster.pid("prefill-0")
        wait_until(lambda: left_of(pid), "its other rank runs", START_SECONDS)
        wait_until(lambda: "loading" in cluster.log(), cluster.log, START_SECONDS)
        if signalled == "supervisor":
            stop(cluster)
            return
        for target in [*left_of(pid), pid] if signalled == "all ranks" else [pid]:
            os.kill(target, signal.SIGTERM)
        wait_until(lambda: not left_of(pid) and not is_running(pid), lambda: str(left_of(pid)), LOST_SECONDS)
        replaced(cluster, "prefill-0", pid)


# Clusters of their own.


@pytest.mark.slow
def test_the_role_that_is_short_gets_workers_while_streams_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prefill workers and one decode worker, which can't have all streams at once. Its steps take 20 ms with few
    streams, so a token every 20 ms needs more decode workers than one."""
    monkeypatch.setenv(STEP_SECONDS, "0.01")
    options: dict[str, Any] = {"engine": ENGINE | {"max_sequences": 2}, "transfer": TRANSFER, "drain_seconds": 1.0}
    scaling = {"enabled": True, "ttft_target_seconds": 30.0, "tpot_target_seconds": 0.02}
    with supervised(tmp_path, hash_members(3, 1, **options), True, drain_seconds=1.0, scaling=scaling) as cluster:
        all_ready(cluster)
        with Load(cluster.member("router-0").member.address) as load:
            status = cluster.status
            wait_until(lambda: status().scaling.decisions, lambda: str(status().scaling), DECISION_SECONDS)
            wait_until(lambda: status().settled, "the roles", DECISION_SECONDS)
            load.more(10)
        assert load.failures == []
        found = status().scaling
        assert "decode would be at" in found.decisions[0].reason
        assert not found.decisions[0].refused
        assert list(cluster.desired().values()).count("decode") > 1
        assert found.decode_queue_seconds > 0
        time.sleep(3)  # without traffic, nothing more is decided
        assert len(status().scaling.decisions) == len(found.decisions)
        stop(cluster)


def test_a_member_that_cannot_start_leaves_the_others_alone(small: Supervised) -> None:
    def reasons() -> list[str]:
        lines = small.log().splitlines()
        return [
            str(json.loads(line).get("reason", "")) for line in lines if '"reason"' in line and '"decode-0"' in line
        ]

    wait_until(lambda: any("exit code 1" in reason for reason in reasons()), lambda: str(reasons()), START_SECONDS)
    assert "prefill-0" in ready(small)


@pytest.mark.more
@pytest.mark.parametrize(
    ("sickness", "seconds", "reason"),
    [
        ("failed", 3.0, "its engine failed"),
        pytest.param("stuck", 4.0, "its step has been running", marks=pytest.mark.more),
        pytest.param("draining", 6.0, "it has been draining", marks=pytest.mark.more),
    ],
)
def test_an_ill_member_that_ignores_sigterm_is_killed_and_replaced(
    tmp_path: Path, sickness: str, seconds: float, reason: str
) -> None:
    """`seconds`: from the illness to the replacement's start."""
    options = {"sickness": sickness, "marker": str(tmp_path / "ill")}
    limits = {"step_suspect_seconds": 1.0, "step_dead_seconds": 3.0, "drain_seconds": 0.5}
    with supervised(tmp_path, {"prefill-0": {"module": SICK, "options": options}}, **limits) as cluster:
        all_ready(cluster)
        ill = time.monotonic()
        before = cluster.member("prefill-0").member
        pid = cluster.pid("prefill-0")
        if sickness != "draining":
            wait_until(lambda: cluster.member("prefill-0").member.state == MEMBER_STATE_SUSPECT, "suspected")
        replaced(cluster, "prefill-0", pid, seconds + SLACK_SECONDS)
        assert time.monotonic() - ill < seconds + SLACK_SECONDS
        wait_until(
            lambda: (
                cluster.member("prefill-0").member.incarnation != before.incarnation and "prefill-0" in ready(cluster)
            ),
            "replaced",
            START_SECONDS,
        )
        assert not any(status.member.state == MEMBER_STATE_DEAD for status in cluster.status().members)
        assert cluster.alive() == [cluster.pid("prefill-0")]
        assert reason in (tmp_path / "supervisor-1.log").read_text()


@pytest.mark.more
@pytest.mark.parametrize("held", ["loop", "interpreter"])
def test_a_busy_member_is_left_alive_and_a_frozen_one_is_replaced(tmp_path: Path, held: str) -> None:
    """The busy member's event loop stops for far longer than dead_seconds; with `interpreter`, all of its Python
    threads stop."""
    options = {"sickness": held, "marker": str(tmp_path / "ill")}
    limits = {"suspect_seconds": 1.5, "dead_seconds": 3.0}
    with supervised(tmp_path, {"router-0": {"module": SICK, "options": options}}, **limits) as cluster:
        all_ready(cluster)
        pid, ages = cluster.pid("router-0"), []

        def state() -> int:
            seen = cluster.member("router-0")
            ages.append(seen.heartbeat_age_seconds)
            return seen.member.state

        wait_until(lambda: state() == MEMBER_STATE_SUSPECT, "suspected")
        wait_until(lambda: state() == MEMBER_STATE_READY, lambda: cluster.log()[-3000:])
        assert cluster.pid("router-0") == pid
        print(f"no heartbeat for {max(ages):.1f} s")
        assert max(ages) < 4.0 if held == "loop" else max(ages) > 4.0
        os.kill(pid, signal.SIGSTOP)
        frozen = time.monotonic()
        wait_until(lambda: cluster.member("router-0").member.state == MEMBER_STATE_DEAD, "declared dead")
        assert time.monotonic() - frozen < 3.5 + SLACK_SECONDS
        replaced(cluster, "router-0", pid, 10)
        assert "no heartbeat for 3 s" in (tmp_path / "supervisor-1.log").read_text()
