"""The engine in 16 bits with pages of every size: on a GPU with graphs, and here interpreted in float16.

Greedy tokens of 16 bits may differ from those of float32 where two are nearly equal. So each token must be one that the
float32 model, given the same tokens before it, finds as likely as its best one, or nearly.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_scene import gpu_runner, greedy, interpreted, needs_gpu, prompt, requests_of

from kvrelay.engine.attention.triton import architecture_of
from kvrelay.engine.build import engine_on, state_proposer
from kvrelay.engine.config import Dtype, EngineConfig, SpeculationConfig, SpeculationMethod
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.kernels.triton.flash_prefill import choose_tile
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.transports.registry import available_transports
from support.guesses import Recorded
from support.handoff import HOST, content, pair
from support.heads import handed_over, wanted_by
from support.launches import RecordedGraphs
from support.paged import GREEDY, PagedSequence, PagedSequences, step
from support.serving import reports_of, run

NEARLY = 0.2
"""Largest difference of log-probabilities, whose logits have a spread of several units."""


@pytest.fixture(scope="module")
def folder(model_of: Callable[..., Path]) -> Path:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    return model_of("llama", dtype="bfloat16", **shape)


def options(block_size: int) -> EngineConfig:
    return EngineConfig(
        block_size=block_size, kv_memory_bytes=2**21, max_batch_tokens=128, max_sequences=3, threads=1, step_seconds=0
    )


def check(runner: Runner, folder: Path, block_size: int, lengths: list[int], count: int) -> None:
    asked = requests_of(*[(length, greedy(count)) for length in lengths])
    found = run(engine_on(runner, options(block_size)), asked)
    assert [len(tokens) for tokens in found.values()] == [count] * len(lengths)
    judge = build_cpu_runner(folder, "float32", options(16))
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    wholes = [(*request.tokens, *found[request.request_id]) for request in asked]
    told = reports_of(
        engine_on(judge, options(16)),
        [Request(str(index), 1, tokens, len(tokens), scored) for index, tokens in enumerate(wholes)],
    )
    for length, reports in zip(lengths, told.values(), strict=True):
        scores = [score for report in reports for score in report.prompt_logprobs][length - 1 :]
        assert len(scores) == count
        assert all(score.top_logprobs[0] - score.logprob <= NEARLY for score in scores)


def loads_by_tma(runner: GpuRunner, dtype: torch.dtype) -> bool:
    """Whether prefill attention gets its pages from the copy engine."""
    layout = runner.layout
    return choose_tile(layout.head_dim, dtype, layout.block_size, architecture_of(runner.pool.tensor.device)).tma


@interpreted
@pytest.mark.parametrize(
    "block_size", [pytest.param(64, marks=pytest.mark.more), pytest.param(128, marks=pytest.mark.slow)]
)
def test_pages_that_the_copy_engine_takes_in_16_bits(folder: Path, block_size: int) -> None:
    """The prompts come in chunks, and decode steps run as recorded graphs."""
    runner = gpu_runner(folder, replace(options(block_size), graph_tokens=0), "float16", RecordedGraphs())
    assert loads_by_tma(runner, torch.float16)
    runner.warm_up()
    check(runner, folder, block_size, [150, 9], count=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_in_16_bits(folder: Path, dtype: Dtype, block_size: int, eager: bool) -> None:
    runner = build_gpu_runner(folder, dtype, options(block_size))
    assert loads_by_tma(runner, getattr(torch, dtype)) == (block_size >= 64)
    if not eager:
        runner.warm_up()
    check(runner, folder, block_size, [300, 9, 64, 127], count=24)


def steps(runner: Runner, sequence: PagedSequence, count: int) -> list[int]:
    """Decodes so many tokens."""
    for _ in range(count):
        step(runner, [(sequence, sequence.left, GREEDY)])
    return sequence.tokens[-count:]


def hand_over_beside(runner: Any, gpu: bool) -> None:
    """Link threads read blocks of the pool in which a sequence decodes: neither sees anything of the other."""
    device = "cuda" if gpu else "cpu"
    sequences = PagedSequences(runner)
    source, decoding, again = (sequences.add(prompt(length), extra=64) for length in (150, 9, 9))
    steps(runner, source, 1)
    expected = steps(runner, decoding, 40)
    table, count = source.blocks, 150
    kept = content(runner.pool, table, count)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(steps(runner, again, 40)))

    async def test() -> None:
        links = available_transports(HOST, "tcp", gpu), available_transports(HOST, "tcp", gpu)
        target = KVPool(runner.layout, 64, device)
        config = TransferConfig(frame_bytes=65536)
        async with pair(config, source=runner.pool, target=target, blocks=64, transports=links) as world:
            world.receiving.free = list(range(64))
            thread.start()
            number = 0
            while thread.is_alive() or number < 3:
                number += 1
                key = (f"r{number}", 1)
                world.announce(key, list(range(count)))
                world.compute(key, table[: runner.layout.blocks_for(count)])
                await world.ends.until(lambda key=key: key in world.ends.imported and key in world.ends.exported, 60)
                there = world.ends.imported[key][0].hold.blocks
                assert torch.equal(content(target, there, count), kept)
                world.reuse(key)

    asyncio.run(test())
    thread.join(60)
    assert found == expected


def test_link_threads_beside_a_running_step(folder: Path) -> None:
    hand_over_beside(build_cpu_runner(folder, "float32", options(16)), gpu=False)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_link_threads_beside_a_running_step(folder: Path) -> None:
    runner = build_gpu_runner(folder, "bfloat16", replace(options(16), max_batch_tokens=256))
    runner.warm_up()
    hand_over_beside(runner, gpu=True)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_heads_change_no_token(
    model_of: Callable[..., Path], heads_of: Callable[..., Path], method: SpeculationMethod
) -> None:
    """The graphs keep hidden states, prompts take several steps, and some states come from host memory."""
    model = model_of("llama", num_hidden_layers=2)
    heads = heads_of(method, **({} if method == "medusa" else {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    guesses = SpeculationConfig(method, str(heads), max_tokens=3, adaptive=False)
    wanted = replace(options(16), speculation=guesses, max_sequences=8)
    requests = requests_of((9, greedy(40)), (150, greedy(40)), (31, greedy(40)))
    recorded = []
    for runner in (
        build_gpu_runner(model, "float32", wanted),
        build_cpu_runner(model, "float32", wanted),
    ):
        engine = engine_on(runner, wanted, state_proposer(wanted, model, runner))
        engine.warm_up()
        found = Recorded(engine)
        streams = handed_over(engine, requests, wanted_by(engine))
        recorded.append((streams, found.guesses))
    (streams, found_guesses), (true_streams, true_guesses) = recorded
    assert streams == true_streams
    common = [place for place in found_guesses.keys() & true_guesses if found_guesses[place] and true_guesses[place]]
    alike = sum([found_guesses[place][0] == true_guesses[place][0] for place in common])
    # Sums in another order may choose another one of two tokens that are nearly equal.
    assert alike >= 0.9 * len(common) > 20
