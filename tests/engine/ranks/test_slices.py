"""A model over several ranks computes what one process computes."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import Degree
from kvrelay.engine.models.fast.decoder import Decoder
from kvrelay.engine.models.fast.loader import Making, load_weights
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.models.fast.slices import Slices, share_hashes
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import check_degree, read_config
from kvrelay.engine.ranks.collective import ALONE, CollectiveError, Place
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.kernels.cpu.reduce import ALL_REDUCE
from kvrelay.models import resolve
from support.checkpoints import WITH_EXPERTS
from support.gguf_files import write_gguf
from support.paged import GREEDY, PagedSequences, make_plan
from support.rank_threads import on_ranks, places, shared_places
from support.stored_layouts import LAYOUTS, SHAPE, quantized

TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8, 300, 17, 60, 33, 250, 11]
WIDE = {"num_attention_heads": 8, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 3}


def build(folder: Path, place: Place = ALONE, **options: Any) -> CpuRunner:
    config = EngineConfig(kv_memory_bytes=2**22, threads=1, **options)
    return build_cpu_runner(folder, "float32", config, place=place)


def logits_over(ranks: list[CpuRunner], tokens: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt in two chunks, as the ranks of the first stage have them together."""
    degree = ranks[0].model.place.degree
    return torch.cat([_chunk(ranks, degree, tokens, *plan) for plan in ((0, 7), (7, len(tokens)))])


def _chunk(ranks: list[CpuRunner], degree: Degree, tokens: list[int], first: int, last: int) -> Tensor:
    hidden: list[Tensor | None] = [None] * degree.tensor

    def run(place: Place, runners: list[CpuRunner], logits: bool = False) -> Tensor:
        runner, given = runners[place.rank % degree.tensor], hidden[place.rank % degree.tensor]
        sequence = PagedSequences(runner).add(tokens)
        sequence.computed = first
        plan = make_plan([(sequence, last - first, GREEDY)], runner.cache_layout)
        with torch.inference_mode():
            if logits and given is not None:
                return runner.model.logits(given).clone()
            return runner.forward(plan, hidden=given).clone()

    stages = [ranks[at : at + degree.tensor] for at in range(0, len(ranks), degree.tensor)]
    for runners in stages:
        hidden[:] = on_ranks([runner.model.place for runner in runners], partial(run, runners=runners))
    found = on_ranks([runner.model.place for runner in stages[0]], partial(run, runners=stages[0], logits=True))
    return torch.cat(found, 1)


@pytest.mark.parametrize("degree", [Degree(2), Degree(4), Degree(1, 2), Degree(2, 2)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.some(6)
def test_ranks_compute_one_processs_logits(model_of: Callable[..., Path], kv_heads: int, degree: Degree) -> None:
    folder = model_of("llama", num_key_value_heads=kv_heads, **WIDE)
    whole = build(folder)
    expected = logits_over([whole], TOKENS)
    ranks = on_ranks(places(degree), partial(build, folder))
    found = logits_over(ranks, TOKENS)
    assert (found - expected).abs().max() < 1e-4
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert {runner.spec for runner in ranks} == {whole.spec}
    assert {runner.whole_cache_layout for runner in ranks} == {whole.cache_layout}


# Families that differ where ranks do: joined tensors, biases, interleaved heads, joint norms, parallel blocks.
@pytest.mark.parametrize(
    "family",
    [
        *("phi3", "glm4", "olmo2", "olmo3", "starcoder2", "cohere2", "gemma3_text", "qwen2", "granite", "seed_oss"),
        *WITH_EXPERTS,
    ],
)
@pytest.mark.parametrize(
    "decoder",
    [*(pytest.param(name, marks=pytest.mark.more) for name in ("torch", "native")), "native with shared memory"],
)
@pytest.mark.some(5)
def test_ranks_of_each_family_compute_one_processs_logits(
    model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, decoder: str
) -> None:
    if decoder == "torch" and family in WITH_EXPERTS:
        pytest.skip("experts need the native kernels")
    folder = model_of(family)
    expected = logits_over([build(folder)], TOKENS)
    if decoder == "torch":
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
        cases = [places(Degree(2)), places(Degree(4, 2))]
    else:
        # With four ranks, two have the same KV head.
        cases = [places(Degree(size)) if decoder == "native" else shared_places(size) for size in (2, 4)]
    for case in cases:
        ranks = on_ranks(case, partial(build, folder))
        assert {type(rank.model) for rank in ranks} == {Decoder if decoder == "torch" else NativeDecoder}
        found = logits_over(ranks, TOKENS)
        assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_states_of_ranks_are_those_of_one_process(model_of: Callable[..., Path]) -> None:
    """Programs that pause at layers for their states, and at sums."""
    folder = model_of("gemma3_text")

    def states(runner: CpuRunner) -> Tensor:
        sequence = PagedSequences(runner).add(TOKENS)
        plan = replace(make_plan([(sequence, len(TOKENS), GREEDY)], runner.cache_layout), keep=(0, 2, 3))
        return runner.launch(plan).output.states

    expected = states(build(folder))
    for case in (places(Degree(2)), shared_places(2)):
        ranks = on_ranks(case, partial(build, folder))
        for found in on_ranks(case, lambda place, ranks=ranks: states(ranks[place.rank])):
            assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_step_ends_where_a_rank_is_lost(model_of: Callable[..., Path]) -> None:
    ranks = on_ranks(case := shared_places(2), partial(build, model_of("llama", **WIDE)))
    threading.Timer(0.2, case[1].group.abort).start()
    sequence = PagedSequences(ranks[0]).add(TOKENS)
    with pytest.raises(CollectiveError, match="haven't come to rank 0: 1"):
        ranks[0].launch(make_plan([(sequence, len(TOKENS), GREEDY)]))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "w8a8"])
def test_ranks_quantize_as_one_process_does(
    model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, quantization: Any
) -> None:
    # Without native kernels both multiply by the same numbers, so only codes and scales could differ.
    monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    folder = model_of("llama", **{**WIDE, "head_dim": 32})
    expected = logits_over([build(folder, quantization=quantization)], TOKENS)
    ranks = on_ranks(places(Degree(2)), partial(build, folder, quantization=quantization))
    assert (logits_over(ranks, TOKENS) - expected).abs().max() < 1e-3


def check_quantized(folder: Path, exact: Tensor) -> None:
    """Two ranks compute a quantized model as exactly as one process does. The native kernels round weights, or inputs.

    Args:
        exact: logits without such rounding.
    """
    one = logits_over([build(folder)], TOKENS)
    ranks = logits_over(on_ranks(places(Degree(2)), partial(build, folder)), TOKENS)
    assert (ranks - exact).std() < 1.5 * (one - exact).std() + 1e-4


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.some(6)
def test_ranks_slice_quantized_checkpoints(
    model_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, native: bool
) -> None:
    if not native:
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    plain = model_of("llama", **SHAPE, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    folder, values = quantized(plain, tmp_path, layout)
    check_quantized(folder, logits_over([build(values)], TOKENS))


def share_held(held: Callable[[Place], int]) -> float:
    """The largest share of one process's weights that one of four ranks holds, by what `held` finds in bytes."""
    return max(map(held, places(Degree(4)))) / held(ALONE)


@pytest.fixture(params=[False, True], ids=["two matrices", "tied"])
def wordy(request: pytest.FixtureRequest, model_of: Callable[..., Path]) -> Path:
    """A model most of whose weights are those of its vocabulary."""
    sizes = {"vocab_size": 4096, "num_key_value_heads": 4, "intermediate_size": 256}
    return model_of("llama", **sizes, tie_word_embeddings=request.param, **WIDE)


def test_a_rank_loads_its_share_of_the_weights(wordy: Path) -> None:
    def loaded(place: Place) -> int:
        config = read_config(wordy)
        sizes: list[int] = []

        def linear(weight: Any, bias: Tensor | None) -> Any:
            sizes.append(weight.nbytes)
            return lambda x: x

        making = Making(linear, slices=Slices.of(config, place))
        weights = load_weights(Checkpoint(wordy), config, torch.float32, linear, making=making)
        return sum(sizes) + weights.embedding.nbytes

    assert share_held(loaded) <= 0.27


def test_a_native_decoder_holds_its_share_of_the_weights(wordy: Path) -> None:
    whole = build(wordy)
    ranks = on_ranks(places(Degree(4)), partial(build, wordy))

    def held(place: Place) -> int:
        model = (whole if place is ALONE else ranks[place.rank]).model
        parts = [model.embedding, *(linear.packed for linear in model.linears())]
        return sum(part.nbytes for part in parts if part is not None)

    assert share_held(held) <= 0.27


@pytest.mark.parametrize("decoder", ["torch", "native", "native with shared memory"])
def test_a_layer_takes_two_sums_of_its_rows(
    model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    """And the embedding takes one."""
    folder = model_of("llama", **WIDE)
    if decoder == "torch":
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    shared = decoder == "native with shared memory"
    ranks = on_ranks(case := shared_places(2) if shared else places(Degree(2)), partial(build, folder))

    def summed(place: Place) -> list[int]:
        """Bytes of each part that the rank adds in a step."""
        runner, group = ranks[place.rank], place.group
        if shared:
            given = [args for kernel, args in runner.model._layer_steps if kernel == ALL_REDUCE]
            assert not any(args.type for args in given), "of float32"
            return [len(TOKENS) * args.width * 4 for args in given]
        plan = make_plan([(PagedSequences(runner).add(TOKENS), len(TOKENS), GREEDY)])
        group.summed.clear()
        with torch.inference_mode():
            runner.forward(plan)
        return group.summed

    layers, width = WIDE["num_hidden_layers"], WIDE["hidden_size"]
    assert on_ranks(case, summed) == [(1 + 2 * layers) * [len(TOKENS) * width * 4]] * 2


def test_degrees_that_dont_divide_a_model_are_refused(model_of: Callable[..., Path]) -> None:
    config = read_config(model_of("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72, head_dim=16))
    with pytest.raises(ValueError, match=r"tensor_parallel is 2; allowed: 1, 3, 9, for 9 query heads and 3 KV heads"):
        check_degree(config, Degree(2))
    with pytest.raises(ValueError, match=r"pipeline_parallel is 4; allowed: 1 to 3"):
        check_degree(config, Degree(1, 4))
    with pytest.raises(ValueError, match=r"tensor_parallel is 3; allowed: 1, for"):
        check_degree(config, Degree(3), "int4")
    check_degree(config, Degree(3, 3))


def test_ranks_share_out_the_hashes(model_of: Callable[..., Path]) -> None:
    folder = model_of("qwen3")
    expected = Checkpoint(folder).fingerprint()

    def fingerprint(place: Place) -> str:
        checkpoint = Checkpoint(folder)
        share_hashes(checkpoint, place)
        return checkpoint.fingerprint()

    assert set(on_ranks(places(Degree(3)), fingerprint)) == {expected}


def test_all_ranks_have_as_many_blocks_as_the_smallest(model_of: Callable[..., Path]) -> None:
    folder = model_of("llama", **WIDE)

    def blocks(place: Place) -> int:
        options = EngineConfig(kv_memory_bytes=2**20 * (1 + place.rank), threads=1)
        return build_cpu_runner(folder, "float32", options, place=place).pool.num_blocks

    found = on_ranks(places(Degree(2)), blocks)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.some(3)
def test_ranks_slice_gguf_files(
    model_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, native: bool
) -> None:
    if not native:
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    plain = model_of("llama", num_attention_heads=8, hidden_size=128, intermediate_size=224, rope_parameters=rope)
    folder = resolve(str(write_gguf(plain, tmp_path / "model.gguf", lambda name: kind)))
    check_quantized(folder, logits_over([build(folder, quantization="dense")], TOKENS))
