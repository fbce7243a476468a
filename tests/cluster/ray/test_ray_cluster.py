"""Real local Ray clusters, driven by the command line as a user does; they leave nothing behind.

Every address is explicit, so other Ray clusters on the machine don't matter. A cluster takes half a minute of a core to
start, so most tests share one, in the order of this file; each finds the members by their roles.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from kvrelay.client import Client
from kvrelay.cluster.asking.status import serves
from kvrelay.cluster.processes.processes import Process, find, title
from kvrelay.kernels.cpu.library import INSTRUCTION_SETS, VARIABLE, cpu_features
from support.processes import free_port, wait_until
from support.ray_commands import (
    ENVIRONMENT,
    KVRELAY,
    PORTS,
    PROMPT,
    SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    TOKENS,
    World,
    cluster_processes,
    ray_says,
    shared_memory,
    start_head,
    visible,
)
from support.terminal import CTRL_C, Terminal

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WorldT = TypeVar("WorldT", bound=World)
STREAM_TOKENS = 900
"""Tokens of a stream that goes on while the supervisor is killed."""
NOTICED_SECONDS = 10.0
AGAIN_SECONDS = 30.0
"""Seconds within which the cluster serves again; on a slow machine, twice the time of its own start."""
ENDING = ("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent", "driver")
"""Kinds whose end ends Ray, so that it is started anew."""
AGENTS = ("dashboard_agent", "runtime_env_agent")
"""Agents of Ray, which harm no request while they are frozen."""
SPARED = ("monitor", "dashboard", "log_monitor")
MEMBERS = ("supervisor", "router", "worker")


class Shared(World):
    """A detached cluster with two routers and two workers, and with Ray's dashboard."""

    again_seconds = AGAIN_SECONDS

    def start(self) -> None:
        begun = time.monotonic()
        self.up("--routers", "2", "--config", str(configured(self, "drain_seconds: 1")))
        self.again_seconds = max(AGAIN_SECONDS, 2 * (time.monotonic() - begun))

    def pids(self) -> dict[str, list[int]]:
        return cluster_processes(self.folder / "state")

    def whole(self) -> bool:
        """Whether all members are ready and a router answers."""
        with contextlib.suppress(FileNotFoundError):
            remembered = self.remembered()
            if not remembered["router"] or not serves(remembered["router"], False, 1.0):
                return False
            status = self.status()
            members = status["workers"] + status["routers"]
            return bool(status["ready"]) and len(members) == 4 and all(each["state"] == "ready" for each in members)
        return False

    def wait_whole(self) -> None:
        wait_until(self.whole, "it is whole", START_SECONDS)


def configured(world: World, text: str) -> Path:
    """A configuration file."""
    config = world.folder / "kvrelay.yaml"
    config.write_text(f"{text}\n")
    return config


@contextlib.contextmanager
def ending(world: WorldT) -> Iterator[WorldT]:
    """The world, whose cluster ends with the block."""
    try:
        yield world
    finally:
        world.call("down", seconds=STOP_SECONDS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ending(World(tmp_path)) as world:
        yield world


@pytest.fixture(scope="module")
def memory_before() -> set[str]:
    """Ray's shared memory on this machine before the shared cluster."""
    return shared_memory()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, memory_before: set[str]) -> Iterator[Shared]:
    with ending(Shared(tmp_path_factory.mktemp("shared"))) as world:
        world.start()
        yield world


@pytest.fixture(scope="module", params=["small", pytest.param("shared", marks=pytest.mark.more)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The shared cluster; in `make test` a cheaper one, with one router and without Ray's dashboard."""
    if request.param == "shared":
        yield request.getfixturevalue("shared")
        return
    with ending(World(tmp_path_factory.mktemp("small"))) as world:
        world.up("--config", str(configured(world, "ray: {include_dashboard: false}\ndrain_seconds: 1")))
        yield world


@pytest.fixture(scope="module")
def answer(shared: World) -> tuple[int, ...]:
    """Tokens that the shared cluster generates before any test disturbs it."""
    return shared.generate()


def replaced(world: World, lost: list[dict[str, Any]]) -> None:
    """Kills these members, and waits until others serve under their names."""
    for member in lost:
        os.kill(member["pid"], signal.SIGKILL)

    def fresh() -> bool:
        present = [world.member(member["name"]) for member in lost]
        pairs = zip(present, lost, strict=True)
        return all(now.get("state") == "ready" and now["incarnation"] != was["incarnation"] for now, was in pairs)

    wait_until(fresh, "all are replaced", START_SECONDS)


def strike(world: Shared, kind: str, number: signal.Signals, answer: tuple[int, ...]) -> float:
    """Sends a signal to a process of this kind; returns the seconds until the cluster is whole again."""
    world.wait_whole()
    pid = world.pids()[kind][0]
    begun = time.monotonic()
    os.kill(pid, number)
    try:
        if kind in ENDING:
            trouble = wait_until(lambda: world.remembered()["trouble"], f"{kind}: noticed", NOTICED_SECONDS)
            assert f"pid {pid}" in trouble or number == signal.SIGSTOP
            said = world.call("status").stdout
            assert said.startswith("the cluster is lost and being started anew: ") or world.whole()
        elif kind in MEMBERS:
            wait_until(lambda: not psutil.pid_exists(pid), f"{kind}: it has ended", world.again_seconds)
        wait_until(world.whole, f"{kind}: serves again", world.again_seconds)
        seconds = time.monotonic() - begun
        assert world.generate() == answer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return seconds


def test_a_cluster_serves(served: World) -> None:
    status, answer = served.json("status"), served.generate()
    assert status["ready"] is True
    assert {(worker["name"], worker["role"], worker["state"]) for worker in status["workers"]} == {
        ("worker-0", "prefill", "ready"),
        ("worker-1", "decode", "ready"),
    }
    routers = dict(sorted((router["name"], router["address"]) for router in status["routers"]))
    assert list(routers) == [f"router-{number}" for number in range(len(routers))]
    assert status["router"] == served.remembered()["router"] == ",".join(routers.values())
    for address in routers.values():
        assert served.generate(address) == answer
    said = served.json("generate", PROMPT, "--temperature", "0", "--max-tokens", str(TOKENS))
    assert tuple(said["token_ids"]) == answer
    assert len(answer) == TOKENS
    assert said["finish_reason"] == "length"
    assert said["timeline"]["transfer_bytes"] > 0
    assert {said["timeline"]["prefill_worker"], said["timeline"]["decode_worker"]} == {"worker-0", "worker-1"}
    second = served.call("up", "--detach", *PORTS)
    assert second.returncode == 1
    assert f"already running (pid {served.remembered()['pid']})" in second.stderr


def test_every_process_listens_on_loopback_only(served: World) -> None:
    found = []
    for process in served.processes():
        with contextlib.suppress(psutil.Error):
            listening = (each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
            found += [(each.laddr.ip, title(process)[:60]) for each in listening]
    assert len(found) > 10, "Ray's processes and the members listen"
    assert [each for each in found if each[0] not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")] == []


@pytest.mark.more
def test_a_cluster_is_scaled_and_its_roles_are_changed_while_it_serves(shared: World, answer: tuple[int, ...]) -> None:
    def change(*arguments: str) -> str:
        done = shared.call(*arguments, seconds=START_SECONDS)
        assert done.returncode == 0, done.stderr
        assert shared.generate() == answer
        return done.stdout

    (prefill,), (decode,) = shared.names("prefill"), shared.names("decode")
    assert "done: 1 prefill, 2 decode, 2 router" in change("scale", "decode=2")
    (added,) = {*shared.names("decode")} - {decode}
    before = shared.member(added)
    change("role", added, "prefill")
    after = shared.member(added)
    assert (after["pid"], after["role"]) == (before["pid"], "prefill")
    assert after["generation"] > before["generation"]
    refused = shared.call("drain", decode)
    assert refused.returncode == 1
    assert "without this decode member no request can be served" in refused.stderr
    change("drain", prefill)
    assert (shared.names("prefill"), shared.names("decode")) == ([added], [decode])


@pytest.mark.more
def test_a_killed_supervisor_is_restarted_and_finds_its_members_while_streams_go_on(
    shared: World, answer: tuple[int, ...]
) -> None:
    before, address = shared.status(), shared.remembered()["supervisor"]
    stream: list[int] = []

    def read() -> None:
        with Client(before["router"]) as client:
            options = {"temperature": 0.0, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
            stream.extend(client.complete(PROMPT, **options).token_ids)

    def supervisors() -> list[Process]:
        return [process for process in shared.processes() if re.search(r"ray::\w*-?[Ss]upervisor", title(process))]

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2):
        (killed,) = wait_until(supervisors, "the supervisor's process", SECONDS)
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda killed=killed: killed not in supervisors(), "it has ended", SECONDS)
        assert shared.call("status").returncode in (0, 3)
        assert shared.generate() == answer, "served without it"
        wait_until(lambda: shared.status()["ready"], "it is back", START_SECONDS)
    after = shared.status()
    for kind in ("workers", "routers"):
        known = [(member["pid"], member["incarnation"], member["generation"]) for member in before[kind]]
        assert [(each["pid"], each["incarnation"], each["generation"]) for each in after[kind]] == known, "no doubles"
    assert after["router"] == before["router"]
    assert shared.remembered()["supervisor"] == address
    reader.join(START_SECONDS)
    assert len(stream) == STREAM_TOKENS

    # A worker that was adopted is watched as before.
    replaced(shared, [shared.member(name) for name in shared.names("decode")])
    assert shared.generate() == answer
    assert find(shared.remembered()["pid"]) is not None, "`kvrelay up` goes on watching"


METRICS = {
    "ray_kvrelay_router_requests_total",
    "ray_kvrelay_router_ttft_seconds_count",
    "ray_kvrelay_router_tpot_seconds_count",
    "ray_kvrelay_router_ttft_seconds_bucket",
    "ray_kvrelay_worker_prefill_queue_seconds_count",
    "ray_kvrelay_worker_prefill_seconds_sum",
    "ray_kvrelay_transfer_duration_seconds_count",
    "ray_kvrelay_transfer_exposed_seconds_count",
    "ray_kvrelay_transfer_sent_bytes_total",
    "ray_kvrelay_supervisor_ready",
    "ray_kvrelay_supervisor_members",
    "ray_kvrelay_router_completion_tokens_total",
    "ray_kvrelay_worker_kv_blocks",
    "ray_kvrelay_worker_requests",
}


@pytest.mark.more
def test_ray_shows_the_members_and_their_metrics(shared: World, answer: tuple[int, ...]) -> None:
    says = ray_says(shared.remembered()["ray_address"], dashboard=True)
    status = shared.status()
    members = sorted(member["name"] for member in status["workers"] + status["routers"])
    assert sorted(says["actors"]) == sorted(["kvrelay-supervisor", *members])
    assert sorted(says["groups"]) == [f"kvrelay/{name}" for name in members]
    (decode,) = shared.names("decode")
    assert {f"{decode} (begun as decode, rank 0, gpu none)", "router-0 (router)"} <= set(says["reprs"])
    wait_until(
        lambda: visible(says["metrics"]) >= METRICS,
        lambda: f"metrics: {METRICS - visible(says['metrics'])}",
        SECONDS,
    )


@pytest.mark.more
@pytest.mark.parametrize("kind", ["worker", "supervisor"])
def test_a_frozen_one_is_replaced(shared: Shared, answer: tuple[int, ...], kind: str) -> None:
    strike(shared, kind, signal.SIGSTOP, answer)


@pytest.mark.more
def test_a_killed_agent_of_ray_ends_in_a_new_start_that_keeps_the_desired_state(
    shared: Shared, answer: tuple[int, ...]
) -> None:
    before = shared.json("status")["desired"]["revision"]
    strike(shared, "dashboard_agent", signal.SIGKILL, answer)
    assert shared.json("status")["desired"]["revision"] >= before
    assert "Ray's dashboard agent" in (shared.folder / "state" / "up.out").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ENDING, *SPARED, *MEMBERS])
def test_each_process_may_be_killed_or_frozen(shared: Shared, answer: tuple[int, ...], kind: str) -> None:
    killed = strike(shared, kind, signal.SIGKILL, answer)
    if kind in SPARED:
        wait_until(lambda: shared.remembered()["missing"], "its end is told", NOTICED_SECONDS)
        strike(shared, "driver", signal.SIGKILL, answer)  # a new start brings it back
    if kind not in AGENTS:
        frozen = strike(shared, kind, signal.SIGSTOP, answer)
        print(f"{kind}: whole again {killed:.1f} s after SIGKILL, {frozen:.1f} s after SIGSTOP")


@pytest.mark.more
def test_members_are_replaced_while_rays_agents_are_frozen(shared: Shared, answer: tuple[int, ...]) -> None:
    shared.wait_whole()
    frozen = [pid for kind in AGENTS for pid in shared.pids()[kind]]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        strike(shared, "worker", signal.SIGKILL, answer)
        strike(shared, "router", signal.SIGKILL, answer)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.more
def test_down_leaves_nothing(shared: World, memory_before: set[str]) -> None:
    assert len(shared.processes()) > 5
    shared.down()
    assert shared_memory() <= memory_before
    assert not (shared.folder / "state" / "cluster.json").exists()
    assert shared.call("status").returncode == 1


@pytest.mark.more
@pytest.mark.parametrize(("seconds", "detach"), [(1.0, []), (2.0, []), (3.0, []), (2.0, ["--detach"])])
def test_ctrl_c_ends_a_start_without_a_trace(world: World, seconds: float, detach: list[str]) -> None:
    """Ctrl-C comes once Ray is about to start; a second one comes while the first one ends it."""
    with Terminal([KVRELAY, "up", *PORTS, *detach], world.environment) as terminal:
        terminal.wait_for("starting Ray")
        time.sleep(seconds)  # any moment of Ray's start
        terminal.press(CTRL_C * 2)
        assert terminal.end() == 130
        assert terminal.lines[-1] == "kvrelay: interrupted before the cluster was ready; nothing of it is left"
        assert len(terminal.lines) == 1, "beside the changing line, which has gone"
    assert world.processes() == []
    assert world.call("status").returncode == 1


@pytest.mark.more
def test_ctrl_c_ends_a_cluster_in_the_foreground(world: World) -> None:
    config = configured(world, "router: {grpc_port: 0, http_port: 0}\nray: {include_dashboard: false}")
    command = [KVRELAY, "up", "--colocated", "1", "--config", str(config)]
    native = [each.name for each in INSTRUCTION_SETS if each.needed <= cpu_features()]
    named = {VARIABLE: native[-1]} if native else {}
    with Terminal(command, world.environment | named) as terminal:
        terminal.wait_for("stop       Ctrl-C", START_SECONDS)
        for name in named.values():
            assert f"native kernels are those for {name} ({VARIABLE})" in terminal.lines
            assert f"computes with native kernels for {name}, " in world.call("logs", "worker-0").stdout
        said = world.json("generate", PROMPT, "--max-tokens", str(TOKENS))
        assert said["timeline"]["transfer_bytes"] == 0, "co-located: there is no hand-off"
        terminal.press(CTRL_C)
        terminal.wait_for("stopping")
        terminal.press(CTRL_C)
        assert terminal.end(STOP_SECONDS) == 0
        shown = [line for line in terminal.lines if not line.startswith("  ")]
        assert shown[-2:] == ["kvrelay is ready", "the cluster has ended"]
        assert len(shown) == 2 + len(named)
    assert world.processes() == []
    assert world.call("status").returncode == 1


@pytest.mark.more
def test_a_cluster_is_upgraded_while_it_serves_and_ends_with_up(world: World) -> None:
    config = configured(world, "ray: {include_dashboard: false}\ndrain_seconds: 1")
    world.up("--routers", "2", "--config", str(config))
    answer, before = world.generate(), world.status()
    router = "router: {grpc_port: 0, http_port: null, replicas: 2}"
    configured(world, f"drain_seconds: 1\nengine: {{max_sequences: 7}}\n{router}")
    upgraded = world.call("upgrade", "--config", str(config), "--timeout", "240", seconds=2 * START_SECONDS)
    assert upgraded.returncode == 0, upgraded.stderr
    after = world.status()
    assert not {each["pid"] for each in after["workers"]} & {each["pid"] for each in before["workers"]}
    assert world.generate(after["router"]) == answer
    back = world.call("upgrade", "--rollback", "--no-wait")
    assert back.returncode == 0, back.stderr
    assert "accepted" in back.stdout

    os.kill(world.remembered()["pid"], signal.SIGKILL)
    wait_until(lambda: world.processes() == [], "all have ended", NOTICED_SECONDS)
    assert world.call("status").stdout == "no cluster is running; `kvrelay up` starts one\n"


@pytest.mark.more
def test_a_lost_host_of_a_worker_costs_no_token_and_the_worker_is_replaced(world: World) -> None:
    ranks = "model: {dtype: float32}\ndecode: {engine: {tensor_parallel: 2, hosts: 2}}"
    world.up("--config", str(configured(world, f"ray: {{include_dashboard: false}}\n{ranks}")))
    before = world.status()

    def hosts() -> list[Process]:
        return [process for process in world.processes() if "RankHostActor" in title(process)]

    with Client(before["router"]) as client:
        options = {"temperature": 0.0, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        expected = client.complete(PROMPT, **options).token_ids
        (host,) = hosts()
        (rank,) = host.children()
        stream = client.generate(PROMPT, **options)
        tokens = list(next(stream).token_ids)
        os.kill(host.pid, signal.SIGKILL)
        wait_until(lambda: not rank.is_running(), "its rank ends with it", NOTICED_SECONDS)
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(tokens) == tuple(expected)
    wait_until(lambda: world.status()["ready"] and hosts(), "it is replaced", START_SECONDS)
    known = {each["incarnation"] for each in before["workers"]}
    assert [each["role"] for each in world.status()["workers"] if each["incarnation"] not in known] == ["decode"]


@pytest.mark.more
def test_a_mistake_that_only_a_worker_can_find_is_one_line_and_leaves_nothing(world: World) -> None:
    config = configured(world, "engine: {kv_memory_bytes: 1000}\nray: {include_dashboard: false}")
    up = world.call("up", "--detach", *PORTS, "--config", str(config), seconds=START_SECONDS)
    assert up.returncode == 2, up.stderr + world.log()
    assert {line.partition(": ")[0] for line in up.stderr.splitlines()} == {"kvrelay"}
    assert re.search(r"worker-[01]: .*kv_memory_bytes is 1000", up.stderr)
    assert world.processes() == []
    assert world.call("status").returncode == 1


@pytest.fixture
def shared_ray() -> Iterator[str]:
    """A Ray cluster that kvrelay didn't start; host:port."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvr", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            start_head(Path(folder), port, "--block", "--disable-usage-stats"),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until(lambda: connects(port), "Ray is there", START_SECONDS)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.more
def test_a_cluster_left_on_a_shared_ray_cluster_is_found_again_and_ended(world: World, shared_ray: str) -> None:
    world.up("--address", shared_ray)
    assert world.remembered()["pid"] is None
    assert world.processes() == [], "the driver has left"
    answer = world.generate()

    stranger = World(world.folder / "stranger")
    refused = stranger.call("up", *PORTS, "--address", shared_ray, seconds=START_SECONDS)
    assert refused.returncode == 1
    assert "ray.namespace kvrelay: a kvrelay cluster is running there already" in refused.stderr
    assert world.generate() == answer

    remembered = world.remembered()
    down = world.call("down", seconds=STOP_SECONDS)
    assert down.returncode == 0, down.stderr
    says = ray_says(remembered["ray_address"], dashboard=False)
    assert (says["actors"], says["groups"]) == ([], [])
    assert world.call("status").returncode == 1
