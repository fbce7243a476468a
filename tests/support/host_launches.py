"""Counts what the GPU runner launches in a step that it has launched before, on a machine without a GPU.

    python -m support.host_launches CHECKPOINT

The runner works on CPU tensors. Triton compiles its kernels for sm_90 and launches them by its own Python code into
a driver that does nothing. Prints one JSON object: for a step of decode rows and a chunk without graphs (`mixed`), the
same in pieces (`pieces`), and decode steps (`decode`), how many launches reached the driver, and how many of them went
through Triton's own launch code instead of being repeated.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Triton decides when its kernels are defined whether they are interpreted.
os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner

ROWS, CHUNK = 4, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


class Launcher:
    """Stands in for Triton's `CudaLauncher`, and counts."""

    launched = 0

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        Launcher.launched += 1


class HostDriver:
    """The part of Triton's driver that compiling and launching need."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
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


@contextmanager
def no_capture() -> Iterator[Any]:
    """Stands in for `cuda_capture`: the replay of its graph does nothing."""
    yield SimpleNamespace(replay=lambda: None)


def runner_of(folder: Path, options: EngineConfig, graphs: bool) -> GpuRunner:
    options = options.on("cuda")
    made = build_gpu_runner(folder, "float16", options, device="cpu")
    runner = GpuRunner(made.spec, made.model, made.cache_layout, made.pools, options, no_capture if graphs else None)
    runner.warm_up()
    return runner


def mixed(folder: Path, graph_tokens: int) -> Callable[[], object]:
    """A step with decode rows and one chunk of a prompt."""
    options = EngineConfig(
        block_size=16,
        kv_memory_bytes=2**22,
        max_batch_tokens=ROWS + CHUNK,
        max_sequences=ROWS + 1,
        max_context=64,
        graph_tokens=graph_tokens,
    )
    runner = runner_of(folder, options, graph_tokens > 0)
    plan = StepPlan(
        step=0,
        handles=tuple(range(ROWS + 1)),
        tokens=np.zeros(ROWS + CHUNK, np.int32),
        starts=np.array([20] * ROWS + [0], np.int32),
        lengths=np.array([1] * ROWS + [CHUNK], np.int32),
        block_tables=np.arange(2 * (ROWS + 1), dtype=np.int32).reshape(-1, 2),
        sample=np.array([True] * ROWS + [False]),
        sampling=(GREEDY,) * (ROWS + 1),
        generated=np.zeros(ROWS + 1, np.int32),
    )
    return lambda: runner.launch(plan)


def decode(folder: Path) -> Callable[[], object]:
    """A step of the engine with a full batch."""
    options = EngineConfig(
        kv_memory_bytes=2**22, max_batch_tokens=64, max_sequences=ROWS, max_context=64, graph_tokens=0
    )
    runner = runner_of(folder, options, graphs=True)
    # No kernel writes tokens, so each step yields these.
    runner._sampled.fill_(1)
    engine = engine_on(runner, options.on("cuda"))
    for index in range(ROWS):
        request = Request(str(index), 1, tuple([2] * 20), 20, GREEDY)
        reservation = engine.scheduler.reserve(request)
        assert reservation is not None
        engine.scheduler.resume(request, 1, reservation.hold)
    return engine.step


def counted(step: Callable[[], object]) -> dict[str, int]:
    """Launches of one step, which was launched before."""
    for _ in range(3):
        step()
    before = Launcher.launched
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as by_triton:
        step()
    return {"launched": Launcher.launched - before, "by_triton": by_triton.call_count}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    driver.set_active(HostDriver())
    steps = {"mixed": mixed(folder, 0), "pieces": mixed(folder, 512), "decode": decode(folder)}
    print(json.dumps({name: counted(step) for name, step in steps.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
