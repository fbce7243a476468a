"""`kvrelay up` in the foreground, each of whose processes can be killed or frozen, and what becomes of the cluster."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.client import Client, KvrelayError
from kvrelay.cluster.processes.processes import Process, alive, find
from support.processes import free_port, wait_until
from support.ray_commands import KVRELAY, START_SECONDS, World, cluster_processes

SERVING_SECONDS = 30.0
"""Seconds from a death until the cluster serves again, if `up` lives."""
EXIT_SECONDS = 10.0
"""Seconds from a death until `up` has ended, if it does."""
FREEZE_SECONDS = 3.5
"""Seconds by which a cluster may take longer to serve again after a freeze than after a kill."""
CALM_SECONDS = 10.0
"""Seconds without a failed probe after which the cluster counts as serving."""
MOST_SECONDS = 60.0
"""Seconds for which a cluster that doesn't serve is watched."""
PROBE_SECONDS, EVERY_SECONDS = 2.0, 0.2
READY_SECONDS = 60.0
START_TRIES = 3
CONFIG = """\
drain_seconds: 1
model: {dtype: float32}
engine: {kv_memory_bytes: 33554432, prefix_cache: false}
"""
"""Configuration in float32 and without a prefix cache, so that a token doesn't depend on what else is in its batch."""


@dataclass
class Fate:
    """The fate of the cluster after one of its processes was killed or frozen."""

    victim: str
    signal: str
    outage: float
    """Seconds from the signal, or from waking, until all probes were answered; infinite: never."""
    exited: float | None
    """Seconds until `up` had ended; None: it lives."""
    code: int | None
    """Exit code of `up`."""
    left: int = 0
    """Processes of the cluster that are left after the end of `up`."""

    def holds(self) -> bool:
        """Whether it serves again in time, or `up` has ended in time, with an error and with all of its processes."""
        if self.exited is not None:
            return self.exited <= EXIT_SECONDS and self.code != 0 and not self.left
        return self.outage <= SERVING_SECONDS

    def __str__(self) -> str:
        if self.exited is not None:
            return f"`up` ended with {self.code} after {self.exited:.1f} s, {self.left} processes left"
        return f"serves after {self.outage:.1f} s"


class RayDidNotStart(Exception):
    """`up` ended because Ray gave up its start."""


class Foreground(World):
    """A cluster whose `kvrelay up` is a child of this process; its ports stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ports = free_port(), free_port()
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of `up`."""
        if self._up is None:
            raise RuntimeError("the cluster was not started")
        return self._up

    def start(self) -> None:
        """Returns when it is ready. Ray gives up its own start on a busy machine, so there are some tries."""
        for _ in range(START_TRIES - 1):
            with suppress(RayDidNotStart):
                return self._start()
        return self._start()

    def _start(self) -> None:
        config = self.folder / "kvrelay.yaml"
        config.write_text(CONFIG)
        ports = ("--grpc-port", str(self.ports[0]), "--http-port", str(self.ports[1]))
        self.output = self.folder / "up.txt"
        with self.output.open("wb") as output:
            self._up = subprocess.Popen(
                [KVRELAY, "up", *ports, "--config", str(config)],
                env=self.environment | {"COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

        def ready() -> bool:
            if self.process.poll() is not None:
                said = self.output.read_text()[-3000:]
                kind = RayDidNotStart if "Ray did not start" in said else AssertionError
                raise kind(f"`up` ended with {self.process.returncode}: {said}")
            return "kvrelay is ready" in self.output.read_text()

        wait_until(ready, lambda: f"ready: {self.output.read_text()[-3000:]}", START_SECONDS, 0.2)
        wait_until(self.answers, "it answers", READY_SECONDS, 0.2)

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def answers(self) -> bool:
        """Whether a new client is served."""
        with Client(self.router, timeout=PROBE_SECONDS, resume_seconds=0.0) as client:
            try:
                return bool(client.complete([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids)
            except KvrelayError:
                return False

    def whole(self) -> bool:
        """Whether `up` lives and all members are ready."""
        if self.process.poll() is not None:
            return False
        try:
            return bool(self.status()["ready"]) and self.answers()
        except (OSError, ValueError, KeyError):
            return False

    def watch(self, victim: str, sent: str) -> Fate:
        """Probes the cluster until it has served for CALM_SECONDS, `up` has ended, or MOST_SECONDS are over."""
        began = time.monotonic()
        served, failed = began, False
        while (now := time.monotonic()) - began < MOST_SECONDS:
            if self.process.poll() is not None:
                exited = time.monotonic() - began
                with suppress(AssertionError):
                    wait_until(lambda: not self.processes(), "all are gone", EXIT_SECONDS - exited, 0.1)
                return Fate(victim, sent, float("inf"), exited, self.process.returncode, len(self.processes()))
            if not self.answers():
                failed, served = True, float("inf")
            elif served == float("inf"):
                served = time.monotonic()
            if served < float("inf") and now - served > CALM_SECONDS:
                return Fate(victim, sent, served - began if failed else 0.0, None, None)
            time.sleep(EVERY_SECONDS)
        return Fate(victim, sent, served - began, None, None)

    @property
    def kinds(self) -> dict[str, list[int]]:
        """The cluster's processes by kind; each worker is a kind of its own."""
        found = cluster_processes(self.folder / "state")
        with suppress(OSError, ValueError, KeyError):
            for worker in self.status()["workers"]:
                if worker["pid"] in found.get("worker", ()):
                    found.setdefault(f"{worker['role']} worker", []).append(worker["pid"])
                    found["worker"].remove(worker["pid"])
        return {kind: pids for kind, pids in found.items() if pids}

    def kill(self, victim: str) -> Fate:
        """Kills one process of this kind."""
        pid = self.kinds[victim][0]
        os.kill(pid, signal.SIGKILL)
        return self.watch(victim, "SIGKILL")

    def freeze(self, victim: str) -> Fate:
        """Freezes one process of this kind until the cluster serves without it, and wakes it then; the worse of the
        two fates."""
        frozen = find(self.kinds[victim][0])
        if frozen is None:
            raise RuntimeError(f"{victim} has just ended")
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            fate = self.watch(victim, "SIGSTOP")
        finally:
            woken = _wake(frozen)
        if woken and fate.exited is None:
            after = self.watch(victim, "SIGSTOP")
            return max(fate, after, key=lambda each: (each.exited is not None, each.outage))
        return fate

    def close(self) -> None:
        """Ends the cluster; what is left of it is killed."""
        if self._up is not None:
            self._up.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._up.wait(READY_SECONDS)
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self._up is not None:
            self._up.wait(READY_SECONDS)

    def made_whole(self, victim: str) -> None:
        """Starts the cluster again unless all of it is there, and a process of this kind, too: Ray doesn't replace all
        of its own."""
        with suppress(AssertionError):
            if self.process.poll() is None and victim in self.kinds:
                wait_until(self.whole, "whole", READY_SECONDS, 0.5)
                return
        self.close()
        (self.folder / "state" / "cluster.json").unlink(missing_ok=True)
        self.start()


def _wake(process: Process) -> bool:
    """Wakes a process; returns whether it was still there."""
    if not alive(process):
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
        return True
    return False


@contextmanager
def foreground(folder: Path) -> Iterator[Foreground]:
    """A ready cluster; nothing of it is left at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    world = Foreground(folder)
    try:
        world.start()
        yield world
    finally:
        world.close()
