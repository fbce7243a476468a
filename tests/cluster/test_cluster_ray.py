"""A real local Ray cluster, driven by the command line as a user does; it leaves nothing behind.

Every address is explicit, so other Ray clusters on the machine don't matter.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.processes import Process, find

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KVRELAY = str(Path(sys.executable).parent / "kvrelay")
START_SECONDS = 120.0
STOP_SECONDS = 60.0
SECONDS = 30.0
PROMPT = "def __init__(self, "
# They would lead Ray's commands and State API to another cluster, whatever address is given.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
}
RAY_SAYS = """
import json, sys
from kvrelay.cluster import rayenv
rayenv.prepare()
import ray, ray.util
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
from ray.util.placement_group import placement_group_table
from ray.util.state import list_actors
# Without an address list_actors looks for Ray clusters on this machine, and fails if there are two.
actors = list_actors(address=sys.argv[1], detail=True) if sys.argv[2] == "dashboard" else []
print(json.dumps({
    "actors": [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)],
    "reprs": [actor.repr_name for actor in actors],
    "groups": [table["name"] for table in placement_group_table().values() if table["state"] != "REMOVED"],
    "metrics": [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()],
}))
"""


@dataclass
class World:
    """The command line with a state folder of its own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = ENVIRONMENT | {"KVRELAY_STATE_DIR": str(self.folder / "state")}

    def call(self, *arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [KVRELAY, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def json(self, *arguments: str) -> Any:
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("up", "--grpc-port", "0", "--http-port", "0", *arguments, seconds=START_SECONDS)

    def member(self, name: str) -> dict[str, Any]:
        status = self.json("status")
        (member,) = [member for member in status["workers"] + status["routers"] if member["name"] == name]
        return dict(member)

    def generate(self, *arguments: str) -> Any:
        return self.json("generate", PROMPT, "--temperature", "0", "--max-tokens", "12", *arguments)

    def remembered(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state" / "cluster.json").read_text()))

    def log(self) -> str:
        path = self.folder / "state" / "up.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    try:
        yield world
    finally:
        world.call("down", seconds=STOP_SECONDS)


def ray_says(address: str, *, dashboard: bool) -> Any:
    """Ray's view of a cluster, from a driver in a process of its own."""
    command = [sys.executable, "-c", RAY_SAYS, address, "dashboard" if dashboard else "-"]
    output = subprocess.check_output(command, env=ENVIRONMENT, timeout=START_SECONDS, text=True)
    return json.loads(output.splitlines()[-1])


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return value


def started_by(world: World) -> list[Process]:
    """Every process with this world's state folder in its environment, whatever its parent is now."""
    mark = f"KVRELAY_STATE_DIR={world.environment['KVRELAY_STATE_DIR']}".encode()
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and mark in (path / "environ").read_bytes():
                found.append(find(int(path.name)))
    return [process for process in found if process is not None and process.alive]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "ray" in path.name or "plasma" in path.name}


def test_a_cluster_serves_replaces_what_is_killed_and_leaves_nothing(world: World) -> None:
    before = shared_memory()
    up = world.up("--detach", "--routers", "2")
    assert up.returncode == 0, up.stderr + world.log()
    assert "kvrelay is ready" in up.stdout
    owner = world.remembered()["pid"]

    status = world.json("status")
    assert status["ready"] is True
    assert {(worker["name"], worker["role"], worker["state"]) for worker in status["workers"]} == {
        ("prefill-0", "prefill", "ready"),
        ("decode-0", "decode", "ready"),
    }
    routers = {router["name"]: router["address"] for router in status["routers"]}
    assert status["router"] == world.remembered()["router"] == f"{routers['router-0']},{routers['router-1']}"
    answer = world.generate("--target", status["router"])
    for address in routers.values():
        assert world.generate("--target", address)["token_ids"] == answer["token_ids"]
    assert len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert answer["timeline"]["transfer_bytes"] > 0
    assert {answer["timeline"]["prefill_worker"], answer["timeline"]["decode_worker"]} == {"prefill-0", "decode-0"}

    second = world.up("--detach")
    assert second.returncode == 1
    assert f"already running (pid {owner})" in second.stderr

    lost = {name: world.member(name) for name in ("decode-0", "prefill-0", "router-1")}
    for member in lost.values():
        os.kill(member["pid"], signal.SIGKILL)

    def replaced() -> bool:
        members = [world.member(name) for name in lost]
        return all(
            member["state"] == "ready" and member["incarnation"] != lost[member["name"]]["incarnation"]
            for member in members
        )

    until(replaced, "all replaced", START_SECONDS)
    until(lambda: world.call("generate", PROMPT, "--max-tokens", "1").returncode == 0, "serving again")
    assert world.generate()["token_ids"] == answer["token_ids"]

    says = ray_says(world.remembered()["ray_address"], dashboard=True)
    assert sorted(says["actors"]) == ["decode-0", "kvrelay-supervisor", "prefill-0", "router-0", "router-1"]
    assert {"prefill-0 (prefill, rank 0, gpu none)", "router-0 (router)"} <= set(says["reprs"])
    until(lambda: visible(says["metrics"]) >= METRICS, f"metrics: {METRICS - visible(says['metrics'])}")

    assert len(started_by(world)) > 5
    down = world.call("down", seconds=STOP_SECONDS)
    assert down.returncode == 0, down.stderr + world.log()
    assert started_by(world) == []
    assert shared_memory() <= before
    assert not (world.folder / "state" / "cluster.json").exists()
    assert world.call("status").returncode == 1


def test_a_killed_supervisor_is_restarted_and_finds_its_members_while_streams_go_on(world: World) -> None:
    config = world.folder / "kvrelay.yaml"
    config.write_text("ray: {include_dashboard: false}\ndrain_seconds: 2\n")
    up = world.up("--detach", "--config", str(config))
    assert up.returncode == 0, up.stderr + world.log()
    before = world.json("status")
    address = world.remembered()["supervisor"]
    answer = world.generate()["token_ids"]
    stream = subprocess.Popen(
        [KVRELAY, "generate", PROMPT, "--temperature", "0", "--max-tokens", "900", "--ignore-eos", "--json"],
        env=world.environment,
        stdout=subprocess.PIPE,
        text=True,
    )

    def supervisors() -> list[Process]:
        return [process for process in started_by(world) if re.search(rb"ray::\w*-?[Ss]upervisor", title(process))]

    for _ in range(2):
        (killed,) = until(supervisors, "the supervisor's process")
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda killed=killed: killed not in supervisors(), "it has ended")
        assert world.call("status").returncode in (0, 3)
        assert world.generate("--target", before["router"])["token_ids"] == answer, "served without it"
        until(lambda: world.call("status").returncode == 0, "it is back", START_SECONDS)
    after = world.json("status")
    assert [(worker["pid"], worker["incarnation"], worker["generation"]) for worker in after["workers"]] == [
        (worker["pid"], worker["incarnation"], worker["generation"]) for worker in before["workers"]
    ], "no doubles"
    assert after["router"] == before["router"]
    assert world.remembered()["supervisor"] == address
    output, _ = stream.communicate(timeout=START_SECONDS)
    assert stream.returncode == 0
    assert json.loads(output)["usage"]["completion_tokens"] == 900

    # A worker that was adopted is watched as before.
    lost = world.member("decode-0")
    os.kill(lost["pid"], signal.SIGKILL)
    until(
        lambda: (worker := world.member("decode-0"))["state"] == "ready" and worker["generation"] > lost["generation"],
        "replaced",
        START_SECONDS,
    )
    assert find(world.remembered()["pid"]) is not None, "`kvrelay up` goes on watching"
    down = world.call("down", seconds=STOP_SECONDS)
    assert down.returncode == 0, down.stderr + world.log()
    assert started_by(world) == []


def title(process: Process) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return b""


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


def visible(addresses: list[str]) -> set[str]:
    """The names of kvrelay's metrics that Prometheus sees on these nodes."""
    names: set[str] = set()
    for address in addresses:
        with urllib.request.urlopen(address, timeout=SECONDS) as response:
            names |= set(re.findall(r"^(ray_kvrelay_\w+)\{", response.read().decode(), re.MULTILINE))
    return names


@pytest.mark.slow
def test_a_mistake_that_only_a_worker_can_find_is_one_line_and_leaves_nothing(world: World) -> None:
    config = world.folder / "kvrelay.yaml"
    config.write_text("engine: {kv_memory_bytes: 1000}\nray: {include_dashboard: false}\n")
    up = world.up("--detach", "--config", str(config))
    assert up.returncode == 2, up.stderr + world.log()
    assert {line.partition(": ")[0] for line in up.stderr.splitlines()} == {"kvrelay"}
    assert re.search(r"(prefill|decode)-0: .*kv_memory_bytes is 1000", up.stderr)
    assert started_by(world) == []
    assert world.call("status").returncode == 1


def test_ctrl_c_ends_a_cluster_in_the_foreground(world: World) -> None:
    config = world.folder / "kvrelay.yaml"
    config.write_text("router: {grpc_port: 0, http_port: 0}\nray: {include_dashboard: false}\n")
    process = subprocess.Popen(
        [sys.executable, "-c", FOREGROUND, KVRELAY, "up", "--colocated", "1", "--config", str(config)],
        env=world.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("kvrelay is ready" in line for line in lines)
        assert world.generate()["timeline"]["transfer_bytes"] == 0, "co-located: there is no hand-off"
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_SECONDS) == 0
        assert started_by(world) == []
        assert world.call("status").returncode == 1
    finally:
        process.kill()
        process.communicate()


FOREGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job ignores, and so would its children
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def shared_ray() -> Iterator[str]:
    """A Ray cluster that kvrelay didn't start; host:port."""
    ports = free_ports(3)
    # Not in pytest's folder: the path of Ray's sockets may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvr", ignore_cleanup_errors=True) as folder:
        options = {
            "port": ports[0],
            "ray-client-server-port": ports[1],
            "dashboard-agent-listen-port": ports[2],
            "include-dashboard": "false",
            "num-cpus": 4,
            "temp-dir": folder,
        }
        process = subprocess.Popen(
            [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--disable-usage-stats"]
            + [f"--{name}={value}" for name, value in options.items()],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            until(lambda: connects(ports[0]), "Ray is there", START_SECONDS)
            yield f"127.0.0.1:{ports[0]}"
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def free_ports(count: int) -> list[int]:
    """Ports above those that Ray gives its workers."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.slow
def test_a_cluster_left_on_a_shared_ray_cluster_is_found_again_and_ended(world: World, shared_ray: str) -> None:
    up = world.up("--address", shared_ray, "--detach")
    assert up.returncode == 0, up.stderr
    assert world.remembered()["pid"] is None
    assert started_by(world) == [], "the driver has left"
    answer = world.generate()
    assert answer["timeline"]["transfer_bytes"] > 0

    stranger = World(world.folder / "stranger")
    refused = stranger.up("--address", shared_ray)
    assert refused.returncode == 1
    assert "ray.namespace kvrelay: a kvrelay cluster is running there already" in refused.stderr
    assert world.generate()["token_ids"] == answer["token_ids"]

    remembered = world.remembered()
    down = world.call("down", seconds=STOP_SECONDS)
    assert down.returncode == 0, down.stderr
    says = ray_says(remembered["ray_address"], dashboard=False)
    assert (says["actors"], says["groups"]) == ([], [])
    assert world.call("status").returncode == 1
