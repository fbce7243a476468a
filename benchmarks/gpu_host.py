"""The host's time for a mixed step of the GPU's runner, on a machine without a GPU.

The runner works on CPU tensors of a tiny model. Triton compiles its kernels for sm_90 and launches them through its own
Python code into a driver that does nothing, so what is measured is all that the host does for a launch but the driver's
own call. torch's products compute a few thousand numbers here; what they take is told beside. Times are CPU seconds of
the thread.

    python benchmarks/gpu_host.py [--repeats 20] [--rows 4] [--chunk 12] [--int8] [--profile]
"""

import argparse
import cProfile
import json
import os
import pstats
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

# Triton decides when its kernels are defined whether they are interpreted.
os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from gpu_engine import TINY, random_weights
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.pool import allocate_pool
from kvrelay.engine.models.architecture import Traits
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.gpu import GpuRunner
from kvrelay.kernels.gpu_ops import GpuOps

LAYERS = (2, 18)
"""A layer's time is the difference of a step of these many layers."""
GREEDY = SamplingParams(temperature=0.0)


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


def make_runner(layers: int, rows: int, chunk: int, int8: bool) -> GpuRunner:
    """A runner of a tiny random model of so many layers."""
    config = replace(TINY, dtype="float32", layers=layers, traits=Traits((0,) * layers))
    options = EngineConfig(
        block_size=16,
        kv_memory_bytes=2**22,
        max_batch_tokens=rows + chunk,
        max_sequences=rows + 1,
        max_context=64,
        kv_dtype="int8" if int8 else "auto",
    ).on("cuda", 2**37)
    layout = config.kv_layout(config.dtype, options.kv_dtype, options.block_size, "HND")
    pool = allocate_pool(layout, options.kv_memory_bytes, "cpu")
    spec = ModelSpec("random", config.architecture, config.vocab_size, 64, (), config.dtype, "random")
    with torch.inference_mode():
        weights, _ = random_weights(config, pool.tensor.device)
    return GpuRunner(spec, Decoder(config, weights, GpuOps()), pool, options)


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


def seconds_of(runner: GpuRunner, plan: StepPlan, repeats: int) -> list[float]:
    """CPU seconds of the thread of each launch."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        runner.launch(plan)
        found.append(time.thread_time() - began)
    return found


def products_seconds(runner: GpuRunner, tokens: int) -> float:
    """CPU seconds of the four products of a layer of float32."""
    layer = runner.model.layers[0]
    config = runner.model.config
    hidden, heads = torch.zeros(tokens, config.hidden_size), torch.zeros(tokens, config.heads * config.head_dim)
    inner = torch.zeros(tokens, config.intermediate_size)
    found = []
    with torch.inference_mode():
        for _ in range(200):
            began = time.thread_time()
            layer.qkv(hidden), layer.output(heads), layer.gate_up(hidden), layer.down(inner)
            found.append(time.thread_time() - began)
    return sorted(found)[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="steps of each model, in turns")
    parser.add_argument("--rows", type=int, default=4, help="decode rows")
    parser.add_argument("--chunk", type=int, default=12, help="tokens of the prompt")
    parser.add_argument("--int8", action="store_true", help="KV in int8")
    parser.add_argument("--profile", action="store_true", help="where the time goes, of the larger model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    driver.set_active(HostDriver())
    runners = [make_runner(layers, options.rows, options.chunk, options.int8) for layers in LAYERS]
    plan = mixed_plan(options.rows, options.chunk)
    for runner in runners:
        seconds_of(runner, plan, 3)
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(seconds_of, runners[1], plan, options.repeats)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        return
    few, many = [], []
    for _ in range(options.repeats):
        few += seconds_of(runners[0], plan, 1)
        many += seconds_of(runners[1], plan, 1)
    few.sort(), many.sort()
    quartiles = [len(few) // 4, len(few) // 2, len(few) * 3 // 4]
    a_layer = [(many[index] - few[index]) / (LAYERS[1] - LAYERS[0]) for index in quartiles]
    result = {
        "us_a_layer": [round(1e6 * value, 1) for value in a_layer],
        "products_us_a_layer": round(1e6 * products_seconds(runners[0], plan.num_tokens), 1),
        "us_a_step": {
            count: [round(1e6 * values[index], 1) for index in quartiles]
            for count, values in zip(LAYERS, (few, many), strict=True)
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
