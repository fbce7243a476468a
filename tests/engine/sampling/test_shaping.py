"""Logits change by the formulas of `kvrelay.engine.shaping`, whichever way a sequence's tokens came."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.constrain.grammar import ConstraintError
from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.plans import SHAPED_BY_LEADER
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.sampling.processors import NO_TOKEN, shape
from kvrelay.engine.sampling.sampler import Choice, Draw, choose, sample
from kvrelay.engine.sampling.shards import Shard
from kvrelay.engine.shaping import Shaping
from support.rank_threads import on_ranks, places

VOCAB = 40

tokens_of = st.lists(st.integers(0, VOCAB - 1), max_size=25)
numbers = st.floats(-2, 2, width=32)
params_of = st.builds(
    SamplingParams,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=st.floats(0.125, 4, width=32),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), numbers, max_size=5).map(lambda bias: tuple(bias.items())),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
)


def formula(logits: list[float], params: SamplingParams, prompt: list[int], completion: list[int]) -> list[float]:
    out = [value + dict(params.logit_bias).get(token, 0.0) for token, value in enumerate(logits)]
    for token in {*prompt, *completion}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(completion):
        out[token] -= params.frequency_penalty * completion.count(token) + params.presence_penalty
    for *before, last in params.bad_words:
        if not before or completion[-len(before) :] == before:
            out[last] = -math.inf
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(params_of, tokens_of, tokens_of), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_the_formulas(rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
    before = logits.tolist()
    shapings = [(row, Shaping(params, prompt, out, None)) for row, (params, prompt, out) in enumerate(rows)]
    assert shape(logits, shapings) == {}
    for row, (params, prompt, out) in enumerate(rows):
        assert logits[row].tolist() == pytest.approx(formula(before[row], params, prompt, out), abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(params_of, tokens_of.filter(bool), tokens_of, st.data())
def test_a_sequence_that_continues_elsewhere_has_the_same_logits(
    params: SamplingParams, prompt: list[int], completion: list[int], data: st.DataObject
) -> None:
    """Bit for bit: however many of the tokens were there from the start."""
    found = []
    for have in (0, len(completion), data.draw(st.integers(0, len(completion)))):
        request = Request("r", 1, (*prompt, *completion[:have]), len(prompt), params)
        shaping = Shaping.of(request, request.tokens)
        logits = torch.linspace(-3, 3, VOCAB)[None].clone()
        if shaping is not None:
            for token in completion[have:]:
                shaping.push(token)
            shape(logits, [(0, shaping)])
        found.append(logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Only:
    """A matcher that allows these tokens, or none any more."""

    def __init__(self, tokens: Sequence[int] | None) -> None:
        self.tokens = tokens

    def push(self, token: int) -> None:
        pass

    def mask(self, seconds: float = 0.0) -> NDArray[np.int32]:
        if self.tokens is None:
            raise ConstraintError("too costly")
        bits = np.zeros(64, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_constraint_leaves_what_it_allows_and_hurts_no_other_row(tensor: int) -> None:
    greedy = SamplingParams(temperature=0.0)
    matchers = [Only([3, 31, 39]), None, Only([]), Only(None), Only([0])]
    shapings = [None if matcher is None else Shaping(greedy, (), (), matcher) for matcher in matchers]
    draws = [Draw(greedy, 1, 0, shaping) for shaping in shapings]
    draws[4] = Draw(SamplingParams(seed=1, logprobs=0), 1, 0, shapings[4])
    logits = torch.arange(VOCAB, dtype=torch.float32).expand(5, -1).clone()
    logits[1, 7] = torch.nan
    true = torch.arange(VOCAB, dtype=torch.float32).log_softmax(-1)

    def of_rank(place: Place) -> Choice:
        span, shard = even_span(VOCAB, place), Shard(place, VOCAB, sample)
        # Plans tell other ranks only which rows rank 0 shapes.
        theirs = [each._replace(shaping=each.shaping and SHAPED_BY_LEADER) for each in draws]
        return choose(logits[:, span.begin : span.end].clone(), theirs if place.rank else draws, shard, shard)

    choices = on_ranks(places(Degree(tensor)), of_rank)
    first, *others = choices if tensor > 1 else [choose(logits, draws, sample)]
    check(first, true)
    assert first.refused == {2: NO_TOKEN, 3: "too costly"}
    for other in others:
        check(other, true)


def check(choice: Choice, true: Tensor) -> None:
    assert (choice.tokens[0], choice.tokens[4]) == (39, 0)
    assert choice.nonfinite == [1]
    assert list(choice.refused) == [2, 3]
    score = choice.logprobs[4]
    assert (score.logprob, score.rank) == (pytest.approx(float(true[0])), VOCAB)


def test_values_that_the_sampler_cannot_use_are_refused() -> None:
    for params, field in [
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=1e-38), "repetition_penalty is 1e-38; allowed: 0.0078125 or more"),
        (SamplingParams(top_k=2**31), "top_k is 2147483648; allowed: 0 to 2147483647"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty"),
        (SamplingParams(logit_bias=((1, math.inf),)), "logit_bias"),
        (SamplingParams(bad_words=((),)), "bad_words"),
        (SamplingParams(logprobs=21), "logprobs"),
    ]:
        with pytest.raises(ValueError, match=field):
            params.check()
