"""Time kvrelay's engine alone (scheduler, runner, sampler; no router, no hand-off); prints one JSON line per cell.

    python benchmarks/offline.py MODEL [--dtype bfloat16] [--quantization int8] [--threads 2] [--cells prefill_512]

Rates are tokens/s of wall time, or with `--cpu` of the process's CPU time; then one thread computes. The grid is what
other engines are commonly timed on: prefill of one request; decode of a batch with 128 tokens in and 64 out, greedy,
end of sequence ignored, over the decode steps alone.

    outside_forward   share of the stepping thread's CPU time in decode steps that isn't the forward pass: scheduler,
                      runner, and the sampler unless one native call computes a step and chooses its tokens
    bandwidth         bytes of weights a second that decode reads, as a share of what as many threads can read from
                      memory; left out where the caches may hold half of the weights
    resident_peak     peak resident bytes of the load, as a multiple of the checkpoint's size
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import torch

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.engine import Engine
from kvrelay.engine.models.fast.loader import EMBEDDING
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner

PREFILLS = (512, 2048)
BATCHES = (1, 8, 32)
PROMPT = 128
OUT = 64


class Timed:
    """Calls a function, and adds up the CPU seconds that the calling thread spends in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.thread_time()
        result = self._function(*args, **options)
        self.seconds += time.thread_time() - start
        return result


class Bench:
    def __init__(self, engine: Engine, runner: CpuRunner, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._random = random.Random(0)
        self._requests = 0
        self._vocabulary = runner.spec.vocab_size
        self._timed: list[Timed] = []
        # Only the native decoder can choose tokens itself.
        for name in ("forward", "logits", "choose"):
            if hasattr(runner.model, name):
                self._timed.append(Timed(getattr(runner.model, name)))
                setattr(runner.model, name, self._timed[-1])

    def seconds(self, batch: int, length: int, out: int) -> tuple[float, float, float]:
        """A batch of requests, from first to last step: time by the clock, CPU time of the stepping thread, and how
        much of that was the forward pass. Other processes disturb CPU time least."""
        sampling = SamplingParams(max_tokens=out, temperature=0.0)
        for _ in range(batch):
            self._requests += 1
            tokens = tuple(self._random.choices(range(2, self._vocabulary), k=length))
            self._engine.scheduler.add(Request(str(self._requests), 0, tokens, length, sampling))
        before = sum(timed.seconds for timed in self._timed)
        start, start_cpu = self._clock(), time.thread_time()
        while self._engine.has_work:
            self._engine.step()
        elapsed, cpu = self._clock() - start, time.thread_time() - start_cpu
        return elapsed, cpu, sum(timed.seconds for timed in self._timed) - before

    def prefill(self, length: int) -> dict[str, float]:
        return {"tokens_per_s": length / min(self.seconds(1, length, 1)[0] for _ in range(3))}

    def decode(self, batch: int) -> dict[str, float]:
        whole = min(self.seconds(batch, PROMPT, OUT + 1) for _ in range(2))
        first = min(self.seconds(batch, PROMPT, 1) for _ in range(2))
        elapsed, cpu, forward = (a - b for a, b in zip(whole, first, strict=True))
        return {
            "tokens_per_s": batch * OUT / elapsed,
            "outside_forward": 1 - forward / cpu,
            "steps_per_s": OUT / elapsed,
        }


def readable_bytes_per_second(threads: int, clock: Callable[[], float]) -> float:
    """Bytes a second that so many threads read from memory: the best of several passes over more than any cache
    holds."""
    block = torch.ones(2**29, dtype=torch.uint8)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            start = clock()
            list(pool.map(torch.any, block.chunk(threads)))
            times.append(clock() - start)
    return block.nbytes / min(times)


def cache_bytes() -> int:
    """The size of the largest cache of a core; 0 where Linux doesn't tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=0)


def bytes_of_a_step(folder: Path) -> int:
    """Bytes of weights that a decode step reads: all, but of an embedding that isn't the head too only a few rows."""
    sizes = {name: entry.end - entry.begin for name, entry in Checkpoint(folder).tensors.items()}
    return sum(sizes.values()) - (sizes[EMBEDDING] if "lm_head.weight" in sizes else 0)


def resident_bytes(field: str) -> int:
    """`VmRSS`, what is resident, or `VmHWM`, the most that was since the last reset."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    grid = [f"prefill_{length}" for length in PREFILLS] + [f"decode_{batch}" for batch in BATCHES]
    parser.add_argument("--cells", default=",".join(grid), help="which of " + ", ".join(grid))
    args = parser.parse_args()
    config = EngineConfig(
        threads=args.threads, kv_memory_bytes=2**30, prefix_cache=False, quantization=args.quantization
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    engine, runner = build_engine(args.model, args.dtype, config)
    load = time.perf_counter() - start
    size = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
    peak = (resident_bytes("VmHWM") - before - runner.pool.tensor.nbytes) / size
    print(json.dumps({"engine": "kvrelay", "load_s": round(load, 2), "resident_peak": round(peak, 2)}), flush=True)
    runner.warm_up()
    clock = time.process_time if args.cpu else time.perf_counter
    bench = Bench(engine, runner, clock)
    bench.seconds(1, 64, 4)
    bandwidth, read = 0.0, bytes_of_a_step(args.model)
    # Of quantized weights, not the file's bytes are read.
    from_memory = args.quantization == "none" and read > 2 * cache_bytes()
    for cell in args.cells.split(","):
        kind, count = cell.split("_")
        if kind == "prefill":
            figures = bench.prefill(int(count))
        else:
            if from_memory:
                bandwidth = max(bandwidth, readable_bytes_per_second(args.threads, clock))
            figures = bench.decode(int(count))
            steps = figures.pop("steps_per_s")
            if from_memory:
                # Before and after: another process may take a part of it meanwhile.
                bandwidth = max(bandwidth, readable_bytes_per_second(args.threads, clock))
                figures["bandwidth"] = steps * read / bandwidth
        rounded = {name: round(value, 1 if name == "tokens_per_s" else 3) for name, value in figures.items()}
        print(json.dumps({"engine": "kvrelay", "cell": cell} | rounded), flush=True)


if __name__ == "__main__":
    main()
