"""The JSON result of a benchmark; `kvrelay bench --schema` prints its schema."""

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from kvrelay.cli.bench.load import Request

FORMAT = "kvrelay.bench/1"
PACKAGES = ("kvrelay", "kvrelay-client", "grpcio", "protobuf", "aiohttp", "numpy")
STRICT: dict[str, Any] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True)
class Run:
    """One point of a sweep, or the whole benchmark."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    request_rate: float | None
    """Requests per second that were due on average; None: all at once, a closed loop, or a trace."""
    concurrency: int
    """Most requests in flight; 0: no limit."""
    figures: dict[str, float]
    """Figures under the names of `vllm bench serve`, in milliseconds where they end in _ms."""
    requests: list[Request]
    interrupted: bool = False
    """Whether Ctrl-C ended it: figures and requests are then those that were done by then."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the benchmark ran on. The server may run elsewhere."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    processor: str
    cores: int
    """CPU cores that this process may use."""
    memory_gib: float
    system: str
    python: str


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    format: str
    started: str
    """Time of its start, in UTC."""
    face: str
    """Interface that was measured: grpc or http."""
    target: str
    model: dict[str, Any]
    """The server's description of its model."""
    options: dict[str, Any]
    machine: Machine
    versions: dict[str, str]
    """Version of each package that the benchmark runs with."""
    runs: list[Run]


_ADAPTER = TypeAdapter(Result)


def schema() -> dict[str, Any]:
    """The JSON schema of `Result`."""
    return _ADAPTER.json_schema()


def text(result: Result) -> str:
    """The document that is written to a file."""
    return json.dumps(_ADAPTER.dump_python(result, mode="json"), indent=1) + "\n"


def this_machine() -> Machine:
    """This machine."""
    return Machine(
        _processor(),
        len(os.sched_getaffinity(0)),
        round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        f"{platform.system()} {platform.release()}",
        sys.version.partition(" ")[0],
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
