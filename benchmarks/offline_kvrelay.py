"""kvrelay's engine for `offline.py`: scheduler, runner and sampler."""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
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
        """Loads the model, and prints how long that took."""
        options = {"threads": args.threads, "quantization": args.quantization}
        config = EngineConfig(**options, kv_memory_bytes=2**30, prefix_cache=False)
        start = time.perf_counter()
        self._engine, runner = build_engine(Path(args.model), args.dtype, config)
        load = time.perf_counter() - start
        print(json.dumps({"engine": "kvrelay", "load_s": round(load, 2)}), flush=True)
        runner.warm_up()
        self._clock = clock
        self._requests, self._vocabulary = 0, runner.spec.vocab_size
        self._timed: list[Timed] = []
        # Only the native decoder can choose tokens itself.
        for name in ("forward", "logits", "choose"):
            if hasattr(runner.model, name):
                self._timed.append(Timed(getattr(runner.model, name)))
                setattr(runner.model, name, self._timed[-1])

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
