"""Checks and times the GPU kernels and the engine, and compares them with the limits of the device.

    python benchmarks/gpu.py [--only SECTION,...] [--seconds 540] [--out FILE] [--dry-run | --predict GPU]

    elementwise  add_rmsnorm, silu_mul, rope_kv_write
    gemv         products with weights of 8 and 4 bits, 1 to 16 rows, next to cuBLAS on 16 bits
    sample       every way to choose a token
    decode       paged_decode, 128 to 32k tokens of context
    prefill      flash_prefill, next to SDPA, cuDNN, flex_attention and what else `engine.prefill_attention` may be
    kv           kv_gather, kv_scatter, kv_checksum
    links        frames of KV between two processes: the share of the link's rate, both ways, with prefill beside
    engine       an 8B Llama shape with random weights through scheduler and runner, next to transformers
    profile      kernels of a layer, and the device's idle time within a graph's replay

Needs no Ray, no checkpoint and no network. Each kernel's result is compared with float64 before it is timed. Times are
CUDA events around one launch with cold caches: the median of up to 40, with the 10th and 90th percentile. A share is
the rate of bytes that must move, or of operations that must be done, divided by the rate that a copy of 1 GiB (bytes
read and written) or an 8192-cubed bfloat16 product by cuBLAS reaches on the same device just before.

With --predict, each kernel's bytes, operations and expected time on that GPU are printed, from its data sheet
(`gpu_predict`); nothing is run, and no GPU is needed. On a GPU with a known data sheet they are printed beside what was
measured.

Without a GPU, or with --dry-run, every case runs at a tiny size in Triton's interpreter and is checked, not timed. The
exit status is 1 if any result is wrong. Results are written after each section, so an interrupted run keeps them.
"""

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SECTIONS = ("elementwise", "gemv", "sample", "decode", "prefill", "kv", "links", "engine", "profile")
UNPREDICTED = ("links", "engine", "profile")
"""Sections that are more than kernels."""
GPUS = ("a100", "h100", "h200", "b200")
BATCHES = (1, 16, 64, 256)
CONTEXTS = (128, 1024, 4096, 16384, 32768)
RIVAL_TOKENS = 200_000
"""Largest KV of transformers' cache, which is copied at every step and shares the memory with our pool."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.predict is not None:
        return predict(options)
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        print("no GPU here: a dry run, in which nothing is timed", flush=True)
        dry = True
    if dry:
        # Triton reads this when the kernels' modules are imported.
        os.environ["TRITON_INTERPRET"] = "1"
    from gpu_measure import Machine

    machine = Machine(dry)
    results: dict[str, Any] = {"machine": describe_machine(dry), "dry_run": dry, "sections": {}}
    if not dry:
        results["limits"] = {
            "copy_gb_per_s": machine.limits.bytes_per_second / 1e9,
            "bf16_tflop_per_s": machine.limits.flops_per_second / 1e12,
        }
        print(json.dumps(results["machine"] | results["limits"]), flush=True)
    deadline = time.monotonic() + options.seconds
    sound = True
    for name in options.only:
        print(f"-- {name}", flush=True)
        rows: list[dict[str, Any]] = []
        results["sections"][name] = {"rows": rows}
        try:
            complete = SECTION_RUNS[name](machine, rows, deadline)
        except Exception as error:  # noqa: BLE001  # the other sections' figures are still useful
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            results["sections"][name]["error"] = f"{type(error).__name__}: {error}"
            complete = sound = False
        results["sections"][name]["complete"] = complete
        sound = sound and all(row.get("sound", True) for row in rows)
        save(options.out, results)
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()
    print("all results are sound" if sound else "SOMETHING IS WRONG, see above", flush=True)
    return 0 if sound else 1


def predict(options: argparse.Namespace) -> int:
    """The kernels' sections on tensors without memory."""
    from gpu_predict import HARDWARE, PredictedMachine, predict_frames

    machine = PredictedMachine(HARDWARE[options.predict])
    results: dict[str, Any] = {"predicted_for": machine.hardware.name, "sections": {}}
    for name in [name for name in options.only if name not in UNPREDICTED]:
        print(f"-- {name}", flush=True)
        results["sections"][name] = {"rows": (rows := [])}
        SECTION_RUNS[name](machine, rows, math.inf)
    print("-- frames", flush=True)
    results["sections"]["frames"] = {"rows": (rows := predict_frames(machine.hardware, (8 * 2**20, 64 * 2**20)))}
    for row in rows:
        print(json.dumps(row), flush=True)
    save(options.out, results)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--seconds", type=float, default=540.0, help="when to start no further case")
    parser.add_argument("--out", type=Path, help="JSON; gpu.json in the folder $OUT, if that is set, unless given")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in the interpreter, checked and not timed")
    parser.add_argument("--predict", choices=GPUS, help="a GPU that need not be here")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in SECTIONS]
    if unknown:
        parser.error(f"--only has {', '.join(unknown)}; allowed: {', '.join(SECTIONS)}")
    if options.out is None and "OUT" in os.environ:
        options.out = Path(os.environ["OUT"]) / "gpu.json"
    return options


def save(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def describe_machine(dry: bool) -> dict[str, Any]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    packages = ("torch", "triton", "transformers", "flashinfer-python", "numpy")
    machine: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
    }
    if dry:
        return machine | {"gpu": None}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return machine | {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver_clock_power": driver,
    }


Section = Callable[[Any, list[dict[str, Any]], float], bool]


def kernel_section(module: str, function: str) -> Section:
    """A section of the cases that `function` of `module` yields. It returns False if time ran out before the last."""

    def run(machine: Any, rows: list[dict[str, Any]], deadline: float) -> bool:
        from gpu_measure import describe

        for case in getattr(__import__(module), function)(machine):
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                return False
            rows.append(machine.measure(case))
            print(describe(rows[-1]), flush=True)
        return True

    return run


def engine_section(machine: Any, rows: list[dict[str, Any]], deadline: float) -> bool:
    from gpu_engine import STEPS, Bench, Transformers

    bench = Bench(machine)
    rows.append({"warm_up_s": bench.warm_up_s, "pool_tokens": bench.pool_tokens})
    rows.append(bench.check())
    print(json.dumps(rows[-1]), flush=True)
    steps = 2 if machine.dry else STEPS
    batches, contexts = ((1, 2), (8, 20)) if machine.dry else (BATCHES, CONTEXTS)
    cells = [(batch, context) for context in contexts for batch in batches]
    cells = [cell for cell in cells if cell[0] * (cell[1] + steps + 32) <= bench.pool_tokens]
    for length in (16, 40) if machine.dry else CONTEXTS:
        rows.append(bench.prefill(length))
        show(machine, rows[-1])
    ours = {}
    for batch, context in cells:
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return False
        ours[batch, context] = bench.decode(batch, context, steps)
        rows.append(ours[batch, context])
        show(machine, rows[-1])
    del bench
    gc.collect()
    rival = Transformers(machine, Bench.model(machine))
    for (batch, context), row in ours.items():
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return False
        if batch * context <= RIVAL_TOKENS:
            row["transformers"] = rival.decode(batch, context, min(steps, 8))
            if machine.dry:
                continue
            faster = row["tokens_per_s"] / row["transformers"]["tokens_per_s"]
            print(f"batch {batch}, context {context}: {faster:.2f} times transformers' tokens/s", flush=True)
    return True


def links_section(machine: Any, rows: list[dict[str, Any]], deadline: float) -> bool:
    from gpu_links import measure

    return bool(measure(machine, rows, deadline))


def show(machine: Any, row: dict[str, Any]) -> None:
    """Prints a row; in a dry run without times, which mean nothing there."""
    shown = {name: value for name, value in row.items() if not machine.dry or name in ("prompt", "batch", "context")}
    print(json.dumps(shown), flush=True)


def profile_section(machine: Any, rows: list[dict[str, Any]], deadline: float) -> bool:
    if machine.dry:
        print("skipped: needs the clock of a GPU", flush=True)
        return False
    from gpu_engine import Bench

    bench = Bench(machine)
    for batch, context in ((1, 1024), (16, 1024), (64, 4096)):
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return False
        rows.append(bench.profile(batch, context))
        print(json.dumps(rows[-1]), flush=True)
    return True


SECTION_RUNS: dict[str, Section] = {
    "elementwise": kernel_section("gpu_kernels", "elementwise"),
    "gemv": kernel_section("gpu_kernels", "gemv"),
    "sample": kernel_section("gpu_kernels", "sampler"),
    "decode": kernel_section("gpu_attention", "decode"),
    "prefill": kernel_section("gpu_attention", "prefill"),
    "kv": kernel_section("gpu_attention", "moving"),
    "links": links_section,
    "engine": engine_section,
    "profile": profile_section,
}

if __name__ == "__main__":
    sys.exit(main())
