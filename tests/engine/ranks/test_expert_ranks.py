"""Ranks with whole experts compute what one process does, however they exchange rows."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from kvrelay.costs.exchange import ExchangeCosts, ExchangeShape
from kvrelay.engine.config import EngineConfig, ExpertExchange
from kvrelay.engine.degree import Degree
from kvrelay.engine.models.choice import check_ranks, is_fast
from kvrelay.engine.models.fast import spares
from kvrelay.engine.models.fast.native_experts import MEASURED_ROWS
from kvrelay.engine.models.loads import STEPS
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.process_group import GlooCollective
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.kernels.cpu.packed import PackedLinear
from support.paged import GREEDY, PagedSequences, make_plan
from support.rank_threads import ThreadCollective, on_ranks, places, shared_places
from support.stored_layouts import write_in_mxfp4

TOKENS = [7 * number % 300 + 3 for number in range(37)]
CHUNKS = (1, 20, 3, 13)
"""Lengths of the steps: with one, not all ranks have a row of their own."""
WAYS: tuple[ExpertExchange, ...] = ("all_reduce", "all_to_all")
DISPATCHED = ("qwen3_moe", "mixtral", "minimax_m2", "gpt_oss")
"""Families without an MLP beside the experts."""


def gloo_places(size: int) -> list[Place]:
    store = HashStore()

    def join(rank: int) -> Place:
        group = GlooCollective(store, rank, size, 60.0)
        return Place(Degree(size), rank, group, group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


GROUPS: dict[str, Callable[[int], list[Place]]] = {
    "threads": lambda size: places(Degree(size)),
    "shared": shared_places,
    "gloo": gloo_places,
}


def build(folder: Path, place: Place = ALONE, exchange: ExpertExchange = "auto", **options: Any) -> CpuRunner:
    size = place.degree.tensor
    config = EngineConfig(
        kv_memory_bytes=2**22,
        threads=1,
        tensor_parallel=size,
        expert_parallel=size,
        expert_exchange=exchange,
        **options,
    )
    return build_cpu_runner(folder, "float32", config, place=place)


def hidden_of(runner: CpuRunner, chunks: Sequence[int] = CHUNKS) -> Tensor:
    """Output of the layers for TOKENS."""
    sequence, found = PagedSequences(runner).add(TOKENS), list[Tensor]()
    for count in chunks:
        plan = make_plan([(sequence, count, GREEDY)], runner.cache_layout)
        with torch.inference_mode():
            found.append(runner.forward(plan).clone())
        sequence.computed += count
    return torch.cat(found)


BOTH_WAYS: list[object] = [
    ("qwen3_moe", 2, "shared", "none"),
    ("gpt_oss", 2, "shared", "none"),
    *(pytest.param(*case, "none", marks=pytest.mark.more) for case in product(DISPATCHED, (2, 4), GROUPS)),
    *(pytest.param("qwen3_moe", 2, "shared", each, marks=pytest.mark.more) for each in ("int8", "fp8")),
    pytest.param("gpt_oss", 2, "shared", "mxfp4", marks=pytest.mark.more),
]
"""Family, ranks, group and type of weights."""


@pytest.mark.parametrize(("family", "size", "group", "weights"), BOTH_WAYS)
def test_both_ways_compute_the_same_bits_and_what_one_process_computes(
    model_of: Callable[..., Path], tmp_path: Path, family: str, size: int, group: str, weights: str
) -> None:
    folder, options = model_of(family), {"quantization": weights} if weights in ("int8", "fp8") else {}
    if weights == "mxfp4":
        folder = tmp_path / "coded"
        write_in_mxfp4(model_of("gpt_oss", intermediate_size=128), folder, tmp_path / "plain")
    assert is_fast(folder, "fast", EngineConfig(tensor_parallel=size, expert_parallel=size).on("cpu"))
    case, found = GROUPS[group](size), dict[str, list[Tensor]]()
    for way in WAYS:
        ranks = on_ranks(case, partial(build, folder, exchange=way, **options))
        assert ranks[0].model.experts.exchange_of(1) == way
        found[way] = on_ranks(case, lambda place, ranks=ranks: hidden_of(ranks[place.rank]))
    expected = hidden_of(build(folder, **options))
    # The kernels round inputs of products with quantized weights, of which ranks have parts.
    bound = (1e-4 if weights == "none" else 1e-3) * max(1.0, float(expected.abs().max()))
    for hidden, other in zip(found["all_reduce"], found["all_to_all"], strict=True):
        assert torch.equal(hidden, other)
        assert torch.equal(hidden, found["all_reduce"][0])
        assert (hidden - expected).abs().max() < bound


@pytest.mark.more
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_formulas(model_of: Callable[..., Path], size: int) -> None:
    folder, case = model_of("qwen3_moe", num_hidden_layers=1), places(Degree(size))
    rows = 36
    for way in WAYS:
        ranks = on_ranks(case, partial(build, folder, exchange=way))
        groups = [place.group for place in case if isinstance(place.group, ThreadCollective)]
        for group in groups:
            group.summed.clear(), group.gathered.clear(), group.exchanged.clear()
        on_ranks(case, lambda place, ranks=ranks: hidden_of(ranks[place.rank], (rows,)))
        experts = read_config(folder).traits.experts
        hidden, top = read_config(folder).hidden_size, experts.routing.top
        sizes = ExchangeShape(size, experts.routing.experts, top, hidden)
        for rank, group in enumerate(groups):
            others = [other for other in range(size) if other != rank]
            # The first sum is that of the embedding.
            summed = sum(group.summed[1:]) * (size - 1)
            if way == "all_reduce":
                assert summed == sizes.all_reduce_bytes(rows)
                assert not group.exchanged
                continue
            assert not summed
            received = sum(groups[other].gathered[0] for other in others)
            received += sum(sent[rank] for other in others for sent in groups[other].exchanged)
            _, sent, returned = ([each.exchanged[number] for each in groups] for number in range(3))
            came = sum(sent[other][rank] for other in others) // (4 * (hidden + 2 * top))
            back = sum(returned[other][rank] for other in others) // (4 * hidden)
            assert received == sizes.all_to_all_bytes(rows, came, back)
            assert received < sizes.all_reduce_bytes(rows)


@pytest.mark.more
def test_a_step_takes_the_cheaper_way(model_of: Callable[..., Path]) -> None:
    ranks = on_ranks(case := shared_places(2), partial(build, model_of("qwen3_moe")))
    assert [rank.model.experts.exchange_of(500) for rank in ranks] == ["all_reduce"] * 2, "nothing was measured"
    on_ranks(case, lambda place: ranks[place.rank].warm_up())
    costs = [rank.model.experts.costs for rank in ranks]
    assert costs[0] == costs[1]
    assert costs[0].rows == MEASURED_ROWS
    assert min(*costs[0].all_reduce, *costs[0].all_to_all) > 0
    for rank in ranks:
        assert not rank.expert_loads.totals.any(), "what was measured isn't load"


def test_the_cheaper_way_is_that_of_the_nearest_measurements() -> None:
    costs = ExchangeCosts((1, 16, 64), (1.0, 2.0, 8.0), (3.0, 3.0, 4.0))
    assert [costs.cheaper(rows) for rows in (1, 16, 20, 30, 64, 1000)] == [
        *["all_reduce"] * 3,
        *["all_to_all"] * 3,
    ]


@pytest.mark.more
@pytest.mark.parametrize("way", WAYS)
def test_loads_of_ranks_are_those_of_one_process(model_of: Callable[..., Path], way: ExpertExchange) -> None:
    folder = model_of("qwen3_moe")
    chunks = (3, *[1] * (len(TOKENS) - 3))
    assert len(chunks) >= STEPS

    def loads_of(runner: CpuRunner) -> Any:
        hidden_of(runner, chunks[:STEPS])
        return runner.expert_loads.totals.tolist()

    expected = loads_of(build(folder))
    routing = read_config(folder).traits.experts
    assert [sum(layer) for layer in expected] == [sum(chunks[:STEPS]) * routing.routing.top] * len(expected)
    ranks = on_ranks(case := shared_places(2), partial(build, folder, exchange=way))
    assert on_ranks(case, lambda place: loads_of(ranks[place.rank])) == [expected] * 2


class Served(NamedTuple):
    """Results of a rank for tokens that all choose the same experts."""

    hidden: Tensor
    """Output of its layers."""
    slots: Any
    """[layers, ranks, slots] the expert in each slot at the end."""
    tokens: Any
    """[layers, ranks] tokens that each rank's experts have computed in the second half."""
    hashes: list[list[str]]
    """[layers][slots] hashes of the weights in its own slots."""


def slot_hashes(runner: CpuRunner) -> list[list[str]]:
    """See `Served.hashes`."""
    experts = runner.model.config.traits.experts

    def hash_of(linears: Sequence[PackedLinear], slot: int) -> str:
        parts = [part for linear in linears for part in linear.parts().values()]
        rows = [part.view(-1).view(torch.uint8).view(experts.slots, -1)[slot] for part in parts]
        return hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest()

    layers = [each for each in runner.model._layers if each.router is not None]
    return [[hash_of((each.gate_up, each.down), slot) for slot in range(experts.slots)] for each in layers]


def serve_skewed(folder: Path, case: list[Place], way: ExpertExchange, room: int, **options: Any) -> list[Served]:
    """Serves with room for so many copies on each rank."""

    def run(place: Place) -> Served:
        runner = build(folder, place, way, spare_experts=room, **options)
        sequence, found, loads = PagedSequences(runner).add([7] * 300), list[Tensor](), runner.expert_loads
        before = loads.rank_totals
        for number in range(6 * STEPS):
            plan = make_plan([(sequence, 1 + number % 2, GREEDY)], runner.cache_layout)
            with torch.inference_mode():
                found.append(runner.forward(plan).clone())
            sequence.computed += 1 + number % 2
            if number + 1 == 3 * STEPS:
                before = loads.rank_totals
        return Served(torch.cat(found), loads.slots.copy(), loads.rank_totals - before, slot_hashes(runner))

    return on_ranks(case, run)


SKEWED: tuple[tuple[str, int, ExpertExchange, str, str], ...] = (
    ("qwen3_moe", 2, "all_reduce", "shared", "none"),
    ("qwen3_moe", 2, "all_to_all", "shared", "int8"),
    ("qwen3_moe", 4, "all_to_all", "shared", "none"),
    ("qwen3_moe", 2, "all_reduce", "gloo", "none"),
    ("qwen3_moe", 2, "all_to_all", "gloo", "int4"),
    ("qwen3_moe", 4, "all_to_all", "gloo", "fp8"),
    ("qwen3_moe", 2, "all_reduce", "gloo", "w8a8"),
    ("gpt_oss", 2, "all_to_all", "gloo", "none"),
    ("gpt_oss", 2, "all_reduce", "shared", "int8"),
)
"""Family, ranks, way, group and quantization."""


@pytest.mark.more
@pytest.mark.parametrize(("family", "size", "way", "group", "quantization"), SKEWED)
def test_copies_of_experts_that_are_asked_most_share_their_tokens(
    model_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    size: int,
    way: ExpertExchange,
    group: str,
    quantization: Any,
) -> None:
    monkeypatch.setattr(spares, "LEAST_TOKENS", 1)
    folder, coded = model_of(family), {"quantization": quantization}
    [(expected, *_)] = serve_skewed(folder, [ALONE], "auto", 0, **coded)
    plain = serve_skewed(folder, GROUPS[group](size), way, 0, **coded)
    copied = serve_skewed(folder, GROUPS[group](size), way, room := 2, **coded)
    first, own = copied[0], copied[0].slots.shape[2] - room
    # The kernels round inputs of products with quantized weights. Each rank rounds its own part of them: w8a8 to 8
    # bits, by the largest number of the part, so ranks with copies are compared with ranks without.
    wanted = plain[0].hidden if quantization == "w8a8" else expected
    bound = (1e-4 if quantization == "none" else 1e-3) * max(1.0, float(wanted.abs().max()))
    for rank, served in enumerate(copied):
        assert (served.hidden - wanted).abs().max() < bound
        assert torch.equal(served.hidden, first.hidden)
        assert (served.slots == first.slots).all()
        for layer, slot in np.argwhere(served.slots[:, rank, own:] != spares.EMPTY):
            expert = served.slots[layer, rank, own + slot]
            assert served.hashes[layer][own + slot] == copied[expert // own].hashes[layer][expert % own]
    assert (first.slots[:, :, own:] != spares.EMPTY).any(), "nothing was copied"
    assert first.tokens.max(1).sum() < 0.9 * plain[0].tokens.max(1).sum()
    assert first.tokens.sum() == plain[0].tokens.sum()


@given(
    ranks=st.integers(1, 5),
    each=st.integers(1, 4),
    slots=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    skew=st.floats(0, 4),
)
def test_places_suit_the_load(ranks: int, each: int, slots: int, seed: int, skew: float) -> None:
    experts = ranks * each
    loads = np.floor(np.random.default_rng(seed).random(experts) ** skew * 1000)
    found = spares.placed(loads, ranks, min(slots, each))
    assert (found[:, :each].ravel() == np.arange(experts)).all(), "each rank has its own experts"
    for row in found:
        held = row[row != spares.EMPTY]
        assert len(set(held.tolist())) == len(held)
    own = loads.reshape(ranks, each).sum(1)
    work = spares.rank_loads(found, loads)
    assert work.max() <= own.max() + 1e-6
    assert work.sum() == pytest.approx(loads.sum())
    on, at = spares.homes(found, experts)
    assert (found[on, at] == np.arange(experts)).all()
    # What the rows of all phases together ask of the ranks.
    asked = np.stack([np.where(on == rank, loads, 0).sum() for rank in range(ranks)]) / spares.PHASES
    assert asked == pytest.approx(work)


def test_what_cannot_be_exchanged_is_refused(model_of: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"expert_exchange is 'all_to_all'; allowed: auto, all_reduce, because expert"):
        EngineConfig(tensor_parallel=2, expert_exchange="all_to_all")
    with pytest.raises(ValueError, match="spare_experts is 1; allowed: 0, because expert_parallel isn't tensor_paral"):
        EngineConfig(tensor_parallel=2, spare_experts=1)
    both: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": 2}
    named = EngineConfig(**both, expert_exchange="all_to_all")
    check_ranks(model_of("qwen3_moe"), named)
    six = model_of("qwen3_moe", num_experts=6)
    cases = (
        (model_of("glm4_moe"), named, "expert_exchange is 'all_to_all'; allowed: auto, all_reduce, because an MLP"),
        (
            model_of("qwen3_moe"),
            replace(named, model_path="general"),
            "auto, all_reduce for a model that transformers'",
        ),
        (six, EngineConfig(tensor_parallel=4, expert_parallel=4), "allowed: 1, or a divisor of the model's 6 experts"),
        (
            model_of("qwen3_moe"),
            EngineConfig(**both, spare_experts=5),
            "spare_experts is 5; allowed: 0 to 4, the experts",
        ),
        (model_of("llama"), EngineConfig(**both), "expert_parallel is 2; allowed: 1 for a model without experts"),
    )
    for folder, options, reason in cases:
        with pytest.raises(ValueError, match=reason):
            check_ranks(folder, options)
