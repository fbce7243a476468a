"""The cluster that `siege.py` lays siege to: plain processes that a supervisor keeps, without Ray."""

import hashlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import psutil
import siege_router

from kvrelay.client import Client, KvrelayError
from kvrelay.router.doors.sockets import raise_limit
from support.hash_worker import MODULE, STEP_SECONDS, WORKER_LAYOUT
from support.processes import START_SECONDS, free_port, wait_until
from support.supervised import Supervised, all_ready, supervised

WITNESS, ATTACKER = "witness", "attacker"
"""The two tenants; each name is the key, too."""
HASH_STEP = 0.005
"""Seconds of a step of the hash model at least."""
IDLE_SECONDS = 30.0
MIB = 2**20


def key_lines(*tenants: str) -> str:
    """A file of keys: each tenant's key is its name."""
    return "".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in tenants)


@dataclass
class Besieged:
    """A running cluster of a prefill worker, a decode worker and a router."""

    cluster: Supervised
    grpc: str
    """Address of the router's gRPC, as host:port."""
    http: str
    """Address of the router's HTTP, as host:port."""
    keys: Path | None
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of all members when the siege began."""

    @property
    def reach(self) -> dict[str, Any]:
        """Addresses with which a process of `siege_load.py` calls the router; its key is not among them."""
        return {"grpc": self.grpc, "http": self.http, "authority": None}

    @property
    def router(self) -> psutil.Process:
        return psutil.Process(self.pids["router-0"])

    def dead(self) -> list[str]:
        """The members whose processes aren't those from before the siege."""
        return [f"{name}: {self.end_of(name)}" for name, pid in self.pids.items() if self.cluster.pid(name) != pid] + [
            f"{name}: {self.end_of(name)}" for name, pid in self.pids.items() if not alive(pid)
        ]

    def end_of(self, name: str) -> str:
        """The last line of the supervisor's log about a member that ended."""
        supervisor = sorted(self.cluster.folder.glob("supervisor-*.log"))[-1].read_text().splitlines()
        said = [line for line in supervisor if f'"{name}"' in line]
        return said[-1][:300] if said else "its process has ended"

    def holds(self, since: float) -> list[float]:
        """Seconds for which each long turn held the router's event loop, since a monotonic time."""
        path = self.cluster.folder / "router-0.holds"
        pairs = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [float(pair[1]) for pair in pairs if len(pair) == 2 and float(pair[0]) >= since]

    def running(self) -> int:
        """Requests that workers compute, as they report."""
        return sum(each.load.requests.running for each in self.cluster.status().members)

    def held_blocks(self) -> dict[str, int]:
        """Workers that hold or miss blocks without any request, after up to IDLE_SECONDS for requests to end."""

        def held() -> dict[str, int]:
            loads = {each.member.name: each.load.blocks for each in self.cluster.status().members}
            return {
                name: blocks.total - blocks.free - blocks.cached
                for name, blocks in loads.items()
                if blocks.held or blocks.free + blocks.cached != blocks.total
            }

        deadline = time.monotonic() + IDLE_SECONDS
        while (found := held()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@contextmanager
def besieged(
    folder: Path,
    *,
    model: str = "hash",
    loop: str = "uvloop",
    kv_bytes: int = 64 * MIB,
    keys: bool = True,
    **router: Any,
) -> Iterator[Besieged]:
    """A ready cluster; nothing of it is left at the end.

    Args:
        model: `hash`, or `pico` with the product's own workers.
        loop: the router's event loop: asyncio or uvloop.
        kv_bytes: memory for KV of each worker; a token of the hash model takes 1 KiB.
        keys: whether callers need a key: WITNESS, or ATTACKER.
        router: further options of the router; and `caller`, a key with which to ask whether it serves.
    """
    raise_limit()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    grpc_port = free_port()
    http_port = next(port for port in iter(free_port, None) if port != grpc_port)
    options: dict[str, Any] = {"model": "pico", "grpc_port": grpc_port, "http_port": http_port, **router}
    key_file = None
    caller = options.pop("caller", WITNESS if keys else None)
    if keys:
        key_file = folder / "api_keys"
        key_file.write_text(key_lines(WITNESS, ATTACKER))
        options["api_keys"] = str(key_file)
    # Without a prefix cache, so that a real model's tokens don't depend on what was asked before.
    engine: dict[str, Any] = {"kv_memory_bytes": kv_bytes, "threads": 1, "prefix_cache": model == "hash"}
    if model == "hash":
        engine |= {"block_size": WORKER_LAYOUT.block_size, "max_batch_tokens": 256}
    members: dict[str, dict[str, Any]] = {
        f"{role}-0": {
            "module": MODULE if model == "hash" else f"kvrelay.{role}_worker",
            "options": {"role": role, "model": "pico", "dtype": "float32", "engine": engine},
        }
        for role in ("prefill", "decode")
    }
    members["router-0"] = {"module": "siege_router", "options": options}
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        siege_router.LOOP: loop,
        STEP_SECONDS: str(HASH_STEP),
    }
    with mock.patch.dict(os.environ, environment), supervised(folder, members) as cluster:
        all_ready(cluster)
        found = Besieged(cluster, f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}", key_file)
        found.pids = cluster.pids()

        def answered() -> bool:
            with Client(found.grpc, timeout=10, api_key=caller) as client:
                try:
                    return bool(client.complete([5, 6], max_tokens=2).token_ids)
                except KvrelayError:
                    return False

        wait_until(answered, lambda: f"the router answers: {cluster.log()[-4000:]}", START_SECONDS, 0.1)
        (folder / "pids.json").write_text(json.dumps(found.pids))
        yield found


def send(place: Besieged, path: str, data: bytes, key: str = ATTACKER) -> str:
    """Sends one request; its status."""
    if "Service/" in path:
        with grpc.insecure_channel(place.grpc) as channel:
            try:
                call = channel.unary_stream(path)(data, timeout=30, metadata=(("authorization", f"Bearer {key}"),))
                list(call)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]  # every RpcError of a call has it
            return "OK"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{place.http}{path}", data or None, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return str(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return str(error.code)
