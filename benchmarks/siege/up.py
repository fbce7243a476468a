"""The row of deaths: each process of a `kvrelay up` in the foreground, Ray's own too, is killed, or frozen, one at a
time."""

import subprocess
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from clusters import answers
from psutil import NoSuchProcess

from kvrelay.cluster.processes.processes import alive, find
from siege.witness import Given, Measure, Witness, at_most, none_of
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
KILL, FREEZE = "kill", "freeze"
CONFIG = """\
drain_seconds: 1
model: {dtype: float32}
engine: {kv_memory_bytes: 33554432, prefix_cache: false}
"""
"""Configuration in float32 and without a prefix cache, so that a token doesn't depend on what else is in its batch."""


@dataclass
class Fate:
    """The fate of the cluster after one of its processes was killed or frozen."""

    outage: float
    """Seconds from the signal, or from waking, until all probes were answered; infinite: never."""
    exited: float | None = None
    """Seconds until `up` had ended; None: it lives."""
    code: int | None = None
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

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ready(self) -> bool:
        return "kvrelay is ready" in self.said

    @property
    def said(self) -> str:
        """What `up` has printed so far."""
        return (self.folder / "up.txt").read_text()

    def start(self) -> None:
        """Returns when it is ready. Ray gives up its own start on a busy machine, so there are some tries."""
        config = self.folder / "kvrelay.yaml"
        config.write_text(CONFIG)
        ports = ("--grpc-port", str(self.ports[0]), "--http-port", str(self.ports[1]))
        for _ in range(START_TRIES):
            with (self.folder / "up.txt").open("wb") as output:
                self._up = subprocess.Popen(
                    [KVRELAY, "up", *ports, "--config", str(config)],
                    env=self.environment | {"COLUMNS": "200"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            wait_until(lambda: self.ready or self.ended, lambda: f"ready: {self.said[-3000:]}", START_SECONDS, 0.2)
            if self.ready:
                wait_until(self.answers, "it answers", READY_SECONDS, 0.2)
                return
            if "Ray did not start" not in self.said:
                break
        raise RuntimeError(f"`up` ended with {self.process.returncode}: {self.said[-3000:]}")

    @property
    def reach(self) -> dict[str, Any]:
        """As the witness needs it."""
        return {"grpc": f"127.0.0.1:{self.ports[0]}", "http": "", "authority": None}

    def answers(self) -> bool:
        """Whether a new client is served."""
        return answers(self.reach["grpc"], seconds=PROBE_SECONDS)

    def whole(self) -> bool:
        """Whether `up` lives and all members are ready."""
        if self.ended:
            return False
        try:
            return bool(self.status()["ready"]) and self.answers()
        except (OSError, ValueError, KeyError):
            return False

    def watch(self) -> Fate:
        """Probes the cluster until it has served for CALM_SECONDS, `up` has ended, or MOST_SECONDS are over."""
        began = time.monotonic()
        served, failed = began, False
        while (now := time.monotonic()) - began < MOST_SECONDS:
            if self.ended:
                exited = time.monotonic() - began
                with suppress(AssertionError):
                    wait_until(lambda: not self.processes(), "all are gone", EXIT_SECONDS - exited, 0.1)
                return Fate(float("inf"), exited, self.process.returncode, len(self.processes()))
            if not self.answers():
                failed, served = True, float("inf")
            elif served == float("inf"):
                served = time.monotonic()
            if served < float("inf") and now - served > CALM_SECONDS:
                return Fate(served - began if failed else 0.0)
            time.sleep(EVERY_SECONDS)
        return Fate(served - began)

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

    def hit(self, how: str, victim: str) -> Fate:
        """Kills one process of this kind; or freezes it until the cluster serves without it, and wakes it then: that is
        the worse of the two fates."""
        process = find(self.kinds[victim][0])
        if process is None:
            raise RuntimeError(f"{victim} has just ended")
        if how == KILL:
            process.kill()
            return self.watch()
        process.suspend()
        try:
            fate = self.watch()
        finally:
            if woken := alive(process):
                process.resume()
        if woken and fate.exited is None:
            return max(fate, self.watch(), key=lambda each: (each.exited is not None, each.outage))
        return fate

    def close(self) -> None:
        """Ends the cluster; what is left of it is killed."""
        if self._up is not None:
            self._up.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._up.wait(READY_SECONDS)
        for process in self.processes():
            with suppress(NoSuchProcess):
                process.kill()
        if self._up is not None:
            self._up.wait(READY_SECONDS)

    def made_whole(self, victim: str) -> None:
        """Starts the cluster again unless all of it is there, and a process of this kind, too: Ray doesn't replace all
        of its own."""
        with suppress(AssertionError):
            if not self.ended and victim in self.kinds:
                wait_until(self.whole, "whole", READY_SECONDS, 0.5)
                return
        self.close()
        (self.folder / "state" / "cluster.json").unlink(missing_ok=True)
        self.start()


def deaths(given: Given) -> list[Measure]:
    """`given.only` is a piece of "kill NAME" or "freeze NAME"."""
    fates: dict[tuple[str, str], Fate] = {}
    lost: list[str] = []
    given.folder.mkdir(parents=True, exist_ok=True)
    with closing(Foreground(given.folder)) as cluster:
        cluster.start()
        names = [*cluster.kinds]
        witness = Witness(cluster.reach, model="pico", rate=1.0)
        witness.alone(given.seconds)
        turns = [(how, name) for how in (KILL, FREEZE) for name in names if given.only in f"{how} {name}"]
        turns = [turn for turn in turns if turn != (FREEZE, "up")]
        with witness.beside() as seen:
            for how, name in turns:
                cluster.made_whole(name)
                if name not in cluster.kinds:
                    lost.append(f"{how} {name}")
                    continue
                fates[how, name] = cluster.hit(how, name)
                print(f"  {how} {name}: {fates[how, name]}", flush=True)
    asked = f"serves within {SERVING_SECONDS:g} s, or ends within {EXIT_SECONDS:g} s"
    measures = [
        Measure(f"{how} {name}", asked, str(fate), fate.holds(), vars(fate)) for (how, name), fate in fates.items()
    ]
    for (how, name), fate in fates.items():
        killed = fates.get((KILL, name))
        if how == FREEZE and killed is not None and fate.exited is None and killed.exited is None:
            more = fate.outage - killed.outage
            measures.append(at_most(f"freeze {name} against kill", more, FREEZE_SECONDS, "s longer"))
    failed = [stream["error"] for stream in seen if stream["error"]]
    return [
        *measures,
        none_of("processes that were not found again", lost),
        none_of("wrong tokens", witness.wrong(seen), streams=len(seen), failed=len(failed), errors=failed[:10]),
    ]
