"""Measures engines in turn, since others may use the machine too: medians, spread, ratios, and the machine itself."""

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OWN = "kvrelay"
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
"""CPU features by which engines choose their kernels."""

Runs = dict[str, dict[str, list[float]]]
"""Figures of all repeats, by cell, then by engine."""


@dataclass(frozen=True)
class Engine:
    """An engine to measure."""

    command: Sequence[str]
    """Command that prints one JSON object per line, each with `cell` and the measured figure."""
    python: Path
    """Python interpreter of the engine's environment."""
    distributions: Sequence[str]
    """Packages whose versions are recorded with the figures."""


def in_turn(engines: Mapping[str, Engine], figure: str, repeats: int, timeout: float) -> Runs:
    """Runs every engine once, then every engine again, and so on.

    Args:
        figure: the key of the measured figure in an engine's lines.
        timeout: of one engine's run, in seconds.

    Raises:
        RuntimeError: an engine failed or took too long.
    """
    runs: Runs = {}
    for repeat in range(repeats):
        for name, engine in engines.items():
            print(f"{name}, {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
            output = run(engine.command, timeout)
            for line in output.splitlines():
                if line.startswith("{") and "cell" in (fields := json.loads(line)):
                    runs.setdefault(fields["cell"], {}).setdefault(name, []).append(fields[figure])
                    print(f"  {fields['cell']}: {fields[figure]}", file=sys.stderr, flush=True)
    return runs


def run(command: Sequence[str], timeout: float) -> str:
    """Runs a command and returns its output. Its whole process group ends with it, because engines start more
    processes.

    Raises:
        RuntimeError: it failed or took too long; the message has the end of its stderr.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{shlex.join(command)} took more than {timeout} s") from None
        finally:
            end_group(process)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{shlex.join(command)} failed ({process.returncode}): {errors.read()[-2000:]}")
    return output


def end_on_signal() -> None:
    """Makes SIGTERM an ordinary exit, as Ctrl-C is, so that child processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Ends a process group: by SIGTERM first, since the process may have children in other groups to end."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summary(runs: Runs, larger_is_better: bool) -> dict[str, Any]:
    """Summary of each cell: every engine's median and spread, and the ratio of kvrelay's median to each other engine's
    and the best."""
    cells: dict[str, Any] = {}
    for cell, engines in runs.items():
        medians = {name: statistics.median(values) for name, values in engines.items()}
        peers = {name: value for name, value in medians.items() if name != OWN}
        row: dict[str, Any] = {"engines": {name: spread(values) | {"runs": values} for name, values in engines.items()}}
        if OWN in medians and peers:
            row["best_peer"] = (max if larger_is_better else min)(peers, key=peers.__getitem__)
            row["ratios"] = {name: round(medians[OWN] / value, 3) for name, value in peers.items()}
        cells[cell] = row
    return cells


def setting(engines: Mapping[str, Engine]) -> dict[str, Any]:
    """The setting of a measurement: date, machine and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: versions(engine) for name, engine in engines.items()},
    }


def own_setting(*distributions: str) -> dict[str, Any]:
    """The setting, as `setting` gives it, where only kvrelay is measured, by this Python."""
    return setting({OWN: Engine((), Path(sys.executable), (OWN, *distributions))})


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The median, the range and the count of figures."""
    cells = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in cells.items()} | {"n": len(values)}


def machine() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", "unknown"),
        "family, model, stepping": [fields.get(key, "?") for key in ("cpu family", "model", "stepping")],
        "flags": [flag for flag in FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions(engine: Engine) -> dict[str, str]:
    script = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    command = [str(engine.python), "-c", script, *engine.distributions]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return dict(zip(engine.distributions, found, strict=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a comparison with other engines."""
    parser.add_argument("--peers", type=Path, help="folder that peers/setup.sh made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="of one engine's run, in seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")


def compare(
    engines: Mapping[str, Engine],
    args: argparse.Namespace,
    result: dict[str, Any],
    figure: str,
    *,
    larger_is_better: bool,
) -> None:
    """Measures engines in turn, saves the figures where `args` says, and prints those of each cell.

    Args:
        result: the setting, to which the figures are added.
        figure: the key of the measured figure in an engine's lines.
    """
    runs = in_turn(engines, figure, args.repeats, args.timeout)
    result["cells"] = summary(runs, larger_is_better)
    if args.out is not None:
        save(args.out, result)
    for cell, row in result["cells"].items():
        print(json.dumps({"cell": cell, **row}))


def earlier(path: Path | None) -> dict[str, Any]:
    """The results that a file has so far."""
    return dict(json.loads(path.read_text())) if path is not None and path.exists() else {}


def save(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
