"""The host's time for steps of the GPU's runner, on a machine without a GPU.

The runner works on CPU tensors of a tiny model. Triton compiles its kernels for sm_90 and launches them through its own
Python code into a driver that does nothing, and products only allocate their results. So what is measured is all that
the host does for a step, but for the driver's own calls and for torch's code around a product or a copy to the device.
Times are CPU seconds of the thread.

    mixed   microseconds of a layer of a step with decode rows and a chunk: the difference of two models' steps
            by_triton counts launches that weren't repeated: none, if all are prepared
    pieces  the same, launched as graphs with attention between them; a graph's replay does nothing
    decode  microseconds of `Engine.step` with full batches, and their share of the time that an H200 takes for such
            a step of the 8B shape, by `gpu_predict`: reading weights and KV

    python benchmarks/gpu_host.py [--only mixed,pieces,decode] [--repeats 10] [--rows 4] [--chunk 12] [--int8]
                                  [--profile mixed]
"""

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Triton decides when its kernels are defined whether they are interpreted.
os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from gpu_engine import LLAMA_8B, TINY, random_weights
from gpu_predict import COPY_SHARE, HARDWARE
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.pool import allocate_pool
from kvrelay.engine.models.fast.decoder import Decoder
from kvrelay.engine.models.reading.families import Traits
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.gpu import GpuRunner
from kvrelay.kernels.triton.gpu_ops import GpuOps

LAYERS = (2, 18)
"""A layer's time is the difference of a step of these many layers."""
AT_ONCE = 20
"""Steps between two readings of the clock, which may take as long as a step."""
BATCHES = (1, 32, 256)
CONTEXT = 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


class Launcher:
    """Stands in for `CudaLauncher`: asks the tensors for their addresses as its C code does, and launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        for argument in arguments[9:]:
            if type(argument) is torch.Tensor:
                argument.data_ptr()


class HostDriver:
    """The part of Triton's driver that compiling and launching need."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), 0, 0, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NoGraph:
    """Stands in for a graph."""

    def replay(self) -> None:
        """Nothing."""


@contextmanager
def no_capture() -> Iterator[NoGraph]:
    """Stands in for `cuda_capture`."""
    yield NoGraph()


def make_runner(layers: int, options: EngineConfig, graphs: bool) -> GpuRunner:
    """A runner of a tiny random model of so many layers."""
    options = options.on("cuda", 2**37)
    config = replace(TINY, layers=layers, traits=Traits((0,) * layers), max_positions=2 * CONTEXT)
    layout = config.kv_layout(config.dtype, options.kv_dtype, options.block_size, "HND")
    pool = allocate_pool(layout, options.kv_memory_bytes, "cpu")
    spec = ModelSpec(config.architecture, config.vocab_size, options.max_context, (), config.dtype, "random")
    with torch.inference_mode():
        weights, _ = random_weights(config, pool.tensor.device)
    runner = GpuRunner(spec, Decoder(config, weights, GpuOps()), pool, options, no_capture if graphs else None)
    runner.warm_up()
    return runner


def mixed_options(rows: int, chunk: int, int8: bool, graph_tokens: int) -> EngineConfig:
    """For steps of so many rows and one chunk."""
    return EngineConfig(
        block_size=16,
        kv_memory_bytes=2**22,
        max_batch_tokens=rows + chunk,
        max_sequences=rows + 1,
        max_context=64,
        graph_tokens=graph_tokens,
        kv_dtype="int8" if int8 else "auto",
    )


def mixed_plan(rows: int, chunk: int) -> StepPlan:
    """Decode rows and one chunk of a prompt."""
    lengths = np.array([1] * rows + [chunk], np.int32)
    return StepPlan(
        step=0,
        handles=tuple(range(rows + 1)),
        tokens=np.zeros(rows + chunk, np.int32),
        starts=np.array([20] * rows + [0], np.int32),
        lengths=lengths,
        block_tables=np.arange(2 * (rows + 1), dtype=np.int32).reshape(-1, 2),
        sample=np.array([True] * rows + [False]),
        sampling=(GREEDY,) * (rows + 1),
        generated=np.zeros(rows + 1, np.int32),
    )


def seconds_of(step: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of the thread of a step, as means of several, ascending."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        for _ in range(AT_ONCE):
            step()
        found.append((time.thread_time() - began) / AT_ONCE)
    return sorted(found)


def quartiles(values: list[float]) -> list[float]:
    """Of ascending seconds, in microseconds."""
    return [round(1e6 * values[len(values) * quarter // 4], 1) for quarter in (1, 2, 3)]


def mixed(options: argparse.Namespace, graph_tokens: int, name: str) -> dict[str, Any] | None:
    """A layer's share of a mixed step, and what is left; None if only a profile was asked for."""
    config = mixed_options(options.rows, options.chunk, options.int8, graph_tokens)
    plan = mixed_plan(options.rows, options.chunk)
    steps = [partial(make_runner(layers, config, graph_tokens > 0).launch, plan) for layers in LAYERS]
    for step in steps:
        seconds_of(step, 1)
    if profiled(options, name, steps[1]):
        return None
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as by_triton:
        few, many = (seconds_of(step, options.repeats) for step in steps)
    a_layer = [(b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(few, many, strict=True)]
    return {
        "us_a_layer": quartiles(a_layer),
        "us_a_step": dict(zip(LAYERS, map(quartiles, (few, many)), strict=True)),
        "by_triton": by_triton.call_count,
    }


def decode(options: argparse.Namespace, batch: int) -> dict[str, Any] | None:
    """A decode step of the engine; None if only a profile was asked for."""
    config = EngineConfig(
        kv_memory_bytes=2**26, max_batch_tokens=2048, max_sequences=batch, max_context=2 * CONTEXT, graph_tokens=0
    ).on("cuda", 2**37)
    runner = make_runner(1, config, graphs=True)
    # No kernel writes tokens, so each step yields these.
    runner._sampled.fill_(1)
    engine = engine_on(runner, config)
    for index in range(batch):
        request = Request(str(index), 1, tuple([2] * CONTEXT), CONTEXT, GREEDY)
        reservation = engine.scheduler.reserve(request)
        if reservation is None:
            raise RuntimeError(f"too few free blocks for {batch} sequences of {CONTEXT} tokens")
        engine.scheduler.resume(request, 1, reservation.hold)
    seconds_of(engine.step, 1)
    if profiled(options, f"decode {batch}", engine.step):
        return None
    found = seconds_of(engine.step, options.repeats)
    h200 = HARDWARE["h200"]
    shape = LLAMA_8B
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.hidden_size
    layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    weights = 2 * (shape.layers * layer + shape.vocab_size * shape.hidden_size)
    kv = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * CONTEXT * batch
    device = (weights + kv) / (h200.bytes_per_second * COPY_SHARE)
    return {
        "us_a_step": quartiles(found),
        "predicted_us": round(1e6 * device),
        "share": round(found[len(found) // 2] / device, 3),
    }


def profiled(options: argparse.Namespace, name: str, step: Callable[[], object]) -> bool:
    """Prints where the time of a step goes if that is asked for."""
    if options.profile == name:
        profiler = cProfile.Profile()
        profiler.runcall(seconds_of, step, options.repeats)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return bool(options.profile)


def allocate_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Stands in for a product."""
    return torch.empty((len(x), len(weight)), dtype=x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="mixed,pieces,decode", help="which of these, by commas")
    parser.add_argument("--repeats", type=int, default=10, help=f"each of {AT_ONCE} steps")
    parser.add_argument("--rows", type=int, default=4, help="decode rows of a mixed step")
    parser.add_argument("--chunk", type=int, default=12, help="tokens of its chunk")
    parser.add_argument("--int8", action="store_true", help="KV of a mixed step in int8")
    parser.add_argument("--profile", default="", help='where the time goes of mixed, pieces or "decode 32"')
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.nn.functional.linear = allocate_product
    driver.set_active(HostDriver())
    for name in options.only.split(","):
        if name == "decode":
            for batch in BATCHES:
                print(json.dumps({"decode": batch} | (decode(options, batch) or {})), flush=True)
        else:
            print(json.dumps({name: mixed(options, 512 if name == "pieces" else 0, name)}), flush=True)


if __name__ == "__main__":
    main()
