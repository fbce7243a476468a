"""Runs the nemesis: load, faults one after another, the judge; prints and writes a report.

    python -m nemesis.run --seconds 3600 --seed 7 --out benchmarks/results/soak-2-cores.json

A cluster of two prefill workers, two decode workers and two routers is kept alive by its supervisor. The seed decides
which faults come in which order, their victims, and all requests; so a run can be replayed, as far as timing allows.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvrelay.internal.v1.supervisor_pb2 import GetStatusResponse
from nemesis.faults import FAULTS, Fault, Ground
from nemesis.load import Load, Stream
from nemesis.member import CLOCK_LIBRARY
from nemesis.report import Injected, Report, figures, machine, percentiles, reason_of
from support.chaos import Chaos
from support.detours import DESK, HOSTS
from support.faults import oracle_of_all
from support.hash_worker import STEP_SECONDS, WORKER_LAYOUT
from support.history import History, violations
from support.processes import free_port
from support.secrets import secrets_in
from support.supervised import Supervised, all_ready, supervised

ROUTERS = 2
RATE = 2.0
"""Requests per second."""
STEP = 0.02
"""Seconds of an engine's step at least."""
WARM_SECONDS = 5.0
PAUSE_SECONDS = (2.0, 6.0)
"""Seconds between the recovery from a fault and the next fault."""
LOOK_SECONDS = 2.0
"""Seconds for which a fault's effect is looked at, at least."""
PAIR_SHARE = 0.15
"""Share of injections that are two faults at a time."""
HEARTBEAT = {"suspect_seconds": 0.9, "dead_seconds": 3.0, "step_suspect_seconds": 0.9, "step_dead_seconds": 3.0}
FRAME_TIMEOUT_SECONDS = 1.5
DRAIN_SECONDS = 1.0
IDLE_SECONDS = 10.0


def members(ports: Sequence[tuple[int, int]], certificates: Path) -> dict[str, dict[str, Any]]:
    """The processes that the supervisor keeps; a router at each pair of ports, of gRPC and of HTTP."""
    engine = {
        "block_size": WORKER_LAYOUT.block_size,
        "max_batch_tokens": 128,
        "kv_memory_bytes": 8 * 2**20,
        "threads": 1,
    }
    transfer = {"frame_timeout_seconds": FRAME_TIMEOUT_SECONDS}
    common = {
        "model": "pico",
        "dtype": "float32",
        "engine": engine,
        "transfer": transfer,
        "drain_seconds": DRAIN_SECONDS,
    }
    found: dict[str, dict[str, Any]] = {
        f"{role}-{index}": {"module": "nemesis.member", "options": {"role": role, "host": HOSTS[role], **common}}
        for role in ("prefill", "decode")
        for index in range(2)
    }
    tls = {"tls_certificate": str(certificates / "router.crt"), "tls_key": str(certificates / "router.key")}
    for index, (grpc_port, http_port) in enumerate(ports):
        found[f"router-{index}"] = {
            "module": "nemesis.member",
            "options": {"model": "pico", "grpc_port": grpc_port, "http_port": http_port, **tls},
        }
    return found


@dataclass
class Nemesis:
    """One run."""

    ground: Ground
    report: Report
    rng: random.Random
    began: float = field(default_factory=time.monotonic)
    _stalls: list[float] = field(default_factory=list)
    _retries: Counter[str] = field(default_factory=Counter)
    """Failed attempts by request, as the routers' logs say."""
    _logs_read: Counter[str] = field(default_factory=Counter)
    """Bytes that were read of each router's log."""

    async def run(self, seconds: float) -> None:
        """Injects faults for so many seconds, then ends the load and looks at what is left."""
        ground, report = self.ground, self.report
        await asyncio.sleep(WARM_SECONDS)
        begin = self._figures()
        kinds: list[Fault] = []
        while time.monotonic() - self.began < seconds:
            count = 2 if self.rng.random() < PAIR_SHARE else 1
            while len(kinds) < count:
                kinds += self._usable()
            chosen, kinds = kinds[:count], kinds[count:]
            await self._inject(chosen)
            await asyncio.sleep(self.rng.uniform(*PAUSE_SECONDS))
        await ground.load.stop()
        self._judge(ground.load.take_ended())
        status = await self._idle()
        for each in status.members:
            if each.load.blocks.total:
                blocks = each.load.blocks
                counts = {name: getattr(blocks, name) for name in ("total", "free", "cached", "held")}
                report.blocks[each.member.name] = counts
        end = self._figures()
        report.processes = {name: {"begin": begin[name], "end": end[name]} for name in end.keys() & begin.keys()}
        report.seconds = round(time.monotonic() - self.began, 1)
        report.summarize(self._stalls)

    def _usable(self) -> list[Fault]:
        """Every kind of fault that this machine can have, in random order."""
        kinds = [fault for fault in FAULTS if not fault.needs()]
        self.rng.shuffle(kinds)
        return kinds

    async def _inject(self, kinds: list[Fault]) -> None:
        """Injects faults at once, waits until the cluster has recovered, and judges what ended meanwhile."""
        ground, at = self.ground, time.monotonic()
        ends = any(fault.ends_workers for fault in kinds)
        injected = Injected([fault.name for fault in kinds], round(at - self.began, 1), [], ends)
        self.report.faults.append(injected)
        print(f"{injected.at:7.1f} s  {', '.join(injected.faults)}", end="", flush=True)
        gone: dict[str, int] = {}
        for victims in await asyncio.gather(*(fault.inject(ground, self.rng) for fault in kinds)):
            gone |= victims
        injected.victims = sorted(gone)
        deadline = time.monotonic() + max(fault.seconds for fault in kinds)
        while not await ground.recovered(gone):
            if time.monotonic() > deadline:
                self.report.late.append(f"{injected.faults} at {injected.at} s: {injected.victims}")
                break
            await asyncio.sleep(0.1)
        injected.recovery_seconds = round(time.monotonic() - at, 2)
        await asyncio.sleep(max(0.0, LOOK_SECONDS - injected.recovery_seconds))
        until = time.monotonic()
        streams = [stream for stream in ground.load.streams if not stream.pause]
        gaps = [gap for stream in streams if (gap := stream.longest_gap(at, until)) is not None]
        injected.stall = percentiles(gaps)
        came = [stream for stream in streams if stream.invoked >= at]
        injected.first_token = percentiles([wait for stream in came if (wait := stream.first_token) is not None])
        if len(kinds) == 1:
            self._stalls += gaps
        ended = ground.load.take_ended()
        injected.failed = dict(Counter(reason for stream in ended if (reason := reason_of(stream))))
        await asyncio.to_thread(self._judge, ended)
        print(
            f"  {injected.recovery_seconds} s {injected.victims} stall {injected.stall} {injected.failed}", flush=True
        )

    def _judge(self, streams: list[Stream]) -> None:
        """Judges streams that have ended."""
        for name in self.ground.cluster.config["members"]:  # the routers are never scaled here
            if name.startswith("router"):
                self._read_log(name)
        history = History()
        for stream in streams:
            name, failed = stream.name, self._retries.pop(stream.name, 0)
            history.add(name, "invoke", stream.invoked, prompt=stream.prompt, count=stream.count, seed=stream.seed)
            # The last failed attempt of a failed request is no retry. Each router counts for itself.
            for _ in range(stream.retries if stream.resumes else failed - bool(stream.error and failed)):
                history.add(name, "retry", stream.invoked)
            for index, (token, at) in enumerate(zip(stream.tokens, stream.times, strict=True)):
                history.add(name, "token", at, index=index, token=token)
            if stream.error:
                history.add(name, "error", stream.ended, text=stream.error)
            else:
                history.add(name, "finish", stream.ended, count=stream.reported, retries=stream.retries)
        may_fail = {stream.name for stream in streams if self.report.may_fail(stream, self.began)}
        found = violations(history, oracle_of_all, may_fail=may_fail, budget=False)
        self.report.violations += found
        for what in found:
            print(f"VIOLATION {what}", flush=True)
        self.report.note(streams)

    def _read_log(self, router: str) -> None:
        """Counts the failed attempts that a router has logged since the last call."""
        with (self.ground.cluster.folder / f"{router}.log").open("rb") as log:
            log.seek(self._logs_read[router])
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._logs_read[router] += len(whole)
        for line in whole.splitlines():
            if line.startswith(b"{") and (entry := json.loads(line)).get("message") == "attempt failed":
                self._retries[entry["request"].partition("/")[0]] += 1

    async def _idle(self) -> GetStatusResponse:
        """The status when no worker holds a block any more, or when that takes too long."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            status = await asyncio.to_thread(self.ground.cluster.status)
            if not any(each.load.blocks.held for each in status.members) or time.monotonic() > deadline:
                return status
            await asyncio.sleep(0.1)

    def _figures(self) -> dict[str, dict[str, float]]:
        cluster = self.ground.cluster
        pids = {name: cluster.pid(name) for name in cluster.desired()}
        pids["supervisor"] = cluster.process.pid if cluster.process is not None else 0
        return {name: figures(pid) for name, pid in pids.items()}


def clock_library(folder: Path) -> str:
    """Compiles `clock.c`; empty without a C compiler."""
    library, compiler = folder / "clock.so", shutil.which("cc")
    if compiler is None:
        return ""
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def run(folder: Path, seconds: float, seed: int) -> Report:
    """A whole run; its processes are gone in the end."""
    print(f"nemesis: seed {seed}, {seconds:g} s", flush=True)
    ports = [(free_port(), free_port()) for _ in range(ROUTERS)]
    certificates = secrets_in(folder, "mutual").folder / "certificates"
    with Chaos() as chaos:
        variables = {STEP_SECONDS: str(STEP), DESK: chaos.desk, CLOCK_LIBRARY: clock_library(folder)}
        with (
            mock.patch.dict(os.environ, variables),
            supervised(folder, members(ports, certificates), drain_seconds=DRAIN_SECONDS, **HEARTBEAT) as cluster,
        ):
            all_ready(cluster)
            return asyncio.run(_run(cluster, chaos, ports, str(certificates / "ca.crt"), seconds, seed))


async def _run(
    cluster: Supervised, chaos: Chaos, ports: Sequence[tuple[int, int]], authority: str, seconds: float, seed: int
) -> Report:
    addresses, webs = ([f"127.0.0.1:{port}" for port in each] for each in zip(*ports, strict=True))
    load = Load(addresses, RATE, seed, authority)
    ground = Ground(cluster, chaos, load, webs, authority)
    skipped = {fault.name: reason for fault in FAULTS if (reason := fault.needs())}
    options = {
        "requests_per_second": RATE,
        "step_seconds": STEP,
        "heartbeat": HEARTBEAT,
        "frame_timeout_seconds": FRAME_TIMEOUT_SECONDS,
        "drain_seconds": DRAIN_SECONDS,
    }
    report = Report(seed, seconds, options, machine(), skipped)
    await Nemesis(ground, report, random.Random(f"faults {seed}")).run(seconds)
    if cluster.process is not None and (code := await asyncio.to_thread(cluster.process.stop)) != 0:
        report.violations.append(f"the supervisor ended with {code}")
    return report


def end_on_signals() -> None:
    """Makes SIGTERM and SIGINT an exit that ends the cluster's processes; the latter also where the shell has told this
    process to ignore it."""

    def end(number: int, _: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)


def main() -> int:
    end_on_signals()
    parser = argparse.ArgumentParser(description="Chaos under load; a report as JSON.")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--folder", type=Path, help="for logs; by default one that is removed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nemesis-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = run(folder, given.seconds, given.seed)
    if given.out is not None:
        given.out.write_text(json.dumps(report.plain(), indent=1) + "\n")
    print(json.dumps(report.summary, indent=1))
    found = report.broken() + report.missed()
    for what in found:
        print(what)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
