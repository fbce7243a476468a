"""kvrelay's engine for `offline.py`: scheduler, runner and sampler. Its own figures:

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
from typing import Any

import torch

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.fast.loader import EMBEDDING
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.request import Request, SamplingParams


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


class Kvrelay:
    """The engine. Its times are those by the clock, the stepping thread's CPU time, and how much of that was the
    forward pass; other processes disturb CPU time least."""

    def __init__(self, args: argparse.Namespace, clock: Callable[[], float]) -> None:
        """Loads the model, and prints how long that took and how much memory it needed."""
        folder = Path(args.model)
        options = {"threads": args.threads, "quantization": args.quantization}
        config = EngineConfig(**options, kv_memory_bytes=2**30, prefix_cache=False)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start = resident_bytes("VmRSS"), time.perf_counter()
        self._engine, runner = build_engine(folder, args.dtype, config)
        load = time.perf_counter() - start
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        peak = (resident_bytes("VmHWM") - before - runner.pool.tensor.nbytes) / size
        print(json.dumps({"engine": "kvrelay", "load_s": round(load, 2), "resident_peak": round(peak, 2)}), flush=True)
        runner.warm_up()
        self._clock, self._threads = clock, args.threads
        self._requests, self._vocabulary = 0, runner.spec.vocab_size
        self._timed: list[Timed] = []
        # Only the native decoder can choose tokens itself.
        for name in ("forward", "logits", "choose"):
            if hasattr(runner.model, name):
                self._timed.append(Timed(getattr(runner.model, name)))
                setattr(runner.model, name, self._timed[-1])
        self._read = bytes_of_a_step(folder)
        # Of quantized weights, not the file's bytes are read.
        self._from_memory = args.quantization == "none" and self._read > 2 * cache_bytes()
        self._readable = self._readable_bytes_per_second() if self._from_memory else 0.0

    def seconds(self, batch: int, length: int, out: int) -> tuple[float, ...]:
        sampling = SamplingParams(max_tokens=out, temperature=0.0)
        for _ in range(batch):
            self._requests += 1
            tokens = tuple(random.choices(range(2, self._vocabulary), k=length))
            self._engine.scheduler.add(Request(str(self._requests), 0, tokens, length, sampling))
        before = sum(timed.seconds for timed in self._timed)
        start, start_cpu = self._clock(), time.thread_time()
        while self._engine.has_work:
            self._engine.step()
        elapsed, cpu = self._clock() - start, time.thread_time() - start_cpu
        return elapsed, cpu, sum(timed.seconds for timed in self._timed) - before

    def decode_figures(self, step_seconds: float, *times: float) -> dict[str, float]:
        cpu, forward = times
        found = {"outside_forward": 1 - forward / cpu}
        if self._from_memory:
            # Before and after: another process may take a part of it meanwhile.
            self._readable = max(self._readable, self._readable_bytes_per_second())
            found["bandwidth"] = self._read / step_seconds / self._readable
        return found

    def _readable_bytes_per_second(self) -> float:
        """Bytes a second that the threads read from memory: the best of several passes over more than any cache
        holds."""
        block = torch.ones(2**29, dtype=torch.uint8)
        times = []
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in range(8):
                start = self._clock()
                list(pool.map(torch.any, block.chunk(self._threads)))
                times.append(self._clock() - start)
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
