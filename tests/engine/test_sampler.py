"""Sampling draws from the distribution that was asked for, and from nothing but (seed, position)."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.noise import exponential, noise_keys
from kvrelay.engine.sampling.sampler import Draw, sample
from kvrelay.kernels.reference import token_probabilities

LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -1.1, -2.5, -2.5, -3.0, -9.0])
DRAWS = 20_000


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.max(-1)
    return values, tokens


def draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    draws = [Draw(param, position, 0) for param, position in zip(params, positions, strict=True)]
    tokens, nonfinite = sample(logits.clone(), draws, largest)
    assert nonfinite == []
    return tokens


def many(params: SamplingParams, count: int = DRAWS) -> list[int]:
    """Tokens at the first `count` positions."""
    return draw(LOGITS.expand(count, -1), [params] * count, range(count))


def chi_square_bound(freedom: int) -> float:
    """What chi-square exceeds once in a million times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """A chi-square test; cells that expect less than 5 are put together."""
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) > 1:
        assert ((observed - expected) ** 2 / expected).sum() < chi_square_bound(len(expected) - 1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=3.0, seed=3),
        SamplingParams(temperature=1.0, top_k=1, seed=4),
        SamplingParams(temperature=1.0, top_k=2, seed=5),
        SamplingParams(temperature=0.7, top_k=5, seed=6),
        SamplingParams(temperature=1.0, top_k=100, seed=7),
        SamplingParams(temperature=1.0, top_p=0.9, seed=8),
        SamplingParams(temperature=1.0, top_p=0.3, seed=9),
        SamplingParams(temperature=2.0, top_p=0.999, seed=10),
        SamplingParams(temperature=1.0, min_p=0.1, seed=11),
        SamplingParams(temperature=1.0, min_p=1.0, seed=12),
        SamplingParams(temperature=1.3, top_k=7, top_p=0.8, min_p=0.05, seed=13),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_filtered_distribution(params: SamplingParams) -> None:
    expected = token_probabilities(LOGITS, params.temperature, params.top_k, params.top_p, params.min_p)
    assert_distributed(np.bincount(many(params), minlength=len(LOGITS)), expected.numpy())


def test_draws_at_successive_positions_and_seeds_are_independent() -> None:
    probabilities = token_probabilities(LOGITS, 1.0, 0, 1.0, 0.0).numpy()
    both = np.outer(probabilities, probabilities).ravel()
    by_position = many(SamplingParams(seed=1))
    seeds = [SamplingParams(seed=seed) for seed in range(DRAWS)]
    by_seed = draw(LOGITS.expand(DRAWS, -1), seeds, [5] * DRAWS)
    for tokens in (by_position, by_seed):
        for lag in (1, 2, 16):
            pairs = np.array(tokens[:-lag]) * len(LOGITS) + np.array(tokens[lag:])
            assert_distributed(np.bincount(pairs, minlength=len(both)), both)


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    vocab, count = 50_000, 200
    tokens = draw(torch.zeros(count, vocab), [SamplingParams(seed=3)] * count, range(count))
    counts = np.bincount(np.array(tokens) * 20 // vocab, minlength=20)
    assert_distributed(counts, np.full(20, 1 / 20))
    assert len(set(tokens)) > 190


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 8, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    params_strategy,
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 5.0]), min_size=2, max_size=40),
    st.integers(0, 2**31),
)
def test_a_token_that_the_filters_remove_is_never_drawn(
    params: SamplingParams, logits: list[float], position: int
) -> None:
    row = torch.tensor(logits)
    token = draw(row[None], [params], [position])[0]
    if params.greedy:
        assert token == int(row.argmax())
        return
    # A hair's breadth of slack where rounding decides which side of top_p a token falls on.
    slack = min(1.0, params.top_p * (1 + 1e-5))
    assert token_probabilities(row, params.temperature, params.top_k, slack, params.min_p * 0.9999)[token] > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(params_strategy, st.integers(0, 5000)), min_size=1, max_size=12), st.data())
def test_a_row_draws_the_same_whatever_it_is_batched_with(
    rows: list[tuple[SamplingParams, int]], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), 300, generator=generator) * 3
    together = draw(logits, [params for params, _ in rows], [position for _, position in rows])
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = draw(logits[order], [rows[row][0] for row in order], [rows[row][1] for row in order])
    assert [together[row] for row in order] == shuffled
    for row, (params, position) in enumerate(rows):
        assert draw(logits[row : row + 1], [params], [position]) == [together[row]]


def test_noise_is_the_same_for_ever() -> None:
    """Workers of different versions must not disagree in the middle of a stream."""
    keys = noise_keys([0, 2**64 - 1], [0, 4095])
    assert keys.tolist() == [[1293516399, -1492722385], [-510662127, 1693812791]]
    noise = exponential(noise_keys([42], [7]), np.array([0, 1, 151_935], np.int32))
    torch.testing.assert_close(noise, torch.tensor([[0.75373573, 0.52562545, 0.27316033]]), atol=0, rtol=1e-5)


def test_noise_is_exponential_down_to_its_smallest_values() -> None:
    noise = exponential(noise_keys([1] * 64, range(64)), np.arange(2**16, dtype=np.int32)).flatten().double()
    assert (noise > 0).all()
    assert abs(float(noise.mean()) - 1) < 0.005
    for bound in (1.0, 1e-2, 1e-4, 1e-5):
        expected = len(noise) * -math.expm1(-bound)
        assert abs(int((noise < bound).sum()) - expected) < 5 * math.sqrt(expected)
    # Small values are told apart, so that which of many unlikely tokens wins is not left to its id.
    smallest = noise.sort().values[:1000]
    assert len(smallest.unique()) > 990


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert draw(logits, [SamplingParams(temperature=0.0)], [0]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]]).repeat(3, 1)
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=frozenset({0, 1}), seed=1)
    draws = [Draw(params, 100, 0), Draw(params, 103, 3), Draw(params, 104, 4)]
    tokens, _ = sample(logits, draws, largest)
    assert tokens[:2] == [2, 2]
    assert tokens[2] in (0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(value: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=5)
    sound = LOGITS.repeat(3, 1)
    expected, _ = sample(sound.clone(), [Draw(params, 7, 0)] * 3, largest)
    sound[1, 3] = value
    tokens, nonfinite = sample(sound, [Draw(params, 7, 0)] * 3, largest)
    assert nonfinite == [1]
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


def test_a_stop_id_outside_the_vocabulary_does_no_harm() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({0, len(LOGITS), 2**31}))
    assert sample(LOGITS[None].clone(), [Draw(params, 7, 0)], largest) == ([1], [])
    without = SamplingParams(temperature=0.0, min_tokens=2)
    assert sample(LOGITS[None].clone(), [Draw(without, 7, 0)], largest) == ([0], [])


def test_a_row_whose_every_token_is_masked_is_told() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=frozenset(range(len(LOGITS))))
    assert sample(LOGITS[None].clone(), [Draw(params, 7, 0)], largest)[1] == [0]


def test_a_token_that_is_masked_out_is_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[0] = -torch.inf
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=1, top_k=3)):
        tokens = draw(logits.expand(500, -1), [params] * 500, range(500))
        assert 0 not in tokens


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=8))
def test_keys_of_many_rows_are_those_of_each(rows: list[tuple[int, int]]) -> None:
    """Row by row splitmix64, in Python's integers."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    seeds, positions = zip(*rows, strict=True)
    mixed = [splitmix64(splitmix64(seed) ^ position) for seed, position in rows]
    assert noise_keys(seeds, positions).view(np.uint64)[:, 0].tolist() == mixed
