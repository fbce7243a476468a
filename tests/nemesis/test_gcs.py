"""Ray's GCS is killed under load: requests are served without it; with Redis it comes back and control goes on."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster.processes import Process, find
from nemesis.load import Stream, ask, draw
from support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]

BIN = Path(sys.executable).parent
MARK = "NEMESIS_RAY"
KINDS = 6
"""Requests that are asked again and again; their first answers are the right ones."""
EVERY_SECONDS = 0.4
BEFORE, WITHOUT, AFTER = 4.0, 20.0, 10.0
"""Seconds of load: until the GCS is killed, without it, and after it is back."""
START_SECONDS = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class RayCluster:
    """A Ray head with kvrelay on it. Every process of it has MARK in its environment."""

    folder: Path
    redis: bool
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hidden = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {MARK: str(self.folder), "KVRELAY_STATE_DIR": str(self.folder / "state")}
        self.port = free_port()

    def start(self) -> None:
        if self.redis:
            port = free_port()
            subprocess.Popen(
                ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"],
                env=self.environment,
                stdout=subprocess.DEVNULL,
                cwd=self.folder,
            )
            self.environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        options = {"port": self.port, "include-dashboard": "false", "num-cpus": 4, "temp-dir": self.folder / "ray"}
        options |= {"ray-client-server-port": free_port(), "dashboard-agent-listen-port": free_port()}
        self.call("ray", "start", "--head", *(f"--{name}={value}" for name, value in options.items()))
        config = self.folder / "kvrelay.yaml"
        # In float32, so that a token doesn't depend on what else is in its batch.
        engine = "engine: {kv_memory_bytes: 33554432, prefix_cache: false}"
        config.write_text(f"drain_seconds: 2\nmodel: {{dtype: float32}}\n{engine}\n")
        self.call(
            "kvrelay",
            "up",
            "--grpc-port",
            "0",
            "--http-port",
            "0",
            "--address",
            f"127.0.0.1:{self.port}",
            "--detach",
            "--config",
            str(config),
        )

    def call(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [BIN / program, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.call("kvrelay", "status", "--json")))

    def worker(self, name: str) -> dict[str, Any]:
        return next(worker for worker in self.status()["workers"] if worker["name"] == name)

    def processes(self) -> list[Process]:
        mark, found = f"{MARK}={self.folder}".encode(), []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(find(int(path.name)))
        return [process for process in found if process is not None and process.alive]

    def gcs(self) -> tuple[int, list[str], dict[str, str]]:
        """Pid, command line and environment of the GCS."""
        for process in self.processes():
            folder = Path(f"/proc/{process.pid}")
            command, variables = (
                (folder / file).read_bytes().decode().split("\0")[:-1] for file in ("cmdline", "environ")
            )
            if command and command[0].endswith("gcs_server"):
                return process.pid, command, dict(entry.split("=", 1) for entry in variables)
        raise AssertionError("there is no gcs_server")

    def log(self) -> str:
        """The last lines of the supervisor's log."""
        logs = (self.folder / "ray").glob("session_*/logs/worker-*.err")
        return next((text[-3000:] for path in logs if "will be replaced" in (text := path.read_text())), "no log")

    def end(self) -> None:
        """Kills every process of it."""
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.1)


@pytest.fixture(params=[True, False], ids=["redis", "no redis"])
def ray(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    if request.param and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    # Not in pytest's folder: the path of Ray's sockets may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvr", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder), request.param)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


async def load(address: str, over: asyncio.Event) -> list[Stream]:
    """Open-loop load of KINDS requests until `over`; the first streams are those without a fault."""
    async with AsyncClient(address) as client:
        streams = [draw(f"kind {number}") for number in range(KINDS)]
        await asyncio.gather(*(ask(client, stream) for stream in streams))
        running: list[asyncio.Task[None]] = []
        while not over.is_set():
            streams.append(draw(f"kind {len(streams) % KINDS}"))
            running.append(asyncio.create_task(ask(client, streams[-1])))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), EVERY_SECONDS)
        await asyncio.gather(*running)
    return streams


def test_requests_are_served_while_the_gcs_is_gone(ray: RayCluster) -> None:
    router = str(ray.status()["router"])
    pid, command, variables = ray.gcs()
    nothing = subprocess.DEVNULL

    async def run() -> list[Stream]:
        over = asyncio.Event()
        running = asyncio.create_task(load(router, over))
        await asyncio.sleep(BEFORE)
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(WITHOUT)
        if ray.redis:
            await asyncio.create_subprocess_exec(*command, env=variables, stdout=nothing, stderr=nothing)
            await asyncio.sleep(AFTER)
        over.set()
        return await running

    before = {worker["name"]: worker["incarnation"] for worker in ray.status()["workers"]}
    streams = asyncio.run(run())
    right = {stream.name: stream.tokens for stream in streams[:KINDS]}
    assert len(streams) > KINDS + (BEFORE + WITHOUT) / EVERY_SECONDS / 2
    for stream in streams:
        assert (stream.error, stream.retries) == ("", 0)
        assert stream.tokens == right[stream.name]
        assert len(stream.tokens) == stream.count
    assert {worker["name"]: worker["incarnation"] for worker in ray.status()["workers"]} == before
    if ray.redis:
        lost = ray.worker("decode-0")
        os.kill(lost["pid"], signal.SIGKILL)

        def replaced() -> bool:
            worker = ray.worker("decode-0")
            return bool(worker["state"] == "ready" and worker["incarnation"] != lost["incarnation"])

        wait_until(replaced, lambda: f"the lost worker is replaced: {ray.log()}", START_SECONDS)
