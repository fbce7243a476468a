"""Sampling draws from the distribution that was asked for, and from nothing but (seed, position)."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.engine.request import MIN_REPETITION_PENALTY, SamplingParams
from kvrelay.engine.sampling.native import NativeSampler
from kvrelay.engine.sampling.noise import exponential, noise_keys
from kvrelay.engine.sampling.sampler import Draw, Sample, choose
from kvrelay.engine.sampling.sampler import sample as in_torch
from kvrelay.engine.shaping import Shaping
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.reference import token_probabilities
from support.races import is_near

LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -1.1, -2.5, -2.5, -3.0, -9.0])
DRAWS = 10_000
ROUNDING = 2e-6
"""Relative difference of two scores that rounding may turn over: the logarithm, exponential and quotient of the kernel
and those of torch, together up to 12 units in the last place of float32."""


@pytest.fixture(scope="module")
def native(team: Team) -> Sample:
    return NativeSampler(team)


@pytest.fixture(scope="module", params=["torch", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Each way of sampling in turn; both must keep the same promises."""
    return in_torch if request.param == "torch" else request.getfixturevalue("native")


def draw(sample: Sample, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    draws = [Draw(param, position, 0) for param, position in zip(params, positions, strict=True)]
    tokens, nonfinite = sample(logits.clone(), draws)
    assert nonfinite == []
    return tokens


def many(params: SamplingParams) -> list[int]:
    """Tokens at the first DRAWS positions. (`test_the_kernel_chooses_what_torch_does` compares those of the kernel.)"""
    return draw(in_torch, LOGITS.expand(DRAWS, -1), [params] * DRAWS, range(DRAWS))


def chi_square_bound(freedom: int) -> float:
    """The value that chi-square exceeds once in a million times (Wilson and Hilferty's approximation)."""
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
@pytest.mark.some(5)
def test_tokens_are_drawn_from_the_filtered_distribution(params: SamplingParams) -> None:
    expected = token_probabilities(LOGITS, params.temperature, params.top_k, params.top_p, params.min_p)
    assert_distributed(np.bincount(many(params), minlength=len(LOGITS)), expected.numpy())


def test_draws_at_successive_positions_and_seeds_are_independent() -> None:
    probabilities = token_probabilities(LOGITS, 1.0, 0, 1.0, 0.0).numpy()
    both = np.outer(probabilities, probabilities).ravel()
    by_position = many(SamplingParams(seed=1))
    seeds = [SamplingParams(seed=seed) for seed in range(DRAWS)]
    by_seed = draw(in_torch, LOGITS.expand(DRAWS, -1), seeds, [5] * DRAWS)
    for tokens in (by_position, by_seed):
        for lag in (1, 2, 16):
            pairs = np.array(tokens[:-lag]) * len(LOGITS) + np.array(tokens[lag:])
            assert_distributed(np.bincount(pairs, minlength=len(both)), both)


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    vocab, count = 50_000, 200
    tokens = draw(in_torch, torch.zeros(count, vocab), [SamplingParams(seed=3)] * count, range(count))
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


@settings(max_examples=80, deadline=None)
@given(
    params_strategy,
    st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 0.5000001, 2.0, 5.0]), min_size=2, max_size=70).filter(
        lambda row: max(row) > -math.inf
    ),
    st.integers(0, 2**31),
)
def test_a_token_that_the_filters_or_a_mask_remove_is_never_drawn(
    sample: Sample, params: SamplingParams, logits: list[float], position: int
) -> None:
    row = torch.tensor(logits)
    token = draw(sample, row[None], [params], [position])[0]
    if params.greedy:
        assert token == logits.index(max(logits)), "the first of equals"
        return
    # Tokens are compared by how far they are below the largest, in float32, so logits that differ by less are equal.
    row = row - row.max()
    # A hair's breadth of slack where rounding decides which side of top_p a token falls on.
    slack = min(1.0, params.top_p * (1 + 1e-5))
    assert token_probabilities(row, params.temperature, params.top_k, slack, params.min_p * 0.9999)[token] > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(params_strategy, st.integers(0, 5000)), min_size=1, max_size=12), st.data())
def test_a_row_draws_the_same_whatever_it_is_batched_with(
    sample: Sample, rows: list[tuple[SamplingParams, int]], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), 300, generator=generator) * 3
    together = draw(sample, logits, [params for params, _ in rows], [position for _, position in rows])
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = draw(sample, logits[order], [rows[row][0] for row in order], [rows[row][1] for row in order])
    assert [together[row] for row in order] == shuffled
    for row, (params, position) in enumerate(rows):
        assert draw(sample, logits[row : row + 1], [params], [position]) == [together[row]]


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


def test_a_token_without_rivals_wins_with_the_largest_noise(sample: Sample) -> None:
    """The uniform number of token 1596 rounds to 1 here, whose logarithm would be infinite."""
    logits = torch.full((1, 4096), -torch.inf)
    logits[0, 1596] = 0.0
    assert exponential(noise_keys([0], [6021]), np.array([1596], np.int32)) > 16
    assert draw(sample, logits, [SamplingParams(seed=0)], [6021]) == [1596]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(sample: Sample, temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]]).repeat(3, 1)
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=frozenset({0, 1}), seed=1)
    draws = [Draw(params, 100, 0), Draw(params, 103, 3), Draw(params, 104, 4)]
    tokens, _ = sample(logits, draws)
    assert tokens[:2] == [2, 2]
    assert tokens[2] in (0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 37, 70])
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(
    sample: Sample, value: float, temperature: float, place: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=5)
    sound = LOGITS.repeat(3, 6)[:, :71].contiguous()
    expected, _ = sample(sound.clone(), [Draw(params, 7, 0)] * 3)
    sound[1, place] = value
    tokens, nonfinite = sample(sound, [Draw(params, 7, 0)] * 3)
    assert nonfinite == [1]
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


def test_stop_ids_outside_the_vocabulary_do_no_harm_and_a_row_without_a_token_is_told(sample: Sample) -> None:
    for banned, token in (({0, len(LOGITS), 2**31}, 1), ((), 0), (range(len(LOGITS)), None)):
        params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset(banned))
        tokens, nonfinite = sample(LOGITS[None].clone(), [Draw(params, 7, 0)])
        assert nonfinite == ([0] if token is None else [])
        assert token is None or tokens == [token]


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


@pytest.mark.parametrize("vocab", [333, *(pytest.param(vocab, marks=pytest.mark.more) for vocab in (1, 15, 1024))])
def test_the_kernel_chooses_what_torch_does(native: Sample, vocab: int) -> None:
    """28,500 draws of each vocabulary: flat, peaked and coarse logits, all filters alone and together."""
    options = [
        {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        for top_k in (0, 1, 7, 50, 10**6)
        for top_p in (1.0, 0.95, 0.5, 1e-3, 1 - 1e-9)
        for min_p in (0.0, 0.03)
        for temperature in (1.0, 0.3, 2.5)
    ]
    generator, count, unlike = torch.Generator().manual_seed(vocab), 190, 0
    for number, option in enumerate(options):
        logits = torch.randn(count, vocab, generator=generator) * (0.01, 1.0, 4.0, 12.0)[number % 4]
        if number % 3 == 0:
            logits = logits.bfloat16().float()
        if number % 5 == 0:
            logits[:, ::3] = -torch.inf
            logits[:, -1] = 0.0
        draws = [Draw(SamplingParams(seed=row << 40, **option), 17 * row + number, 0) for row in range(count)]
        expected, found = in_torch(logits.clone(), draws), native(logits.clone(), draws)
        assert found[1] == expected[1] == []
        for row, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
            unlike += one != other
            assert one == other or is_near(logits[row], draws[row], one, other, ROUNDING)
    assert unlike <= 2


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-45, 1e-38, 1.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2**31 - 1]),
        top_p=st.sampled_from([1e-45, 1.0]),
        min_p=st.sampled_from([0.0, 1e-45, 1.0]),
        seed=st.sampled_from([0, 2**64 - 1]),
        repetition_penalty=st.sampled_from([MIN_REPETITION_PENALTY, 10.0]),
        presence_penalty=st.sampled_from([-2.0, 2.0]),
        frequency_penalty=st.sampled_from([-2.0, 2.0]),
        logit_bias=st.sampled_from([(), ((0, 100.0), (1, -100.0))]),
    ),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_the_ends_of_what_is_allowed_leave_a_token(sample: Sample, params: SamplingParams, scale: float) -> None:
    params.check()
    draws = [Draw(params, 5, 0, Shaping(params, [0, 3], [1, 3], None))]
    choice = choose(scale * LOGITS[None], draws, sample)
    assert (choice.nonfinite, choice.refused) == ([], {})
    assert 0 <= choice.tokens[0] < len(LOGITS)
