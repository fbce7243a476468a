"""Ranks choose from their parts of the vocabulary what one process chooses from all logits."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.logprobs import Scores
from kvrelay.engine.sampling.sampler import Draw, sample
from kvrelay.engine.sampling.shards import CANDIDATES, Shard
from support.rank_threads import on_ranks, places

VOCAB = 3000
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=CANDIDATES + 50),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=2500, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.02),
]


def part(logits: Tensor, place: Place) -> Tensor:
    span = even_span(logits.shape[1], place)
    return logits[:, span.begin : span.end].clone()


@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_ranks_draw_the_tokens_of_one_process(tensor: int, spread: float) -> None:
    logits = torch.randn(8 * len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(0)) * spread
    # Equal logits on several ranks.
    logits[:, 7::500] = logits.amax(1, keepdim=True)
    draws = [
        Draw(SamplingParams(**{**{name: getattr(params, name) for name in NAMES}, "seed": seed}), 10 * seed, 0)
        for seed in range(8)
        for params in PARAMS
    ]
    expected = sample(logits.clone(), draws)
    found = on_ranks(places(Degree(tensor)), lambda place: Shard(place, VOCAB, sample)(part(logits, place), draws))
    assert found == [expected] * tensor


NAMES = ("temperature", "top_k", "top_p", "min_p")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_arent_finite_on_one_rank_are_told_by_all(bad: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, VOCAB - 1] = bad
    draws = [Draw(SamplingParams(temperature=1.0, top_p=0.9), 0, 0)] * 3
    for _, nonfinite in on_ranks(
        places(Degree(2)), lambda place: Shard(place, VOCAB, sample)(part(logits, place), draws)
    ):
        assert nonfinite == [1]


def test_ranks_score_as_one_process_does() -> None:
    logits, tokens = torch.randn(4, VOCAB), torch.tensor([0, 1499, 1500, VOCAB - 1])
    tops = [0, 1, 5, 20]
    expected = Scores(logits.clone(), tokens, tops).read()
    found = on_ranks(
        places(Degree(4)), lambda place: Shard(place, VOCAB, sample).scores(part(logits, place), tokens, tops).read()
    )
    for scores in found:
        for mine, other in zip(scores, expected, strict=True):
            assert mine[1:3] == other[1:3]
            assert [mine[0], *mine[3]] == pytest.approx([other[0], *other[3]], abs=1e-5)
