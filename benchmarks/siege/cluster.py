"""The cluster that `siege.py` lays siege to: a prefill worker, a decode worker and a router, without Ray."""

import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from clusters import plain_cluster, wait_answers

from kvrelay.cluster.processes.processes import alive, find
from kvrelay.router.doors.sockets import raise_limit
from siege.router import LOOP
from support.hash_worker import STEP_SECONDS, WORKER_LAYOUT
from support.processes import free_port, wait_until
from support.router_fakes import key_file
from support.supervised import Supervised, hash_members

WITNESS, ATTACKER = "witness", "attacker"
"""The two tenants; each name is the key, too."""
HASH_STEP = 0.005
"""Seconds of a step of the hash model at least."""
IDLE_SECONDS = 30.0
MIB = 2**20


@dataclass
class Besieged:
    """A running cluster."""

    cluster: Supervised
    grpc: str
    """Address of the router's gRPC, as host:port."""
    http: str
    """Address of the router's HTTP, as host:port."""
    pids: dict[str, int]
    """Process ids of all members when the siege began."""

    @property
    def reach(self) -> dict[str, Any]:
        """Addresses with which a process of `load.py` calls the router; its key is not among them."""
        return {"grpc": self.grpc, "http": self.http, "authority": None}

    def dead(self) -> list[str]:
        """The members whose processes aren't those from before the siege, each with the last line of the supervisor's
        log about it."""
        supervisor = sorted(self.cluster.folder.glob("supervisor-*.log"))[-1].read_text().splitlines()
        found = []
        for name, pid in self.pids.items():
            process = find(pid)
            if self.cluster.pid(name) != pid or process is None or not alive(process):
                said = [line for line in supervisor if f'"{name}"' in line]
                found.append(f"{name}: {said[-1][:300] if said else 'its process has ended'}")
        return found

    def holds(self, since: float) -> list[float]:
        """Seconds for which each long turn held the router's event loop, since a monotonic time."""
        path = self.cluster.folder / "router-0.holds"
        pairs = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [float(pair[1]) for pair in pairs if len(pair) == 2 and float(pair[0]) >= since]

    def held_blocks(self) -> dict[str, int]:
        """Workers that hold or miss blocks without any request, after up to IDLE_SECONDS for requests to end."""

        def held() -> dict[str, int]:
            loads = {each.member.name: each.load.blocks for each in self.cluster.status().members}
            return {
                name: blocks.total - blocks.free - blocks.cached
                for name, blocks in loads.items()
                if blocks.held or blocks.free + blocks.cached != blocks.total
            }

        with suppress(AssertionError):
            wait_until(lambda: not held(), "no block is held", IDLE_SECONDS)
        return held()


@contextmanager
def besieged(
    folder: Path,
    *,
    model: str = "hash",
    loop: str = "uvloop",
    kv_bytes: int = 64 * MIB,
    **router: Any,
) -> Iterator[Besieged]:
    """A ready cluster; nothing of it is left at the end.

    Args:
        model: `hash`, or `pico` with the product's own workers.
        loop: the router's event loop: asyncio or uvloop.
        kv_bytes: memory for KV of each worker; a token of the hash model takes 1 KiB.
        router: further options of the router. By default callers need a key: WITNESS, or ATTACKER.
    """
    raise_limit()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    keys = key_file(folder, **{WITNESS: "", ATTACKER: ""})
    grpc_port = free_port()
    http_port = next(port for port in iter(free_port, None) if port != grpc_port)
    # Without a prefix cache, so that a real model's tokens don't depend on what was asked before.
    engine: dict[str, Any] = {"kv_memory_bytes": kv_bytes, "threads": 1, "prefix_cache": model == "hash"}
    if model == "hash":
        engine |= {"block_size": WORKER_LAYOUT.block_size, "max_batch_tokens": 256}
    members = hash_members(engine=engine)
    if model != "hash":
        for role in ("prefill", "decode"):
            members[f"{role}-0"]["module"] = f"kvrelay.{role}_worker"
    options = {"model": "pico", "grpc_port": grpc_port, "http_port": http_port, "api_keys": keys}
    members["router-0"] = {"module": "siege.router", "options": options | router}
    variables = {LOOP: loop, STEP_SECONDS: str(HASH_STEP)}
    with plain_cluster(folder, members, variables) as cluster:
        found = Besieged(cluster, f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}", cluster.pids())
        wait_answers(found.grpc, cluster, WITNESS)
        yield found


def send(place: Besieged, path: str, data: bytes, key: str = ATTACKER) -> str:
    """Sends one request; returns its status."""
    if "Service/" not in path:
        return str(web(place, path, data, key)[0])
    with grpc.insecure_channel(place.grpc) as channel:
        try:
            list(channel.unary_stream(path)(data, timeout=30, metadata=(("authorization", f"Bearer {key}"),)))
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]  # every RpcError of a call has it
        return "OK"


def web(place: Besieged, path: str, data: bytes, key: str, size: int | None = None) -> tuple[int, bytes]:
    """Sends one HTTP request; its status, and the answer or, within 10 s, the first `size` bytes of it."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{place.http}{path}", data or None, headers)
    try:
        with urllib.request.urlopen(request, timeout=30 if size is None else 10) as response:
            return response.status, response.read(size)
    except urllib.error.HTTPError as error:
        return error.code, error.read()
