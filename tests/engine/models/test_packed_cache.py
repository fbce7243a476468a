"""Packed weights on disk: the same bits as without, or a warning and the same bits."""

import dataclasses
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.models.reading import packed_cache
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.kernels.cpu.packed import PackedLinear
from support.forks import quick_start
from support.paged import logits_by

OPTIONS = EngineConfig(device="cpu", kv_memory_bytes=2**20, threads=1, quantization="int8", packed_cache_bytes=2**30)


@pytest.fixture
def models(model_of: Callable[..., Path]) -> dict[str, Path]:
    """Two checkpoints: qwen2 with biases and untied embeddings, and qwen3 with a tied embedding."""
    return {"qwen2": model_of("qwen2", tie_word_embeddings=False), "qwen3": model_of("qwen3")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "user_cache", lambda: tmp_path)
    return tmp_path / "packed"


def weights_of(folder: Path, options: EngineConfig) -> tuple[list[bytes], list[float]]:
    """All bytes of a runner's packed layers, and the logits that follow from these and from all other weights; and the
    shares of its weights that were reported."""
    shares: list[float] = []
    runner = build_cpu_runner(folder, "bfloat16", options, shares.append)
    if not isinstance(runner.model, NativeDecoder):
        pytest.skip("the native kernels can't be built here")
    tensors = [tensor for layer in runner.model.linears() for tensor in layer.parts().values()]
    tensors.append(logits_by(runner, range(20)))
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors], shares


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "w8a8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.some(4)
def test_weights_from_the_disk_are_those_that_were_packed(
    models: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, quantization: Quantization
) -> None:
    options = dataclasses.replace(OPTIONS, quantization=quantization)
    plain, _ = weights_of(models[name], dataclasses.replace(options, packed_cache_bytes=0))
    assert not cache.exists()
    assert weights_of(models[name], options)[0] == plain
    (file,) = cache.iterdir()

    def never(*_: object) -> None:
        raise AssertionError("a weight was packed again")

    monkeypatch.setattr(PackedLinear, "pack", never)
    os.utime(file, (1, 1))
    found, shares = weights_of(models[name], options)
    assert found == plain
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert file.stat().st_mtime > 1


def test_a_damaged_file_is_written_anew(models: dict[str, Path], cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in a part, in the index, in the trailer; a file that is cut short, or empty."""
    plain, _ = weights_of(models["qwen3"], OPTIONS)
    (file,) = cache.iterdir()
    whole = file.read_bytes()

    def flipped(place: int) -> bytes:
        return whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]

    for damaged in (flipped(70), flipped(len(whole) - 40), flipped(len(whole) - 12), whole[:-1], whole[: 2**15], b""):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert weights_of(models["qwen3"], OPTIONS)[0] == plain
        assert "the cache of packed weights is damaged" in caplog.text
        assert file.read_bytes() == whole


def test_the_cache_keeps_what_was_used_last(
    models: dict[str, Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights_of(models["qwen2"], OPTIONS)
    (first,) = cache.iterdir()
    os.utime(first, (1, 1))
    abandoned, fresh = cache / f"a{packed_cache.UNFINISHED}", cache / f"b{packed_cache.UNFINISHED}"
    for path in (abandoned, fresh):
        path.touch()
    os.utime(abandoned, (time.time() - 1.1 * packed_cache.ABANDONED_SECONDS,) * 2)
    room = 2 * first.stat().st_size - 1000  # for either, and not for both
    weights_of(models["qwen3"], dataclasses.replace(OPTIONS, packed_cache_bytes=room))
    (second,) = set(cache.iterdir()) - {fresh}
    assert second != first
    # A model that doesn't fit is not kept, and takes no other's place.
    with caplog.at_level(logging.WARNING):
        weights_of(models["qwen2"], dataclasses.replace(OPTIONS, packed_cache_bytes=1000))
    assert "packed_cache_bytes is 1000, less than the packed weights" in caplog.text
    assert set(cache.iterdir()) == {second, fresh}


@pytest.fixture
def small_disk() -> Iterator[None]:
    """A disk that is full soon: writing more than 20,000 bytes to a file fails."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a file in the folder's place"])
def test_a_model_starts_where_nothing_can_be_written(
    models: dict[str, Path], cache: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    if full:
        request.getfixturevalue("small_disk")
    else:
        cache.touch()
    with caplog.at_level(logging.WARNING):
        weights_of(models["qwen3"], OPTIONS)
    assert "the packed weights can't be written" in caplog.text
    assert cache.is_file() or not list(cache.iterdir()), "what was written is removed"


def killed_while_it_writes(folder: Path, cache: Path) -> None:
    """A worker's load of a model that ends before the bytes are on disk."""
    packed_cache.user_cache = lambda: cache
    packed_cache.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    build_cpu_runner(folder, "bfloat16", OPTIONS)


@pytest.mark.more
def test_what_a_killed_worker_was_writing_is_not_read(models: dict[str, Path], cache: Path) -> None:
    worker = quick_start().Process(target=killed_while_it_writes, args=(models["qwen3"], cache.parent))
    worker.start()
    worker.join(60)
    if worker.exitcode == 0:
        pytest.skip("the native kernels can't be built here")
    assert worker.exitcode == -signal.SIGKILL
    (unfinished,) = cache.iterdir()
    assert unfinished.stat().st_size > 20_000, "it was writing"
    plain, _ = weights_of(models["qwen3"], dataclasses.replace(OPTIONS, packed_cache_bytes=0))
    assert weights_of(models["qwen3"], OPTIONS)[0] == plain
    (written,) = set(cache.iterdir()) - {unfinished}
    assert weights_of(models["qwen3"], OPTIONS)[0] == plain
    # Nobody has written to it for a while: the next one who writes removes it.
    os.utime(unfinished, (1, 1))
    written.unlink()
    weights_of(models["qwen3"], OPTIONS)
    assert list(cache.iterdir()) == [written]


def test_what_is_not_quantized_at_load_is_not_cached(models: dict[str, Path], cache: Path) -> None:
    weights_of(models["qwen3"], dataclasses.replace(OPTIONS, quantization="none"))
    assert not cache.exists()
    with pytest.raises(ValueError, match="packed_cache_bytes is -1; allowed: 0 or more"):
        EngineConfig(packed_cache_bytes=-1)
