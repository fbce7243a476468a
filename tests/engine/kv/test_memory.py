"""The memory that a KV pool of `auto` takes: never more than is there, and never what another worker counts on."""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv import memory as of_device
from kvrelay.engine.kv.layout import CacheLayout, KVLayout
from kvrelay.engine.kv.memory import HostMemory, make_pools, pool_bytes
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import build_gpu_runner

GIB = 2**30
LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=32, dtype="bfloat16", order="HND")
"""KV layout of Llama-3.1-8B: 128 KiB per token."""


@dataclass
class FakeMemory:
    """A device with fixed figures."""

    all: int
    idle: int
    own: int

    def total(self) -> int:
        return self.all

    def free(self) -> int:
        return self.idle

    def used(self) -> int:
        return self.own

    def settle(self) -> None:
        """Does nothing: a fake device keeps no memory."""


def size(memory: FakeMemory, options: EngineConfig, later: int = 0, context: int = 131072) -> float:
    """GiB of the pool."""
    return pool_bytes(CacheLayout.of(LAYOUT), options, context, memory, later) / GIB


GPU = EngineConfig().on("cuda", 80 * GIB)
CPU = EngineConfig().on("cpu")


@pytest.mark.parametrize(
    ("memory", "options", "later", "expected"),
    [
        (FakeMemory(80 * GIB, 62 * GIB, 16 * GIB), GPU, 2 * GIB, 54.0),  # 0.9 of what is free
        (FakeMemory(80 * GIB, 30 * GIB, 16 * GIB), GPU, 0, 27.0),  # others use the GPU too
        (FakeMemory(80 * GIB, 60 * GIB, 10 * GIB), EngineConfig(memory_part=0.5).on("cuda"), 0, 27.0),  # half a GPU
        (FakeMemory(80 * GIB, 60 * GIB, 10 * GIB), EngineConfig(memory_share=0.5).on("cuda"), 0, 30.0),
        (FakeMemory(24 * GIB, 20 * GIB, 2 * GIB), EngineConfig(memory_part=0.5).on("cpu"), 0, 5.0),
    ],
)
def test_a_pool_takes_its_share_of_what_is_left(
    memory: FakeMemory, options: EngineConfig, later: int, expected: float
) -> None:
    assert size(memory, options, later) == pytest.approx(expected)


def test_a_small_models_pool_is_no_larger_than_its_contexts_can_use() -> None:
    memory = FakeMemory(512 * GIB, 500 * GIB, GIB)
    assert size(memory, CPU, context=4096) == pytest.approx(16 * 4096 * 128 * 2**10 / GIB)
    assert size(memory, GPU, context=1024) == pytest.approx(256 * 1024 * 128 * 2**10 / GIB)


def test_a_worker_without_memory_for_kv_says_what_takes_it() -> None:
    with pytest.raises(ValueError, match=r"kv_memory_bytes is auto; no memory is left.*12\.00 GiB are this worker's"):
        size(FakeMemory(24 * GIB, 4 * GIB, 16 * GIB), EngineConfig(memory_part=0.5).on("cpu"))


def test_workers_of_one_machine_take_memory_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers start at once, where others use most of the memory: together they take less than is free."""
    monkeypatch.setattr(of_device.tempfile, "gettempdir", lambda: str(tmp_path))
    small = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    free, taken = 64 * small.block_bytes, []
    together = threading.Barrier(2)

    @dataclass
    class Shared(FakeMemory):
        def free(self) -> int:
            found = free - sum(taken)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.2)  # for another worker to look before this one takes its part
            together.reset()
            return found

    def allocate(layout: KVLayout, blocks: int, device: str) -> int:
        taken.append(blocks * layout.block_bytes)
        return blocks

    monkeypatch.setattr(of_device, "allocate_pool", allocate)
    start = threading.Barrier(4)

    def worker() -> None:
        start.wait()
        make_pools(CacheLayout.of(small), EngineConfig(memory_part=0.25).on("cpu"), 10**6, Shared(10**9, 0, 0))

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken, reverse=True) == [free // 2, free // 4, free // 8, free // 16]


def test_what_lies_in_the_place_of_the_lock_keeps_no_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may write to the folder of temporary files can put something there."""
    monkeypatch.setattr(of_device.tempfile, "gettempdir", lambda: str(tmp_path))
    lock = tmp_path / f"kvrelay-memory-{os.getuid()}.lock"
    lock.mkdir()
    small = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    (pool,) = make_pools(CacheLayout.of(small), CPU, 64, FakeMemory(2**20, 2**20, 0))
    assert pool.num_blocks
    assert str(lock) in caplog.text


@pytest.mark.parametrize(
    ("own", "seen"), [("/pods/one", "pods"), ("/kubepods/pod1/abc", ".")], ids=["on a host", "in a container"]
)
def test_control_groups_bound_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, seen: str
) -> None:
    """The machine has 64 GiB, 40 of them available. A container sees its group as the root."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"0::{own}\n")
    group = tmp_path / "cgroup" / seen
    group.mkdir(parents=True)
    memory = HostMemory(tmp_path / "proc", tmp_path / "cgroup")
    for limit, expected in ((str(8 * GIB), (8 * GIB, 5 * GIB)), ("max", (64 * GIB, 40 * GIB))):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{5 * GIB}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
        assert (memory.total(), memory.free()) == expected


def test_this_machine_has_more_memory_than_this_process_uses() -> None:
    memory = HostMemory()
    assert 0 < memory.used() < memory.total()
    assert 0 < memory.free() <= memory.total()


def test_a_cpu_worker_sizes_its_pool_by_the_memory_that_is_left(one_layer: Path) -> None:
    runner = build_cpu_runner(one_layer, "float32", EngineConfig(threads=1), memory=FakeMemory(2**30, 2**20, 0))
    assert runner.pool.num_blocks == 2**19 // runner.layout.block_bytes
    assert (runner.layout.block_size, runner.spec.context_limit) == (
        16,
        "pool" if runner.pool.num_tokens < 1024 else "model",
    )


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
def test_a_gpu_worker_measures_its_workspaces_before_it_takes_the_rest(one_layer: Path) -> None:
    """The measuring runner and its pool are gone when the memory is shared out."""

    class Device(FakeMemory):
        """A device whose use grows by 4 MiB beyond the pool when the first runner has warmed up, and settles back."""

        def __init__(self) -> None:
            super().__init__(64 * 2**20, 60 * 2**20, 4 * 2**20)
            self.figures: Iterator[int] = iter((4 * 2**20, 9 * 2**20, 4 * 2**20))

        def used(self) -> int:
            return next(self.figures)

    options = EngineConfig(max_batch_tokens=64, max_sequences=2, threads=1)
    runner = build_gpu_runner(one_layer, "float32", options, device="cpu", memory=Device())
    layout = runner.layout
    measured = 5 * 2**20 - layout.block_bytes  # a step of 64 tokens takes one block
    assert layout.block_size == 64
    most = 256 * 1024 * layout.token_bytes
    assert runner.pool.num_blocks == min(int(0.9 * (60 * 2**20 - measured)), most) // layout.block_bytes
    assert (runner.spec.max_context, runner.spec.context_limit) == (1024, "model")


OUT = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)


A_STEP, A_POOL = "models.fast.decoder.Decoder.forward", "kv.pool.KVPool.__init__"


def no_memory(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError(OUT)


@pytest.mark.parametrize(
    ("where", "kv_bytes", "told"),
    [
        ("runner.gpu.load_weights", 2**22, r"the weights of .* in float32: "),
        (A_STEP, 0, r"steps of max_batch_tokens 32 and max_sequences 2 beside \d+ bytes of KV"),
        (A_STEP, 2**22, r"steps of max_batch_tokens 32 and max_sequences 2 beside 4194304 bytes"),
        ("runner.gpu.InputBuffers", 0, "buffers of max_sequences 2 beside the weights: "),
        ("runner.gpu.InputBuffers", 2**22, "buffers beside 4194304 bytes of KV"),
        (A_POOL, 2**22, "kv_memory_bytes is 4194304"),
    ],
)
def test_each_failure_says_what_asked_for_memory(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch, where: str, kv_bytes: int, told: str
) -> None:
    """Weights, then what a step needs, then the pool; whichever finds no memory is named, with how much it asked."""
    monkeypatch.setattr(f"kvrelay.engine.{where}", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30, 80 * 2**30))
    options = EngineConfig(kv_memory_bytes=kv_bytes, block_size=32, max_batch_tokens=32, max_sequences=2, threads=1)
    memory = FakeMemory(80 * GIB, 3 * GIB, GIB)
    with pytest.raises(ValueError, match=told) as refused:
        build_gpu_runner(one_layer, "float32", options, device="cpu", memory=memory).warm_up()
    if where != A_POOL:
        assert "Tried to allocate 1.50 GiB" in str(refused.value)
        assert "were free before it" in str(refused.value)


def test_steps_are_larger_on_larger_devices_unless_their_size_is_given() -> None:
    found = [EngineConfig().on("cpu"), EngineConfig().on("cuda", 24 * GIB), EngineConfig().on("cuda", 80 * GIB)]
    sizes = [(each.max_batch_tokens, each.max_sequences) for each in found]
    assert sizes == sorted(set(sizes))
    given = EngineConfig(block_size=64, max_batch_tokens=128, max_sequences=5, memory_share=0.3, memory_part=0.2)
    assert given.on("cuda", 80 * GIB) == replace(given, device="cuda")
