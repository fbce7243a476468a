"""Steps with chunks of prompts, launched as graphs with attention between them, are the same as those launched whole.

Graphs are recorded and replayed; kernels are interpreted.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_scene
import pytest
import torch
from gpu_scene import gpu_runner, greedy, interpreted, names_of, prompt, requests_of

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner
from kvrelay.engine.runner.graphs import step_sizes
from kvrelay.engine.scheduling.progress import Progress
from support.launches import Launches, RecordedGraphs
from support.paged import GREEDY, PagedSequences, step
from support.serving import check_same, reports_of, scores_of

pytestmark = interpreted
OPTIONS = replace(gpu_scene.OPTIONS, max_sequences=2, graph_tokens=16)
LAYERS = 2


@pytest.fixture(scope="module")
def folder(model_of: Callable[..., Path]) -> Path:
    return model_of("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def graphs() -> RecordedGraphs:
    return RecordedGraphs()


@pytest.fixture(scope="module")
def runner(folder: Path, graphs: RecordedGraphs, small_blocks: None) -> GpuRunner:
    """A runner with captured graphs: two for decode steps, and LAYERS + 1 for steps of 16 tokens."""
    runner = gpu_runner(folder, OPTIONS, graphs=graphs)
    runner.warm_up()
    assert runner.pool.tensor.isnan().all(), "the warm-up wrote KV"
    assert len(graphs.captured) == 2 + LAYERS + 1
    return runner


def mixed_step(runner: GpuRunner) -> tuple[StepOutput, Launches]:
    """A step of one decode row and a chunk of 9 tokens that follows 7 earlier ones, and what it launches.

    The KV of earlier tokens is in the pool. The step before had more tokens, and so had the one before that, none of
    whose results was finite, because nobody has computed the KV that it reads.
    """
    sequences = PagedSequences(runner)
    runner.pool.tensor.fill_(torch.nan)
    spoiled = sequences.add(prompt(32))
    spoiled.computed = 16
    assert step(runner, [(spoiled, 16, GREEDY)]).nonfinite == (0,)
    decoding, chunked = sequences.add(prompt(9, 1), extra=3), sequences.add(prompt(16, 2), extra=3)
    step(runner, [(decoding, 9, GREEDY), (chunked, 7, GREEDY)])
    asked = replace(GREEDY, logprobs=5)
    with Launches() as launches:
        return step(runner, [(decoding, 1, asked), (chunked, 9, asked)]), launches


@pytest.mark.more
def test_pieces_equal_the_whole_step_to_the_bit(runner: GpuRunner, graphs: RecordedGraphs, folder: Path) -> None:
    """The pieces launch what the whole step launches, but for attention; results of padding tokens don't matter, and
    their KV is not written."""
    whole = gpu_runner(folder, replace(OPTIONS, graph_tokens=0))
    expected, of_whole = mixed_step(whole)
    found, beside = mixed_step(runner)
    assert (found.graph, expected.graph) == (True, False)
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs
    torch.testing.assert_close(runner.pool.tensor, whole.pool.tensor, atol=0, rtol=0, equal_nan=True)
    pieces = Counter(name for piece in graphs.replayed[-(LAYERS + 1) :] for name in names_of(piece))
    assert pieces + Counter(names_of(beside)) == Counter(names_of(of_whole))
    assert not {"paged_decode_kernel", "flash_prefill_kernel"} & pieces.keys()


def serve(runner: Runner, asked: list[tuple[int, SamplingParams]]) -> tuple[dict[str, list[Progress]], int]:
    """The reports of prompts of these lengths, served together, and how many steps with chunks were launched as
    graphs."""
    engine = engine_on(runner, OPTIONS)
    graphs = 0

    def count(plan: StepPlan, out: Any, seconds: float) -> None:
        nonlocal graphs
        graphs += out.graph and plan.kind != "decode"

    engine.on_step = count
    return reports_of(engine, requests_of(*asked)), graphs


@pytest.mark.slow
def test_tokens_and_prompt_scores_equal_the_cpus(runner: GpuRunner, folder: Path) -> None:
    """Steps that fit a size and larger ones, decode rows beside chunks, and rows a step ahead."""
    asked = [
        (7, greedy(6)),
        (37, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=3)),
        (13, replace(greedy(4), prompt_logprobs=1)),
        (14, greedy(3)),
    ]
    found, graphs = serve(runner, asked)
    expected, _ = serve(build_cpu_runner(folder, "float32", OPTIONS), asked)
    check_same(found, expected)
    assert len(scores_of(found["2"])) == 12
    assert graphs >= 2


def test_sizes_of_steps_are_few_and_waste_little() -> None:
    assert step_sizes(0) == ()
    for most in (1, 16, 20, 130, 512, 2048):
        sizes = step_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        assert len(sizes) <= 3 + most // 64
        for tokens in range(1, most + 1):
            size = next(size for size in sizes if size >= tokens)
            assert size - tokens <= 63
    with pytest.raises(ValueError, match="graph_tokens is 9000; allowed: 0 to 8192"):
        EngineConfig(graph_tokens=9000)
