"""How `gpu.py` measures a case: checks it against float64, times it with cold caches, compares it with its limit."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_predict import hardware_of
from torch import Tensor

REPEATS = 40
"""Timed runs of each function, at most."""
FLUSH_BYTES = 256 * 2**20
"""Written between two runs: more than any L2 holds."""


@dataclass
class Case:
    """One kernel on one shape."""

    name: str
    shape: dict[str, Any]
    run: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    """The same in float64."""
    tolerance: float
    """Largest error allowed, as a share of the largest exact value."""
    bytes: int = 0
    """Bytes that must move, if memory is the limit."""
    flops: int = 0
    """Operations that must be done, if arithmetic is the limit."""
    launches: int = 1
    """Kernels, one after the other."""
    rivals: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    part: Callable[[Tensor], Tensor] = lambda found: found
    """Of what `run` returns, the part that `exact` has."""


@dataclass(frozen=True)
class Limits:
    """The best rates of the device, measured with simple code."""

    bytes_per_second: float
    """Of a copy, read and written bytes together."""
    flops_per_second: float
    """Of a large bfloat16 product by cuBLAS."""


class Machine:
    """A GPU; or, in a dry run, the CPU under Triton's interpreter, where cases are checked once and not timed."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float16 if dry else torch.bfloat16
        """float16 in the interpreter, whose bfloat16 isn't reliable."""
        self.processors = 132 if dry else torch.cuda.get_device_properties(0).multi_processor_count
        self._flush = torch.empty(1 if dry else FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self.limits = Limits(1.0, 1.0) if dry else self._measure_limits()
        self.hardware = None if dry else hardware_of(torch.cuda.get_device_name())
        """For predictions beside what is measured; None if it isn't known."""

    def time(self, run: Callable[[], object], seconds: float = 1.0) -> dict[str, float]:
        """Median and percentiles, in seconds, of the runs that fit into about `seconds`, each with cold caches."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        events = []
        deadline = time.monotonic() + seconds
        while len(events) < REPEATS and (len(events) < 5 or time.monotonic() < deadline):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events.append((begin, end))
            if len(events) % 10 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) / 1e3 for begin, end in events)
        return {
            "median_s": statistics.median(times),
            "p10_s": times[len(times) // 10],
            "p90_s": times[-1 - len(times) // 10],
        }

    def measure(self, case: Case) -> dict[str, Any]:
        """Checks and times a case; returns its row of the results."""
        found, exact = case.part(case.run()), case.exact()
        scale = float(exact.abs().max()) or 1.0
        error = float((found.double() - exact.double()).abs().max()) / scale
        row: dict[str, Any] = {"case": case.name, "shape": case.shape, "error": error, "sound": error <= case.tolerance}
        del found, exact
        if self.dry:
            return row
        row |= self.time(case.run)
        if self.hardware is not None:
            row |= self.hardware.predict(case)
        if case.bytes:
            row["gb_per_s"] = case.bytes / row["median_s"] / 1e9
            row["share"] = case.bytes / row["median_s"] / self.limits.bytes_per_second
        elif case.flops:
            row["tflop_per_s"] = case.flops / row["median_s"] / 1e12
            row["share"] = case.flops / row["median_s"] / self.limits.flops_per_second
        row["rivals"] = {name: self._rival(run) for name, run in case.rivals.items()}
        return row

    def _rival(self, run: Callable[[], Tensor]) -> dict[str, Any]:
        try:
            timed = self.time(run)
        except (RuntimeError, TypeError, ValueError) as error:  # another project's code, which may not take this shape
            return {"error": f"{type(error).__name__}: {error}"[:200]}
        return timed

    def _measure_limits(self) -> Limits:
        source = torch.empty(2**30, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        copy = self.time(lambda: target.copy_(source))["median_s"]
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = self.time(lambda: a @ b)["median_s"]
        return Limits(2 * 2**30 / copy, 2 * 8192**3 / product)


def describe(row: dict[str, Any]) -> str:
    """A line to read."""
    shape = " ".join(f"{key}={value}" for key, value in row["shape"].items())
    line = f"{row['case']:<16} {shape:<52}"
    if "predicted_s" in row:
        moved = f"{row['bytes'] / 1e6:9.1f} MB" if row["bytes"] else f"{row['flops'] / 1e9:9.1f} GFLOP"
        line += f"  {moved:<15} predicted {row['predicted_s'] * 1e6:9.1f} us ({row['limit']})"
    if "error" in row:
        line += f"  error {row['error']:.1e}{'' if row['sound'] else '  WRONG'}"
    if "median_s" not in row:
        return line
    line += f"  {row['median_s'] * 1e6:9.1f} us ({row['p10_s'] * 1e6:.1f} to {row['p90_s'] * 1e6:.1f})"
    if "gb_per_s" in row:
        line += f"  {row['gb_per_s']:7.0f} GB/s  {row['share']:6.1%}"
    if "tflop_per_s" in row:
        line += f"  {row['tflop_per_s']:7.1f} TFLOP/s  {row['share']:6.1%}"
    for name, rival in row.get("rivals", {}).items():
        if "median_s" in rival:
            line += f"  {name} {rival['median_s'] / row['median_s']:.2f}x"
        else:
            line += f"  {name}: {rival['error'].splitlines()[0][:60]}"
    return line
