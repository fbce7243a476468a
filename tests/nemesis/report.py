"""The report of a run of the nemesis, as JSON."""

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from kvrelay.machine import VERSION
from nemesis.load import Stream

ALLOWED = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
"""Statuses of failures that are allowed if too much was lost at a time (docs/guarantees.md). None counts as
complete."""
COMPLETE = 0.999
"""Share of the requests that must complete."""
STALL_SECONDS = 2.0
"""Limit of the p99 of stalls after a single fault, in seconds."""
CONVICTED = "INTERNAL: suspected of ending workers"
"""Error of a request that the router blames for the end of workers."""
CONVICTION_SECONDS = 3.0
"""Seconds after the recovery from a fault in which a request may still fail because of it."""
FAILED = ": failed: "
"""Mark of violations in which a request failed in a way that docs/guarantees.md excludes; all others are about
tokens."""
GROWTH = {"rss_mib": (1.3, 60), "fds": (1.2, 12), "threads": (1.2, 6), "sockets": (1.2, 8)}
"""Figures of a process at the end: at most so many times those at the begin, and so much more."""


@dataclass(slots=True)
class Injected:
    """One fault, or two at a time."""

    faults: list[str]
    at: float
    """Seconds since the run began."""
    victims: list[str]
    ends_workers: bool = False
    """Whether it ends workers, other than by a request."""
    recovery_seconds: float = 0.0
    """Seconds from the injection until every member was ready again."""
    stall: dict[str, float] = field(default_factory=dict)
    """Longest gap between two tokens of each stream that ran meanwhile: seconds."""
    first_token: dict[str, float] = field(default_factory=dict)
    """Seconds to the first token of each request that came meanwhile, and has it."""
    failed: dict[str, int] = field(default_factory=dict)
    """Requests that failed meanwhile, by reason."""

    def may_convict(self, at: float) -> bool:
        """Whether the router may have blamed a request that failed at `at`, seconds since the run began, for this
        fault: the fault ended a worker on which the request may have been on trial."""
        return self.ends_workers and self.at <= at <= self.at + self.recovery_seconds + CONVICTION_SECONDS


@dataclass(slots=True)
class Report:
    """A whole run."""

    seed: int
    seconds: float
    """Seconds from the first fault's wait to the end, judging included."""
    options: dict[str, Any]
    machine: dict[str, Any]
    skipped: dict[str, str]
    """Faults that this machine can't have, and why."""
    faults: list[Injected] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counts of requests: total, complete, and failures by reason."""
    tokens_judged: int = 0
    retries: int = 0
    migrations: int = 0
    resumes: int = 0
    violations: list[str] = field(default_factory=list)
    """Violations that the judge found; an entry of its own if the supervisor did not end well."""
    late: list[str] = field(default_factory=list)
    """Faults from which the cluster had not recovered by their deadline."""
    processes: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Figures of each process, at begin and end."""
    blocks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of each worker's blocks at the end, when no request is left."""
    summary: dict[str, Any] = field(default_factory=dict)

    def may_fail(self, stream: Stream, began: float) -> bool:
        """Whether a stream may have failed as it did; the run began at the monotonic time `began`."""
        if stream.error.startswith(CONVICTED):
            return stream.may_fail or any(injected.may_convict(stream.ended - began) for injected in self.faults)
        return stream.may_fail or stream.error.startswith(ALLOWED)

    def note(self, streams: Iterable[Stream]) -> None:
        """Counts streams that have ended."""
        for stream in streams:
            self.requests["total"] += 1
            self.requests[reason_of(stream) or "complete"] += 1
            self.tokens_judged += len(stream.tokens)
            self.retries += stream.retries
            self.migrations += stream.migrations
            self.resumes += stream.resumes

    def summarize(self, stalls: Sequence[float]) -> None:
        """Fills `summary`; `stalls` are those of all streams during single faults."""
        failed = self.requests["total"] - self.requests["complete"] - self.requests["poison"]
        self.summary = {
            "faults": sum(len(injected.faults) for injected in self.faults),
            "complete_share": 1 - failed / max(1, self.requests["total"]),
            "stall_after_single_faults": percentiles(stalls),
            "recovery": percentiles([injected.recovery_seconds for injected in self.faults]),
            "wrong_lost_or_doubled_tokens": sum(FAILED not in found for found in self.violations),
            "failed_without_leave": sum(FAILED in found for found in self.violations),
        }

    def missed(self) -> list[str]:
        """The aims that the run did not reach; they depend on how fast the machine is, and on what else it does."""
        found = list(self.late)
        if self.summary["complete_share"] < COMPLETE:
            found.append(f"{self.summary['complete_share']:.2%} of the requests completed: {dict(self.requests)}")
        if self.summary["stall_after_single_faults"].get("p99", 0) > STALL_SECONDS:
            found.append(f"stalls: {self.summary['stall_after_single_faults']}")
        return found

    def broken(self) -> list[str]:
        """The promises that the run broke."""
        found = list(self.violations)
        for name, figures in self.processes.items():
            for figure, (factor, more) in GROWTH.items():
                begin, end = figures["begin"].get(figure, 0), figures["end"].get(figure, 0)
                if end > begin * factor + more:
                    found.append(f"{name}: {figure} grew from {begin:g} to {end:g}")
        for name, blocks in self.blocks.items():
            if blocks["held"] or blocks["free"] + blocks["cached"] != blocks["total"]:
                found.append(f"{name}: blocks {blocks}")
        return found

    def plain(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(replace(self, requests=dict(self.requests)))


def reason_of(stream: Stream) -> str:
    """The reason for a stream's failure: its status and the text without numbers; empty if it is complete."""
    if not stream.error:
        return ""
    if stream.may_fail:
        return "poison"
    return "".join(char for char in stream.error if not char.isdigit())[:120]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()} | {
        "count": len(ordered)
    }


def machine() -> dict[str, Any]:
    """The machine and the packages that the run used."""
    names = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {"kvrelay": VERSION} | {name: version(name) for name in ("torch", "grpcio", "protobuf", "ray")},
    }


def figures(pid: int) -> dict[str, float]:
    """Size of one process; empty if it has just ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return {
            "pid": pid,
            "rss_mib": round(process.memory_info().rss / 2**20, 1),
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "sockets": len(process.net_connections("all")),
        }
    return {}
