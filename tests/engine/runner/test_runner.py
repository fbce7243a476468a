"""The runner: a plan in, tokens out."""

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.kernels.cpu.library import library
from support.checkpoints import ARCHITECTURES, EOS, VOCAB_SIZE, make_tokenizer
from support.paged import GREEDY, PagedSequence, PagedSequences, make_plan, step

OPTIONS = EngineConfig(kv_memory_bytes=4 * 2**20, threads=1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def generate(runner: CpuRunner, tokens: list[int], count: int) -> list[int]:
    """One sequence alone, its prompt in one step."""
    sequence = PagedSequences(runner).add(tokens, extra=count)
    while len(sequence.tokens) < len(tokens) + count:
        step(runner, [(sequence, sequence.left, GREEDY)])
    return sequence.tokens[len(tokens) :]


def test_a_row_that_is_not_finite_fails_by_its_handle_and_hurts_no_other(llama: Path) -> None:
    runner = build_cpu_runner(llama, "float32", OPTIONS)
    expected = generate(runner, prompt(20), 5)
    sequences = PagedSequences(runner)
    sound, spoiled = sequences.add(prompt(20), extra=5), sequences.add(prompt(20), extra=5)
    step(runner, [(sound, 20, GREEDY), (spoiled, 20, GREEDY)])
    runner.pool.tensor[spoiled.blocks[0], 0, 0, 3] = torch.nan
    plan = make_plan([(sound, 1, GREEDY), (spoiled, 1, GREEDY)])
    assert runner.launch(plan).result().nonfinite == (1,)
    # The sound row can be planned again; the spoiled one's blocks go to a new sequence, not wiped.
    runner.pool.tensor[spoiled.blocks] = torch.nan
    heir = PagedSequence(prompt(20), spoiled.blocks)
    step(runner, [(sound, 1, GREEDY), (heir, 20, GREEDY)])
    while len(heir.tokens) < 25:
        step(runner, [(sequence, 1, GREEDY) for sequence in (sound, heir)])
    assert sound.tokens[20:25] == expected
    assert heir.tokens[20:] == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_spec_says_what_runs(model_of: Callable[..., Path], architecture: str) -> None:
    folder = model_of(architecture)
    runner = build_cpu_runner(folder, "bfloat16", OPTIONS)
    spec = runner.spec
    assert (spec.vocab_size, spec.dtype) == (320, "bfloat16")
    assert [spec.architecture] == json.loads((folder / "config.json").read_text())["architectures"]
    assert spec.eos_token_ids == (make_tokenizer().convert_tokens_to_ids(EOS),)
    assert runner.layout.dtype == "bfloat16"
    left = OPTIONS.kv_memory_bytes - sum(pool.nbytes for pool in runner.pools)
    # Where all layers have windows, their pools are no larger than sequences can use.
    assert 0 <= left < (runner.cache_layout.block_bytes or OPTIONS.kv_memory_bytes)


@pytest.mark.parametrize(
    ("options", "max_context", "context_limit"),
    [
        (EngineConfig(kv_memory_bytes=2**21), 1024, "model"),
        (EngineConfig(kv_memory_bytes=2**21, max_context=100), 100, "option"),
        (EngineConfig(kv_memory_bytes=2**21, max_context=5000), 1024, "model"),
        (EngineConfig(kv_memory_bytes=3 * 12288 + 5), 48, "pool"),
    ],
)
def test_max_context_is_the_least_of_model_option_and_pool(
    llama: Path, options: EngineConfig, max_context: int, context_limit: str
) -> None:
    """The last position can be computed."""
    runner = build_cpu_runner(llama, "float32", options)
    assert (runner.spec.max_context, runner.spec.context_limit) == (max_context, context_limit)
    assert len(generate(runner, prompt(max_context - 5), 5)) == 5


def test_a_pool_too_small_for_a_block_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="kv_memory_bytes is 1000; one KV block of this model takes 12288"):
        build_cpu_runner(llama, "float32", EngineConfig(kv_memory_bytes=1000))


def test_warm_up_is_quick_and_changes_no_token(llama: Path) -> None:
    runner = build_cpu_runner(llama, "float32", OPTIONS)
    expected = generate(runner, prompt(50), 10)
    started = time.thread_time()
    runner.warm_up()
    assert time.thread_time() - started < 1.0
    assert generate(runner, prompt(50), 10) == expected
    build_cpu_runner(llama, "float32", EngineConfig(kv_memory_bytes=12288, threads=1)).warm_up()


@pytest.mark.parametrize("native", [False, True])
def test_whichever_thread_steps_uses_the_configured_threads(
    llama: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's; but where the native kernels' own do the work, torch's would only be in their way."""
    if native and library() is None:
        pytest.skip("no native kernels here")
    if not native:
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    cores = len(os.sched_getaffinity(0))
    for threads, configured in ((1, 1), (2, 2), (0, cores)):
        expected = 1 if native else configured
        runner = build_cpu_runner(llama, "float32", EngineConfig(kv_memory_bytes=2**20, threads=threads))
        seen: list[int] = []

        def run(runner: CpuRunner = runner, seen: list[int] = seen) -> None:
            generate(runner, prompt(5), 1)
            seen.append(torch.get_num_threads())

        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)
        assert seen == [expected, expected]


def live_tensor_bytes() -> int:
    gc.collect()
    tensors = [
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided
    ]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.more
def test_steps_keep_no_memory(llama: Path) -> None:
    """Buffers grow to the largest step and stay: a second round of the same steps leaves nothing behind."""
    runner = build_cpu_runner(llama, "float32", OPTIONS)

    def round_of_steps() -> int:
        sequences = PagedSequences(runner)
        several = [sequences.add(prompt(length, length), extra=8) for length in (30, 200, 7, 64)]
        for _ in range(8):
            step(runner, [(sequence, sequence.left, GREEDY) for sequence in several])
        return live_tensor_bytes()

    before = live_tensor_bytes()
    first = round_of_steps()
    assert round_of_steps() == first
    assert first - before < runner.pool.tensor.nbytes


def test_plans_arrays_are_not_written_to(llama: Path) -> None:
    runner = build_cpu_runner(llama, "float32", OPTIONS)
    sequence = PagedSequences(runner).add(prompt(20))
    plan = make_plan([(sequence, 20, GREEDY)])
    for array in (plan.tokens, plan.starts, plan.lengths, plan.block_tables, plan.sample, plan.generated):
        array.flags.writeable = False
    assert runner.launch(plan).result().tokens == runner.launch(plan).result().tokens
    assert np.array_equal(plan.tokens, prompt(20))
