"""A model over several ranks computes what one process computes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.degree import Degree
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from support.paged import GREEDY, PagedSequences, make_plan
from support.ranks import on_ranks, places

TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 21, 8, 300, 17, 60, 33, 250, 11]
WIDE = {"num_attention_heads": 8, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 3}


def build(folder: Path, place: Place | None = None, **options: Any) -> CpuRunner:
    config = EngineConfig(kv_memory_bytes=2**22, threads=1, **options)
    given = {} if place is None else {"place": place}
    return build_cpu_runner(folder, "float32", config, **given)


def logits_over(ranks: list[CpuRunner], tokens: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt in two chunks, as the ranks of the last stage have them together."""
    degree = ranks[0].model.place.degree
    plans = [(0, 7), (7, len(tokens))]
    return torch.cat([_chunk(ranks, degree, tokens, *plan) for plan in plans])


def _chunk(ranks: list[CpuRunner], degree: Degree, tokens: list[int], first: int, last: int) -> Tensor:
    def run(runner: CpuRunner, hidden: Tensor | None) -> Tensor:
        sequence = PagedSequences(runner).add(tokens)
        sequence.computed = first
        plan = make_plan([(sequence, last - first, GREEDY)])
        with torch.inference_mode():
            out = runner.forward(plan, hidden=hidden)
            return (runner.model.logits(out) if runner.model.place in final else out).clone()

    final = [runner.model.place for runner in ranks[-degree.tensor :]]
    found: list[Tensor | None] = [None] * degree.tensor
    for stage in range(degree.pipeline):
        runners = ranks[stage * degree.tensor : (stage + 1) * degree.tensor]
        found = on_ranks(
            [runner.model.place for runner in runners],
            lambda place, runners=runners, given=found: run(runners[place.group.place], given[place.group.place]),
        )
    return torch.cat(found, 1)


@pytest.mark.parametrize("degree", [Degree(2), Degree(4), Degree(1, 2), Degree(2, 2)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
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
