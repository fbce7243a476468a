"""The command line with a state folder of its own, as a user of a Ray cluster runs it; and what Ray says."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvrelay.client import Client
from kvrelay.cluster.asking.status import as_json, get_status
from kvrelay.cluster.processes.processes import Process, alive, title
from kvrelay.cluster.state import ClusterState
from support.processes import free_port

KVRELAY = str(Path(sys.executable).parent / "kvrelay")
START_SECONDS = 240.0
STOP_SECONDS = 120.0
SECONDS = 60.0
PROMPT = "def __init__(self, "
TOKENS = 12
PORTS = ("--grpc-port", "0", "--http-port", "0")
"""Options of `kvrelay up` for free ports."""
# They would lead Ray's commands and State API to another cluster, whatever address is given.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
} | {"RAY_worker_niceness": "0"}
RAY_SAYS = """
import json, sys
from kvrelay.cluster.ray import environment as rayenv
rayenv.prepare(local=sys.argv[2] == "dashboard")
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

    def up(self, *arguments: str) -> None:
        """Starts a detached cluster."""
        done = self.call("up", "--detach", *PORTS, *arguments, seconds=START_SECONDS)
        assert done.returncode == 0, done.stderr + self.log()
        assert "kvrelay is ready" in done.stdout

    def down(self) -> None:
        """Ends the cluster; nothing of it is left."""
        done = self.call("down", seconds=STOP_SECONDS)
        assert done.returncode == 0, done.stderr + self.log()
        assert self.processes() == []

    def status(self) -> dict[str, Any]:
        """The object that `kvrelay status --json` prints, made without a process of its own."""
        return as_json(get_status(ClusterState(**self.remembered())))

    def member(self, name: str) -> dict[str, Any]:
        status = self.status()
        return next((each for each in status["workers"] + status["routers"] if each["name"] == name), {})

    def names(self, role: str) -> list[str]:
        """The workers with a role, in order."""
        return sorted(worker["name"] for worker in self.status()["workers"] if worker["role"] == role)

    def generate(self, target: str = "") -> tuple[int, ...]:
        """Greedy tokens, of these routers or of all."""
        with Client(target or self.remembered()["router"], timeout=START_SECONDS) as client:
            return client.complete(PROMPT, temperature=0, max_tokens=TOKENS).token_ids

    def remembered(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state" / "cluster.json").read_text()))

    def log(self) -> str:
        path = self.folder / "state" / "up.log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[Process]:
        """Every process of the world's cluster."""
        return processes_of(Path(self.environment["KVRELAY_STATE_DIR"]))


KINDS = {
    "up": r"kvrelay\0up|kvrelay\.cli\0up",
    "driver": r"kvrelay\.cluster\.up\.driver",
    "gcs_server": r"/gcs_server\0",
    "raylet": r"/raylet\0",
    "monitor": r"autoscaler/_private/monitor\.py",
    "dashboard": r"dashboard/dashboard\.py",
    "dashboard_part": r"ray-dashboard-|multiprocessing\.(resource_tracker|forkserver)",
    "log_monitor": r"_private/log_monitor\.py",
    "dashboard_agent": r"ray::DashboardAgent|dashboard/agent\.py",
    "runtime_env_agent": r"ray::RuntimeEnvAgent|runtime_env/agent/main\.py",
    "supervisor": r"ray::(SupervisorActor|kvrelay-supervisor)",
    "router": r"ray::(RouterActor|router-)",
    "worker": r"ray::(WorkerActor|worker-)",
    "idle": r"ray::IDLE|default_worker\.py",
}
"""Kinds of a cluster's processes, by a pattern of the command line. The raylet's has those of its agents, so the order
counts."""


def processes_of(state: Path) -> list[Process]:
    """Every process with this state folder in its environment, and their descendants: some of Ray's overwrite their
    environment with their title."""
    own = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("KVRELAY_STATE_DIR") == str(state):
                own |= {process, *process.children(recursive=True)}
    return [process for process in own if alive(process)]


def cluster_processes(state: Path) -> dict[str, list[int]]:
    """The pids of a running `kvrelay up` cluster, by kind (KINDS); kinds without a process are left out.

    Args:
        state: the cluster's state folder, KVRELAY_STATE_DIR of its `kvrelay up`.
    """
    kinds: dict[str, list[int]] = {}
    for process in processes_of(state):
        line = title(process)
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, line)), "other")
        kinds.setdefault(kind, []).append(process.pid)
    return kinds


def ray_says(address: str, *, dashboard: bool) -> Any:
    """Ray's view of a cluster, from a driver in a process of its own.

    Args:
        dashboard: whether it is a cluster of `kvrelay up`'s own Ray, which has a dashboard.
    """
    command = [sys.executable, "-c", RAY_SAYS, address, "dashboard" if dashboard else "-"]
    output = subprocess.check_output(command, env=ENVIRONMENT, timeout=START_SECONDS, text=True)
    return json.loads(output.splitlines()[-1])


def start_head(folder: Path, port: int, *flags: str) -> list[str]:
    """The command that starts a Ray cluster's head, without Ray's dashboard.

    Args:
        folder: of its sockets, whose path may have 107 bytes: not pytest's.
    """
    options = {"port": port, "include-dashboard": "false", "num-cpus": 4, "temp-dir": folder}
    # Ray waits for 15 s only for agents that choose their own ports, which a busy machine starts more slowly.
    agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
    options |= {f"{name}-port": free_port() for name in (*agents, "ray-client-server")}
    ray = str(Path(KVRELAY).parent / "ray")
    return [ray, "start", "--head", *flags, *(f"--{name}={value}" for name, value in options.items())]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "ray" in path.name or "plasma" in path.name}


def visible(addresses: list[str]) -> set[str]:
    """The names of kvrelay's metrics that Prometheus sees on these nodes."""
    names: set[str] = set()
    for address in addresses:
        with urllib.request.urlopen(address, timeout=SECONDS) as response:
            names |= set(re.findall(r"^(ray_kvrelay_\w+)\{", response.read().decode(), re.MULTILINE))
    return names
