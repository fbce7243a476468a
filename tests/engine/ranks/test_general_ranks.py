"""A model of transformers' code over several ranks computes what one process computes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import Degree
from kvrelay.engine.models import loads
from kvrelay.engine.models.choice import check_ranks
from kvrelay.engine.models.general.ranks import plan
from kvrelay.engine.models.general.ranks.parts import WHOLE, Part
from kvrelay.engine.models.general.reading import load_model, read_general_config
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.report import report_on
from kvrelay.engine.runner.general import GeneralRunner, build_general_runner
from kvrelay.models import resolve
from support.general import Driver, Served
from support.general_table import OPTIONS, lines
from support.rank_threads import on_ranks, places, shared_places
from support.ranks import rank_cache
from support.tiny_models import classes, save

PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 26)), [(7 * n) % 211 + 3 for n in range(41)]]
COMPLETION = 8
CHUNK = 16
COVERING = (
    "MixtralForCausalLM",  # experts
    "DeepseekV3ForCausalLM",  # latents, shared experts
    "Qwen3NextForCausalLM",  # states
    "Gemma3ForCausalLM",  # windows, tied embeddings
    "Olmo2ForCausalLM",  # all ranks compute all KV heads
    "PhiForCausalLM",  # biases
)


def build(folder: Path, place: Place = ALONE, **options: Any) -> GeneralRunner:
    torch.manual_seed(0)
    return build_general_runner(folder, "float32", replace(OPTIONS, **options), place=place)


def ranks_of(folder: Path, cases: list[Place], **options: Any) -> list[GeneralRunner]:
    return on_ranks(cases, partial(build, folder, **{"tensor_parallel": len(cases), **options}))


def serve(runner: GeneralRunner, tokens: list[list[int]] | None = None) -> list[Served]:
    """The sequences.

    Args:
        tokens: whole sequences, for a rank that chooses no tokens.
    """
    return Driver(runner, PROMPTS, COMPLETION, tokens).serve(CHUNK, moves=True)


def check_same(folder: Path, cases: list[Place], **options: Any) -> list[GeneralRunner]:
    """Ranks yield the tokens and log-probabilities of one process; returns them."""
    one = build(folder)
    expected = serve(one)
    ranks = ranks_of(folder, cases, **options)
    given = [served.tokens for served in expected]
    found = on_ranks(cases, lambda place: serve(ranks[place.rank], given if place.rank else None))[0]
    for mine, other in zip(found, expected, strict=True):
        assert mine.tokens == other.tokens
        for scores, others in zip(mine.logprobs, other.logprobs, strict=True):
            assert scores.top_ids == others.top_ids
            assert scores.top_logprobs == pytest.approx(others.top_logprobs, abs=1e-4)
    assert {rank.spec for rank in ranks} == {one.spec}
    for rank, runner in enumerate(ranks):
        assert runner.whole_cache_layout == one.cache_layout
        assert runner.cache_layout == rank_cache(one.cache_layout, Degree(len(cases)), rank)
    return ranks


def divided() -> Iterator[object]:
    """Classes that docs/models.md says can be divided: one in `make test`, every third one in `make test-all`."""
    for number, name in enumerate(name for name, text in lines().items() if text.endswith("| yes |")):
        beyond = pytest.mark.slow if number % 3 else pytest.mark.more
        if name in COVERING:
            beyond = pytest.mark.more
        yield pytest.param(name, marks=[] if name == COVERING[0] else [beyond])


@pytest.mark.parametrize("name", list(divided()))
def test_two_ranks_serve_what_one_process_serves(name: str, tmp_path: Path) -> None:
    check_same(save(classes()[name], tmp_path), places(Degree(2)))


def test_four_ranks_share_two_kv_heads_over_shared_memory(tmp_path: Path) -> None:
    check_same(save("qwen2", tmp_path), shared_places(4))


@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.more)])
def test_whole_experts_on_ranks_compute_what_one_process_computes(ranks: int, experts: int, tmp_path: Path) -> None:
    check_same(save("mixtral", tmp_path), places(Degree(ranks)), expert_parallel=experts)


@pytest.mark.more
def test_loads_of_whole_experts_on_ranks_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several ranks have the same experts."""
    monkeypatch.setattr(loads, "STEPS", 1)
    folder, one = save("mixtral", tmp_path), build(save("mixtral", tmp_path))
    tokens = [served.tokens for served in serve(one)]
    expected = one.expert_loads.totals.tolist()
    assert sum(map(sum, expected)) > 0
    ranks = ranks_of(folder, cases := places(Degree(4)), expert_parallel=2)
    on_ranks(cases, lambda place: serve(ranks[place.rank], tokens if place.rank else None))
    for rank in ranks:
        assert rank.expert_loads.totals.tolist() == expected


def test_a_rank_holds_its_share_of_the_weights(tmp_path: Path) -> None:
    """The model has next to nothing that is whole on each rank; this also holds after the weights were packed."""
    folder = save("mixtral", tmp_path)

    def held(part: Part) -> int:
        model = load_model(read_general_config(folder), Checkpoint(folder), torch.float32, "cpu", None, part)
        return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())

    whole = held(WHOLE)
    for experts in (1, 4):
        assert all(held(Part(place, experts)) < 0.27 * whole for place in places(Degree(4)))


def test_degrees_that_dont_suit_a_model_are_refused_with_those_that_do(tmp_path: Path) -> None:
    mixtral, gpt2, lfm2, doge = (save(name, tmp_path / name) for name in ("mixtral", "gpt2", "lfm2", "doge"))
    for folder, ranks, options, reason in (
        (mixtral, 3, {}, "tensor_parallel is 3; allowed: 1, 2, 4, for 4 query heads and 2 KV heads"),
        (
            gpt2,
            2,
            {},
            "tensor_parallel is 2; allowed: 1, because GPT2LMHeadModel has no tensor-parallel plan for its layers",
        ),
        (lfm2, 2, {}, "tensor_parallel is 2; allowed: 1, because Lfm2ForCausalLM has no tensor-parallel plan for its"),
        (doge, 2, {}, "tensor_parallel is 2; allowed: 1, because the plan of DogeForCausalLM doesn't suit its code"),
        (save("llama", tmp_path / "llama"), 2, {"expert_parallel": 2}, "has no plan for whole experts"),
    ):
        with pytest.raises(ValueError, match=reason):
            ranks_of(folder, places(Degree(ranks)), **options)
    with pytest.raises(ValueError, match="expert_parallel is 2; allowed: a divisor of tensor_parallel"):
        EngineConfig(tensor_parallel=3, expert_parallel=2)
    six = save("mixtral", tmp_path / "six", num_local_experts=6)
    with pytest.raises(ValueError, match="expert_parallel is 4; allowed: 1, 2, for tensor_parallel 4 and 6 experts"):
        ranks_of(six, places(Degree(4)), expert_parallel=4)
    with pytest.raises(ValueError, match="pipeline_parallel is 2; allowed for a model that transformers' code runs: 1"):
        ranks_of(mixtral, places(Degree(1, 2)), tensor_parallel=1)


def test_a_plan_that_nobody_knows_not_to_suit_its_code_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "UNSUITED", frozenset())
    with pytest.raises(
        ValueError, match="allowed: 1, because the plan of DogeForCausalLM doesn't suit its code: The size"
    ):
        ranks_of(save("doge", tmp_path), places(Degree(2)))


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "pico"])
def test_a_report_lists_the_degrees_that_are_taken(name: str, tmp_path: Path) -> None:
    folder = resolve(name) if name == "pico" else save(name, tmp_path)
    report = report_on(folder, "float32", OPTIONS)

    def taken(**degree: int) -> bool:
        try:
            check_ranks(folder, EngineConfig(**degree))
        except ValueError:
            return False
        return True

    assert [degree for degree in range(1, 17) if taken(tensor_parallel=degree)] == list(report.tensor_parallel)
    assert [degree for degree in range(1, 17) if taken(pipeline_parallel=degree)][-1] == report.pipeline_parallel
    assert (report.tensor_parallel == (1,)) == (name == "gpt2")
