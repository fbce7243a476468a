"""The GPU's runner on CPU tensors, its kernels interpreted: the tokens are those of the CPU's runner."""

import gc
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from kvrelay.engine.build import device_of, engine_on
from kvrelay.engine.config import EngineConfig, PrefillKernel
from kvrelay.engine.kv.writes import KVWrites
from kvrelay.engine.plan import TokenLogprobs
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.engine.runner.graphs import batch_sizes
from kvrelay.kernels.triton import sample as sample_kernel
from support.attention_packages import install
from support.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from support.launches import Launches, RecordedGraphs
from support.paged import GREEDY, PagedSequences, make_plan

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
OPTIONS = EngineConfig(
    block_size=16, kv_memory_bytes=2**20, max_batch_tokens=48, max_sequences=3, graph_tokens=0, threads=1
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the lanes of a block as well."""
    monkeypatch.setattr(sample_kernel, "SLICE", 512)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def gpu_runner(folder: Path, options: EngineConfig = OPTIONS) -> GpuRunner:
    return build_gpu_runner(folder, "float32", options, device="cpu")


def serve(runner: Runner, asked: list[tuple[int, SamplingParams]]) -> list[list[int]]:
    """The completions of prompts of these lengths, served together."""
    engine = engine_on(runner, OPTIONS)
    for index, (length, params) in enumerate(asked):
        engine.scheduler.add(Request(str(index), 1, prompt(length, index), length, params))
    heard: list[list[int]] = [[] for _ in asked]
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            if report.token is not None:
                heard[int(report.sequence.request.request_id)].append(report.token)
    engine.scheduler.check_integrity()
    return heard


@interpreted
def test_kv_in_int8_yields_the_cpu_runners_tokens(llama: Path) -> None:
    options = replace(OPTIONS, kv_dtype="int8")
    asked = [(40, SamplingParams(max_tokens=3, temperature=0.0)), (5, SamplingParams(max_tokens=4, temperature=0.0))]
    runner = gpu_runner(llama, options)
    assert runner.pool.tensor.dtype == torch.int8
    assert serve(runner, asked) == serve(build_cpu_runner(llama, "float32", options), asked)


def serve_scored(
    runner: Runner, asked: list[tuple[int, SamplingParams]]
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Serves as `serve` does; each result also has the log-probabilities of the prompt and of the completion."""
    engine = engine_on(runner, OPTIONS)
    heard: list[tuple[list[int], list[TokenLogprobs]]] = [([], []) for _ in asked]
    for index, (length, params) in enumerate(asked):
        engine.scheduler.add(Request(str(index), 1, prompt(length, index), length, params))
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            tokens, scores = heard[int(report.sequence.request.request_id)]
            scores += report.prompt_logprobs
            tokens += [] if report.token is None else [report.token]
            scores += [] if report.logprobs is None else [report.logprobs]
    engine.scheduler.check_integrity()
    return heard


@interpreted
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_the_cpus(architecture: str, tmp_path: Path) -> None:
    """Chunked prompts, mixed steps, decode a step ahead, windows; greedy and drawn; once, more sequences than rows."""
    folder = make_checkpoint(tmp_path / "tiny", architecture, num_hidden_layers=2)
    likely = serve(build_cpu_runner(folder, "float32", OPTIONS), [(7, SamplingParams(max_tokens=3, temperature=0.0))])[
        0
    ]
    stop = frozenset({likely[1], 5})
    asked = [
        (7, SamplingParams(max_tokens=5, temperature=0.0, min_tokens=4, stop_token_ids=stop)),
        (60, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=3)),
        (16, SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=stop)),
        (17, SamplingParams(max_tokens=3, temperature=0.7, top_k=20, min_p=0.01, seed=2**63)),
    ]
    asked = asked if architecture == "llama" else asked[:2]
    assert serve(gpu_runner(folder), asked) == serve(build_cpu_runner(folder, "float32", OPTIONS), asked)


@interpreted
@pytest.mark.parametrize("faster", [pytest.param("triton", marks=pytest.mark.slow), "varlen_attn"])
def test_auto_serves_by_what_was_fastest_at_warm_up(
    faster: PrefillKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest kernel serves later steps too, which repeat launches. The tokens equal the CPU's; slower kernels are
    let go."""
    folder = make_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2)
    install(monkeypatch)
    times = {"triton": 2.0, "varlen_attn": 1.0 if faster == "varlen_attn" else 3.0}
    monkeypatch.setattr(GpuRunner, "_time_prefill", lambda _, candidate: times[candidate.name])
    options = replace(OPTIONS, prefill_attention="auto", max_sequences=1)
    plain = build_gpu_runner(folder, "float16", options, device="cpu")
    runner = GpuRunner(plain.spec, plain.model, plain.pool, options, capture=RecordedGraphs())
    assert [candidate.name for candidate in runner.attention.candidates] == ["triton", "varlen_attn"]
    held = WeakSet(runner.attention.candidates)
    runner.warm_up()
    assert runner.prefill_attention == faster
    gc.collect()
    assert [candidate.name for candidate in held] == [faster]
    asked = [(60, SamplingParams(max_tokens=3, temperature=0.0))]
    assert serve(runner, asked) == serve(build_cpu_runner(folder, "float32", OPTIONS), asked)


@interpreted
def test_each_candidate_is_timed_by_a_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    options = replace(OPTIONS, prefill_attention="auto", max_sequences=1, max_batch_tokens=16)
    runner = build_gpu_runner(llama, "float16", options, device="cpu")
    runner.warm_up()
    assert runner.prefill_attention in {"triton", "varlen_attn"}


@interpreted
def test_special_rows_equal_the_cpus(llama: Path) -> None:
    """Penalties, bias, bad words, min_tokens and log-probabilities, beside a plain row; prompts in chunks."""
    plain = SamplingParams(max_tokens=6, temperature=0.0)
    likely = serve(build_cpu_runner(llama, "float32", OPTIONS), [(7, plain)])[0]
    stop = frozenset({likely[0]})
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    words = ((likely[1],), tuple(likely[:3]))
    asked = [
        (7, replace(plain, logprobs=3, min_tokens=3, stop_token_ids=stop, bad_words=words)),
        (55, SamplingParams(max_tokens=5, seed=3, top_p=0.9, prompt_logprobs=2, logprobs=0, **penalties)),
        (16, plain),
        (20, SamplingParams(max_tokens=5, seed=9, logit_bias=((5, 30.0), (6, 29.0)))),
    ]
    found = [serve_scored(runner, asked) for runner in (gpu_runner(llama), build_cpu_runner(llama, "float32", OPTIONS))]
    for (tokens, scores), (expected, expected_scores) in zip(*found, strict=True):
        assert tokens == expected
        assert len(scores) == len(expected_scores)
        for score, expected_score in zip(scores, expected_scores, strict=True):
            assert (score.rank, score.top_ids) == (expected_score.rank, expected_score.top_ids)
            assert score.logprob == pytest.approx(expected_score.logprob, abs=1e-4)
            assert score.top_logprobs == pytest.approx(expected_score.top_logprobs, abs=1e-4)
    assert [len(scores) for _, scores in found[0]] == [6, 54 + 5, 0, 0]
    assert set(found[0][3][0]) <= {5, 6}
    assert likely[1] not in found[0][0][0]


@interpreted
def test_decode_runs_on_the_smallest_graph_and_padding_harms_nothing(llama: Path) -> None:
    """A graph repeats recorded operations on the same tensors with the same numbers, and runs no Python of a step."""
    plain = gpu_runner(llama)
    graphs = RecordedGraphs()
    runner = GpuRunner(plain.spec, plain.model, plain.pool, OPTIONS, capture=graphs)
    runner.pool.tensor.fill_(7.0)
    runner.warm_up()
    assert batch_sizes(3) == (1, 2, 3)
    assert len(graphs.captured) == 3
    of_three, _, of_one = graphs.captured
    # Nothing of the warm-up was kept.
    assert (runner.pool.tensor == 7.0).all()
    asked = [(5, SamplingParams(max_tokens=2, temperature=0.0)), (9, SamplingParams(max_tokens=5, temperature=0.0))]
    expected = serve(build_cpu_runner(llama, "float32", OPTIONS), asked)
    # One sequence more than fits a graph's size is served by a size above it: here 3 of them, then 1.
    assert serve(runner, [*asked, asked[0]])[:2] == expected
    assert {graphs.captured.index(replayed) for replayed in graphs.replayed} == {0, 2}
    assert [launch.name for launch in of_one.kernels] == [launch.name for launch in of_three.kernels]
    scored = [(9, SamplingParams(max_tokens=4, seed=2, logprobs=2, repetition_penalty=1.5)), asked[1]]
    likely, plain = serve_scored(runner, scored)
    true_likely, true_plain = serve_scored(build_cpu_runner(llama, "float32", OPTIONS), scored)
    assert (likely[0], plain) == (true_likely[0], true_plain)
    assert [score.logprob for score in likely[1]] == pytest.approx(
        [score.logprob for score in true_likely[1]], abs=1e-4
    )


class MarkedRunner(GpuRunner):
    """Notes how many operations were recorded when it marks a step's KV writes."""

    launches: Launches
    marks: list[int]

    def _mark(self) -> KVWrites:
        self.marks.append(len(self.launches.all))
        return super()._mark()


@interpreted
@pytest.mark.parametrize(("length", "last"), [(7, True), (60, False), (1, True)])
def test_the_mark_of_a_step_comes_behind_all_that_writes_kv_and_before_the_sampling(
    llama: Path, length: int, last: bool
) -> None:
    """A chunk's KV may therefore be sent before logits and tokens are computed; a decode step's can't, as it is one
    graph."""
    plain = gpu_runner(llama)
    runner = MarkedRunner(plain.spec, plain.model, plain.pool, OPTIONS)
    engine = engine_on(runner, OPTIONS)
    engine.scheduler.add(Request("r", 1, prompt(length), length, SamplingParams(max_tokens=1, temperature=0.0)))
    with Launches() as launches:
        runner.launches, runner.marks = launches, []
        assert engine.runner.launch(engine.scheduler.plan()).written.ended  # type: ignore[arg-type]  # there is a plan
    (mark,) = runner.marks
    storage = runner.pool.bytes.untyped_storage().data_ptr()
    into = [
        index
        for index, launch in enumerate(launches.all)
        if launch.specialization and "write" in launch.name and storage in map(_storage, launch.given)
    ]
    assert len(into) == plain.model.config.layers
    assert max(into) < mark
    sampled = [index for index, launch in enumerate(launches.all) if launch.name == "choose_kernel"]
    assert bool(sampled) == last
    if length > 1:
        assert all(mark < index for index in sampled)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@interpreted
def test_a_decode_step_has_few_launches(tmp_path: Path) -> None:
    """Only the graph's launches count. A step also copies its inputs to the device before it, and its tokens back after
    it."""
    counted: list[list[str]] = []
    for layers in (1, 2):
        folder = make_checkpoint(tmp_path / str(layers), "llama", num_hidden_layers=layers)
        options, graphs = replace(OPTIONS, max_sequences=1), RecordedGraphs()
        # Of 16 bits, because logits in 32 bits need no cast.
        plain = build_gpu_runner(folder, "float16", options, device="cpu")
        GpuRunner(plain.spec, plain.model, plain.pool, options, capture=graphs).warm_up()
        (graph,) = graphs.captured
        counted.append([launch.name for launch in graph.all if launch.on_device])
    one, two = counted
    of_a_layer = list((Counter(two) - Counter(one)).elements())
    outside = list((Counter(one) - Counter(of_a_layer)).elements())
    assert len(of_a_layer) <= 9, sorted(of_a_layer)
    assert len(outside) <= 8, sorted(outside)


@interpreted
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(llama: Path) -> None:
    runner = gpu_runner(llama)
    sequences = PagedSequences(runner)  # type: ignore[arg-type]  # it has what they need
    sound, spoiled = (sequences.add(prompt(10, seed), extra=3) for seed in range(2))
    first = runner.launch(make_plan([(sound, 10, GREEDY), (spoiled, 10, GREEDY)])).result()
    assert first.nonfinite == ()
    for sequence, token in zip((sound, spoiled), first.tokens, strict=True):
        sequence.computed = 10
        assert token is not None
        sequence.tokens.append(token)
    runner.pool.tensor[spoiled.blocks[0]] = torch.nan
    out = runner.launch(make_plan([(sound, 1, GREEDY), (spoiled, 1, GREEDY)])).result()
    assert out.nonfinite == (1,)
    expected = serve(
        build_cpu_runner(llama, "float32", OPTIONS), [(10, SamplingParams(max_tokens=2, temperature=0.0))]
    )[0]
    assert [sound.tokens[-1], out.tokens[0]] == expected


@interpreted
def test_what_lies_in_unused_slots_changes_nothing(llama: Path) -> None:
    asked = [(11, SamplingParams(max_tokens=3, temperature=0.0))]
    runner = gpu_runner(llama)
    expected = serve(runner, asked)
    runner.pool.tensor.fill_(torch.nan)
    assert serve(runner, asked) == expected


def test_sizes_of_graphs_waste_little() -> None:
    for most in (1, 2, 3, 8, 20, 64, 256, 300, 1000):
        sizes = batch_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            size = next(size for size in sizes if size >= rows)
            assert size - rows <= max(rows // 4, 7)


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device_of("auto") == device_of("cpu") == "cpu"
    with pytest.raises(
        ValueError, match=r"device is 'cuda', but torch .* finds no GPU \(CUDA_VISIBLE_DEVICES is '3'\)"
    ):
        device_of("cuda")


def test_a_gpu_that_is_too_old_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert device_of("auto") == "cpu"
    with pytest.raises(ValueError, match=r"Tesla V100 has compute capability 7\.0.*allowed: auto, cpu"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device_of("auto") == device_of("cuda") == "cuda"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu'; allowed: auto, cpu, cuda"):
        EngineConfig(device="tpu")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_with_graphs(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen3")
    runner = build_gpu_runner(folder, "float32", replace(OPTIONS, graph_tokens=20))
    runner.warm_up()
    asked = [(length, SamplingParams(max_tokens=20, temperature=0.0)) for length in (5, 60, 33, 16)]
    assert serve(runner, asked) == serve(build_cpu_runner(folder, "float32", OPTIONS), asked)
