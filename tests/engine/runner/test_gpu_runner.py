"""The GPU's runner on CPU tensors, its kernels interpreted: the tokens are those of the CPU's runner."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from gpu_scene import OPTIONS, gpu_runner, greedy, interpreted, names_of, needs_gpu, requests_of

from kvrelay.engine.build import device_of, engine_on
from kvrelay.engine.config import CacheDtype, EngineConfig, PrefillKernel
from kvrelay.engine.kv.writes import KVWrites
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.engine.runner.graphs import batch_sizes
from support.attention_packages import install
from support.launches import Launches, RecordedGraphs
from support.serving import check_same, reports_of, run, scores_of, tokens_of

ModelOf = Callable[..., Path]


def serve(runner: Runner, asked: Sequence[Request]) -> list[list[int]]:
    """The completion of each request, all served together."""
    return list(run(engine_on(runner, OPTIONS), asked).values())


def on_cpu(folder: Path, asked: Sequence[Request], **options: Any) -> list[list[int]]:
    """The completions that the CPU's runner yields."""
    return serve(build_cpu_runner(folder, "float32", replace(OPTIONS, **options)), asked)


@interpreted
@pytest.mark.parametrize(
    ("architecture", "kv_dtype", "layers"),
    [
        ("llama", "auto", 1),
        pytest.param("llama", "auto", 2, marks=pytest.mark.more),
        pytest.param("mistral", "int8", 2, marks=pytest.mark.slow),
        pytest.param("qwen2", "auto", 2, marks=pytest.mark.slow),
        pytest.param("qwen3", "int8", 2, marks=pytest.mark.more),
    ],
)
@pytest.mark.more
def test_tokens_equal_the_cpus(model_of: ModelOf, architecture: str, kv_dtype: CacheDtype, layers: int) -> None:
    """Chunked prompts, mixed steps, decode a step ahead, windows; greedy and drawn; once, more sequences than rows."""
    folder = model_of(architecture, num_hidden_layers=layers)
    likely = on_cpu(folder, requests_of((7, greedy(3))))[0]
    stop = frozenset({likely[1], 5})
    asked = requests_of(
        (7, replace(greedy(5), min_tokens=4, stop_token_ids=stop)),
        (60, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=3)),
        (16, replace(greedy(4), stop_token_ids=stop)),
        (17, SamplingParams(max_tokens=3, temperature=0.7, top_k=20, min_p=0.01, seed=2**63)),
    )
    asked = asked if architecture == "llama" else asked[:2]
    runner = gpu_runner(folder, replace(OPTIONS, kv_dtype=kv_dtype))
    assert runner.pool.tensor.dtype == (torch.int8 if kv_dtype == "int8" else torch.float32)
    assert serve(runner, asked) == on_cpu(folder, asked, kv_dtype=kv_dtype)


@pytest.mark.more
@interpreted
@pytest.mark.parametrize(
    ("architecture", "layers"), [("mistral", 1), pytest.param("gemma3_text", 2, marks=pytest.mark.more)]
)
def test_steps_planned_ahead_never_read_what_a_window_has_given_up(
    model_of: ModelOf, architecture: str, layers: int
) -> None:
    """Blocks are freed while the next step is planned; the pools have few, so others take them at once."""
    folder = model_of(architecture, sliding_window=11, num_hidden_layers=layers)
    asked = requests_of((40, greedy(6)), (5, greedy(14)), (20, greedy(8)))
    options = replace(OPTIONS, max_batch_tokens=32, kv_memory_bytes=2**17).on("cuda")
    engine = engine_on(gpu_runner(folder, options), options)
    assert list(run(engine, asked).values()) == on_cpu(folder, asked)
    engine.scheduler.check_integrity(idle=True)


@pytest.mark.more
@interpreted
@pytest.mark.parametrize("faster", ["triton", pytest.param("varlen_attn", marks=pytest.mark.slow)])
def test_auto_serves_by_what_was_fastest_at_warm_up(
    faster: PrefillKernel, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each candidate is timed by a step. The fastest kernel serves later steps too, which repeat launches. The tokens
    equal the CPU's; slower kernels are let go."""
    folder = model_of("llama", num_hidden_layers=2)
    install(monkeypatch)
    now, times = 0.0, {"triton": 2.0, "varlen_attn": 1.0 if faster == "varlen_attn" else 3.0}

    def slowed(plan: Callable[..., Any]) -> Callable[..., Any]:
        def slow_plan(candidate: Any, *args: Any) -> Any:
            nonlocal now
            now += times[candidate.name]
            return plan(candidate, *args)

        return slow_plan

    monkeypatch.setattr("kvrelay.engine.runner.gpu.time", SimpleNamespace(perf_counter=lambda: now))
    options = replace(OPTIONS, prefill_attention="auto", max_sequences=1, max_batch_tokens=16)
    runner = gpu_runner(folder, options, "float16", RecordedGraphs())
    assert [candidate.name for candidate in runner.attention.candidates] == ["triton", "varlen_attn"]
    held = WeakSet(runner.attention.candidates)
    for kind in map(type, held):
        monkeypatch.setattr(kind, "plan", slowed(kind.plan))
    runner.warm_up()
    assert runner.prefill_attention == faster
    gc.collect()
    assert [candidate.name for candidate in held] == [faster]
    asked = requests_of((40, greedy(3)))
    assert list(run(engine_on(runner, options), asked).values()) == on_cpu(folder, asked)


@pytest.mark.slow
@interpreted
def test_special_rows_equal_the_cpus(one_layer: Path) -> None:
    """Penalties, bias, bad words, min_tokens and log-probabilities, beside a plain row; prompts in chunks."""
    plain = greedy(6)
    likely = on_cpu(one_layer, requests_of((7, plain)))[0]
    stop = frozenset({likely[0]})
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    words = ((likely[1],), tuple(likely[:3]))
    asked = requests_of(
        (7, replace(plain, logprobs=3, min_tokens=3, stop_token_ids=stop, bad_words=words)),
        (55, SamplingParams(max_tokens=5, seed=3, top_p=0.9, prompt_logprobs=2, logprobs=0, **penalties)),
        (16, plain),
        (20, SamplingParams(max_tokens=5, seed=9, logit_bias=((5, 30.0), (6, 29.0)))),
    )
    runners = gpu_runner(one_layer), build_cpu_runner(one_layer, "float32", OPTIONS)
    found, expected = (reports_of(engine_on(runner, OPTIONS), asked) for runner in runners)
    check_same(found, expected)
    assert [len(scores_of(reports)) for reports in found.values()] == [6, 54 + 5, 0, 0]
    tokens = tokens_of(found)
    assert set(tokens["3"]) <= {5, 6}
    assert likely[1] not in tokens["0"]


@pytest.mark.more
@interpreted
def test_decode_runs_on_the_smallest_graph_and_padding_harms_nothing(one_layer: Path) -> None:
    """A graph repeats recorded operations on the same tensors with the same numbers, and runs no Python of a step."""
    graphs = RecordedGraphs()
    runner = gpu_runner(one_layer, OPTIONS, graphs=graphs)
    runner.warm_up()
    assert batch_sizes(3) == (1, 2, 3)
    assert len(graphs.captured) == 3
    of_three, _, of_one = graphs.captured
    assert runner.pool.tensor.isnan().all(), "nothing of the warm-up is kept"
    asked = requests_of((5, greedy(2)), (9, greedy(5)), (5, greedy(2)))
    # One sequence more than fits a graph's size is served by a size above it: here 3 of them, then 1.
    assert serve(runner, asked) == on_cpu(one_layer, asked)
    assert {graphs.captured.index(replayed) for replayed in graphs.replayed} == {0, 2}
    assert [launch.name for launch in of_one.kernels] == [launch.name for launch in of_three.kernels]
    asked = requests_of((9, SamplingParams(max_tokens=4, seed=2, logprobs=2, repetition_penalty=1.5)), (9, greedy(5)))
    expected = reports_of(engine_on(build_cpu_runner(one_layer, "float32", OPTIONS), OPTIONS), asked)
    check_same(reports_of(engine_on(runner, OPTIONS), asked), expected)


class MarkedRunner(GpuRunner):
    """Notes how many operations were recorded when it marks a step's KV writes."""

    launches: Launches
    marks: list[int]

    def _mark(self) -> KVWrites:
        self.marks.append(len(self.launches.all))
        return super()._mark()


@interpreted
@pytest.mark.parametrize(("length", "last"), [(7, True), (60, False), (1, True)])
@pytest.mark.some(1)
def test_the_mark_of_a_step_comes_behind_all_that_writes_kv_and_before_the_sampling(
    one_layer: Path, length: int, last: bool
) -> None:
    """A chunk's KV may therefore be sent before logits and tokens are computed; a decode step's can't, as it is one
    graph."""
    plain = gpu_runner(one_layer)
    runner = MarkedRunner(plain.spec, plain.model, plain.cache_layout, plain.pools, OPTIONS)
    engine = engine_on(runner, OPTIONS)
    engine.scheduler.add(requests_of((length, greedy(1)))[0])
    with Launches() as launches:
        runner.launches, runner.marks = launches, []
        assert engine.runner.launch(engine.scheduler.plan()).written.ended
    (mark,) = runner.marks
    storage = runner.pool.bytes.untyped_storage().data_ptr()
    into = [
        index
        for index, launch in enumerate(launches.all)
        if launch.specialization
        and "write" in launch.name
        and storage in [tensor.untyped_storage().data_ptr() for tensor in launch.given]
    ]
    assert len(into) == plain.model.config.layers
    assert max(into) < mark
    sampled = [index for index, launch in enumerate(launches.all) if launch.name == "choose_kernel"]
    assert bool(sampled) == last
    if length > 1:
        assert all(mark < index for index in sampled)


@pytest.mark.more
@interpreted
def test_a_decode_step_has_few_launches(model_of: ModelOf) -> None:
    """Only the graph's launches count. A step also copies its inputs to the device before it, and its tokens back after
    it. The models have 16 bits, because logits in 32 bits need no cast."""
    counted: list[Counter[str]] = []
    for layers in (1, 2):
        graphs = RecordedGraphs()
        folder = model_of("llama", num_hidden_layers=layers)
        gpu_runner(folder, replace(OPTIONS, max_sequences=1), "float16", graphs).warm_up()
        (graph,) = graphs.captured
        counted.append(Counter(names_of(graph)))
    of_a_layer = counted[1] - counted[0]
    outside = counted[0] - of_a_layer
    assert of_a_layer.total() <= 9, of_a_layer
    assert outside.total() <= 8, outside


def test_sizes_of_graphs_waste_little() -> None:
    for most in (1, 2, 3, 8, 20, 64, 256, 300, 1000):
        sizes = batch_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            size = next(size for size in sizes if size >= rows)
            assert size - rows <= max(rows // 4, 7)


def test_a_device_that_is_asked_for_must_be_there_and_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device is 'tpu'; allowed: auto, cpu, cuda"):
        EngineConfig(device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device_of("auto") == device_of("cpu") == "cpu"
    absent = r"device is 'cuda', but torch .* finds no GPU \(CUDA_VISIBLE_DEVICES is '3'\)"
    with pytest.raises(ValueError, match=absent):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert device_of("auto") == "cpu"
    with pytest.raises(ValueError, match=r"Tesla V100 has compute capability 7\.0.*allowed: auto, cpu"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device_of("auto") == device_of("cuda") == "cuda"


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_with_graphs(model_of: ModelOf) -> None:
    folder = model_of("qwen3")
    runner = build_gpu_runner(folder, "float32", replace(OPTIONS, graph_tokens=20))
    runner.warm_up()
    asked = requests_of(*[(length, greedy(20)) for length in (5, 60, 33, 16)])
    assert serve(runner, asked) == on_cpu(folder, asked)
