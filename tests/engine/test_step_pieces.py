"""Steps with chunks of prompts, launched as graphs with attention between them, are the same as those launched whole.

Graphs are recorded and replayed; kernels are interpreted.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.engine.runner.pieces import step_sizes
from kvrelay.kernels.triton import sample as sample_kernel
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.launches import Launches, RecordedGraphs
from support.paged import GREEDY, PagedSequences, make_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
OPTIONS = EngineConfig(
    block_size=16, kv_memory_bytes=2**20, max_batch_tokens=48, max_sequences=3, graph_tokens=20, threads=1
)
LAYERS = 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the lanes of a block as well."""
    monkeypatch.setattr(sample_kernel, "SLICE", 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", num_hidden_layers=LAYERS)


class StepGraphs(RecordedGraphs):
    """Records the graphs of steps with chunks only: a decode step's is captured, but not recorded."""

    def __init__(self, decode_graphs: int) -> None:
        super().__init__()
        self._left = decode_graphs

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        with super().__call__() as graph:
            yield graph
        self._left -= 1
        if self._left >= 0:
            self.captured.pop()


@pytest.fixture(scope="module")
def runner(folder: Path) -> GpuRunner:
    """A runner with captured graphs: three for decode steps, and LAYERS + 1 for each of the steps of 20 and 16
    tokens."""
    plain = build_gpu_runner(folder, "float32", OPTIONS, device="cpu")
    graphs = StepGraphs(decode_graphs=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_kernel, "SLICE", 512)
        runner = GpuRunner(plain.spec, plain.model, plain.pool, OPTIONS, capture=graphs)
        runner.pool.tensor.fill_(7.0)
        runner.warm_up()
    assert (runner.pool.tensor == 7.0).all(), "the warm-up wrote KV"
    assert len(graphs.captured) == 2 * (LAYERS + 1)
    runner.graphs = graphs  # type: ignore[attr-defined]  # for the tests
    return runner


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def mixed_plan(runner: GpuRunner) -> StepPlan:
    """One decode row and a chunk of 9 tokens that follows 7 earlier ones; the KV of earlier tokens is in the pool, and
    the step before had more tokens.
    """
    sequences = PagedSequences(runner)  # type: ignore[arg-type]  # it has what they need
    decoding, chunked = sequences.add(prompt(9, 1), extra=3), sequences.add(prompt(16, 2), extra=3)
    out = runner.launch(make_plan([(decoding, 9, GREEDY), (chunked, 7, GREEDY)])).result()
    assert out.graph
    decoding.computed, chunked.computed = 9, 7
    assert out.tokens[0] is not None
    decoding.tokens.append(out.tokens[0])
    return make_plan([(decoding, 1, GREEDY), (chunked, 9, GREEDY)])


def names(launches: Launches) -> list[str]:
    return [launch.name for launch in launches.all if launch.on_device]


def test_pieces_equal_the_whole_step_to_the_bit(runner: GpuRunner) -> None:
    """The pieces launch what the whole step launches, in its order; results of padding tokens don't matter."""
    plan = mixed_plan(runner)
    pieces = runner._pieces
    assert pieces is not None
    size = pieces.size_for(plan.num_tokens)
    assert size == 16
    with torch.inference_mode():
        pieces._pieces[size].attended.fill_(torch.nan)
    step = runner.launch(plan)
    assert step.result().graph
    assert (runner._mixed.slots[plan.num_tokens : size] == -1).all(), "padding tokens write KV"
    found = pieces._pieces[size].hidden[: plan.num_tokens].clone()
    kv = runner.pool.tensor.clone()
    # The inputs of the step are still in their buffers, and its KV is written once more.
    with torch.inference_mode(), Launches() as whole:
        expected = runner._forward(runner._mixed, size, runner.attention)
    assert torch.equal(found, expected[: plan.num_tokens])
    assert found.isfinite().all()
    torch.testing.assert_close(runner.pool.tensor, kv, atol=0, rtol=0, equal_nan=True)

    graphs: Any = runner.graphs  # type: ignore[attr-defined]  # as the fixture says
    of_size = graphs.captured[-(LAYERS + 1) :]
    attended: list[list[str]] = []
    for layer in range(LAYERS):
        with torch.inference_mode(), Launches() as launches:
            runner.attention.attend(layer, pieces._pieces[size].query, pieces._pieces[size].attended)
        attended.append(names(launches))
    assert all("paged_decode_kernel" in each and "flash_prefill_kernel" in each for each in attended)
    in_turns = names(of_size[0])
    for layer in range(LAYERS):
        in_turns += attended[layer] + names(of_size[layer + 1])
    assert in_turns == names(whole)


def serve(runner: Runner, asked: list[tuple[int, SamplingParams]]) -> tuple[list[list[int]], list[list[float]], int]:
    """The completions of prompts of these lengths, served together, the scores of their prompts, and how many steps
    with chunks were launched as graphs.
    """
    engine = engine_on(runner, OPTIONS)
    graphs = 0

    def count(plan: StepPlan, out: Any, seconds: float) -> None:
        nonlocal graphs
        graphs += out.graph and plan.kind != "decode"

    engine.on_step = count
    for index, (length, params) in enumerate(asked):
        engine.scheduler.add(Request(str(index), 1, prompt(length, index), length, params))
    heard: list[list[int]] = [[] for _ in asked]
    scores: list[list[float]] = [[] for _ in asked]
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            index = int(report.sequence.request.request_id)
            scores[index] += [score.logprob for score in report.prompt_logprobs]
            if report.token is not None:
                heard[index].append(report.token)
    engine.scheduler.check_integrity()
    return heard, scores, graphs


def test_tokens_and_prompt_scores_equal_the_cpus(runner: GpuRunner, folder: Path) -> None:
    """Steps that fit a size and larger ones, decode rows beside chunks, and rows a step ahead."""
    asked = [
        (7, SamplingParams(max_tokens=6, temperature=0.0)),
        (37, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=3)),
        (13, SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1)),
        (14, SamplingParams(max_tokens=3, temperature=0.0)),
    ]
    found, scores, graphs = serve(runner, asked)
    expected, expected_scores, _ = serve(build_cpu_runner(folder, "float32", OPTIONS), asked)
    assert found == expected
    assert len(scores[2]) == 12
    assert scores[2] == pytest.approx(expected_scores[2], abs=1e-4)
    assert graphs == 2


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


def test_an_option_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="graph_tokens is 9000; allowed: 0 to 8192"):
        EngineConfig(graph_tokens=9000)
