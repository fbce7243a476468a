"""The sampler on the device chooses the tokens that the one on CPU draws; `test_sampler.py` has their distribution."""

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_compile import Compiler, each_architecture

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.noise import exponential, noise_keys
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.engine.sampling.sampler import sample as sample_on_cpu
from kvrelay.kernels.ops import NONFINITE
from kvrelay.kernels.reference import token_probabilities
from kvrelay.kernels.triton import sample as kernel
from support.races import is_near

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
NEAR = 2e-5
"""Relative difference, of scores or of a probability and a bound, below which float32 may choose either token."""


def choices_of(draws: list[Draw], banned: int = 0) -> kernel.Choices:
    choices = kernel.Choices.empty(len(draws), banned, DEVICE)
    for row, draw in enumerate(draws):
        params = draw.params
        choices.temperature[row], choices.top_k[row] = params.temperature, params.top_k
        choices.top_p[row], choices.min_p[row] = params.top_p, params.min_p
        choices.keys[row] = torch.from_numpy(noise_keys([params.seed], [draw.position]))[0]
    return choices


def choose(logits: Tensor, choices: kernel.Choices) -> list[int]:
    tokens = torch.full((len(logits),), -7, dtype=torch.int64, device=DEVICE)
    workspace = kernel.Workspace.empty(*logits.shape, DEVICE)
    # What an earlier step has left must not matter.
    for left in workspace:
        left.view(torch.uint8).fill_(0x7F)
    kernel.sample(logits.clone().to(DEVICE), choices, workspace, tokens)
    return tokens.tolist()


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, 200, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.9, 0.99])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.4, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def any_rows(*vocabularies: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Rows of logits over vocabularies of these sizes."""
    return given(
        params=st.lists(sampling_params(), min_size=1, max_size=3),
        vocabulary=st.sampled_from(vocabularies),
        coarse=st.booleans(),
        seed=st.integers(0, 2**16),
    )


def check_choice(params: list[SamplingParams], vocabulary: int, coarse: bool, seed: int) -> None:
    """Rows are longer and shorter than a block, and some have many equal logits, as bfloat16 gives."""
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        logits = logits.bfloat16().float()
    choose_position = random.Random(seed)
    draws = [Draw(param, choose_position.randrange(10_000), 0) for param in params]
    expected, _ = sample_on_cpu(logits.clone(), draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SLICE", 128)
        patch.setattr(kernel, "LISTED", 16)
        chosen = choose(logits, choices_of(draws))
    for row, token in enumerate(chosen):
        assert token == expected[row] or is_near(logits[row], draws[row], token, expected[row], NEAR)


test_it_chooses_what_the_cpu_does = settings(max_examples=5, deadline=None)(any_rows(1, 63, 200)(check_choice))
test_it_chooses_what_the_cpu_does_often = pytest.mark.more(
    settings(max_examples=20, deadline=None)(any_rows(1, 2, 63, 320, 900)(check_choice))
)


@pytest.mark.more
@pytest.mark.parametrize(
    "step", [0.01, *(pytest.param(step, marks=pytest.mark.more) for step in (0.0625, 0.5))], ids="{}_apart".format
)
def test_the_last_token_that_is_kept_may_win_and_the_next_one_may_not(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draw's winner is next to the bound of a filter, on logits that share bins, or have one each."""
    monkeypatch.setattr(kernel, "SLICE", 32)
    monkeypatch.setattr(kernel, "LISTED", 8)
    logits = -step * torch.arange(40.0)[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    order = logits.argsort(descending=True)
    filters = [{"top_k": 8}, {"top_p": 0.45}, {"top_k": 9, "top_p": 0.6}, {"top_k": 30, "min_p": 0.75}]
    draws, expected = [], []
    for options in filters:
        params = SamplingParams(temperature=1.0, **options)
        kept = token_probabilities(logits, 1.0, params.top_k, params.top_p, params.min_p) > 0
        last = int(kept.sum()) - 1
        noise = exponential(noise_keys([0] * 4000, np.arange(4000)), np.arange(40, dtype=np.int32)).double()
        scores = logits.double().exp() / noise
        for winner in (order[last], order[last + 1]):
            position = int((scores.argmax(-1) == winner).nonzero()[0])
            draws.append(Draw(SamplingParams(temperature=1.0, seed=0, **options), position, 0))
            expected.append(int((scores[position] * kept).argmax()))
    assert choose(logits.repeat(len(draws), 1), choices_of(draws)) == expected


def test_the_largest_noise_is_that_of_the_cpu() -> None:
    """The uniform number of token 1596 rounds to 1 here. Token 0 would win over it if its noise were larger still."""
    params, position, token = SamplingParams(temperature=1.0, seed=0), 6021, 1596
    noise = exponential(noise_keys([0], [position]), np.array([0, token], np.int32))[0]
    logits = torch.full((1, 1600), -torch.inf)
    logits[0, token] = 0.0
    logits[0, 0] = (noise[0] / noise[1]).log() - 0.1
    assert choose(logits, choices_of([Draw(params, position, 0)])) == [token]


def test_rows_that_are_not_finite_are_flagged_and_hurt_no_other() -> None:
    logits = torch.randn(5, 300)
    expected = int(logits[4].argmax())
    logits[0, 299], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 5] = -torch.inf
    for temperature in (0.0, 1.0):
        draws = [Draw(SamplingParams(temperature=temperature, top_k=3, top_p=0.9), 9, 0)] * 5
        tokens = choose(logits, choices_of(draws))
        assert tokens[:3] == [NONFINITE] * 3
        assert min(tokens[3:]) >= 0
        assert temperature or tokens[4] == expected


def test_banned_tokens_are_never_chosen() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 3] = 50.0
    for temperature in (0.0, 1.0):
        choices = choices_of([Draw(SamplingParams(temperature=temperature), 0, 0)] * 2, banned=3)
        choices.banned[0] = torch.tensor([3, 99, -1])
        tokens = choose(logits, choices)
        assert tokens[0] != 3
        assert tokens[1] == 3


def test_the_first_of_equal_logits_is_the_greedy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SLICE", 64)
    logits = torch.zeros(3, 200)
    logits[1, [70, 199]] = 2.0
    logits[2, [5, 6, 133]] = 2.0
    assert choose(logits, choices_of([Draw(SamplingParams(temperature=0.0), 0, 0)] * 3)) == [0, 70, 5]


def test_repeated_launches_choose_what_the_first_does() -> None:
    sampler = kernel.Sampler(kernel.Choices.empty(4, 2, DEVICE), kernel.Workspace.empty(4, 40, DEVICE))
    for count in (3, 4, 1, 4):
        logits = torch.randn(count, 40, device=DEVICE)
        chosen = torch.empty(count, dtype=torch.int64, device=DEVICE)
        sampler(logits, chosen)
        assert torch.equal(chosen, logits.argmax(-1))
    with pytest.raises(ValueError, match=r"tokens is \[3\]; allowed: \[4\]"):
        sampler(logits, chosen[:3])
    with pytest.raises(ValueError, match=r"temperature is \[4\]; allowed: \[5\]"):
        sampler(torch.zeros(5, 40, device=DEVICE), torch.empty(5, dtype=torch.int64, device=DEVICE))


def test_what_does_not_fit_is_refused() -> None:
    logits, choices = torch.zeros(2, 10), kernel.Choices.empty(2, 1, "cpu")
    workspace, tokens = kernel.Workspace.empty(2, 10, "cpu"), torch.empty(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits are torch\.float16"):
        kernel.sample(logits.half(), choices, workspace, tokens)
    with pytest.raises(ValueError, match=r"temperature is \[1\]; allowed: \[2\]"):
        kernel.sample(logits, choices.first(1), workspace, tokens)
    with pytest.raises(ValueError, match=r"top_k is torch\.float32; allowed: torch\.int32"):
        kernel.sample(logits, choices._replace(top_k=choices.top_p), workspace, tokens)
    with pytest.raises(ValueError, match=r"workspace.mass is torch\.float32"):
        kernel.sample(logits, choices, workspace._replace(mass=workspace.mass.float()), tokens)
    with pytest.raises(ValueError, match=r"workspace.listed is \[2, 10\]; allowed: \[2, 20\]"):
        kernel.sample(
            torch.zeros(2, 20), choices, kernel.Workspace.empty(2, 20, "cpu")._replace(listed=workspace.listed), tokens
        )


def launch(vocabulary: int) -> None:
    choices = kernel.Choices.empty(2, 128, "cpu")
    workspace, tokens = kernel.Workspace.empty(2, vocabulary, "cpu"), torch.empty(2, dtype=torch.int64)
    kernel.sample(torch.zeros(2, vocabulary), choices, workspace, tokens)


@pytest.mark.parametrize("vocabulary", [128256, 50257])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, vocabulary: int) -> None:
    kernels = compiler.compile(architecture, launch, vocabulary)
    assert [kernel.name for kernel in kernels] == ["largest_kernel", "weigh_kernel", "list_kernel", "choose_kernel"]
    for compiled in kernels:
        compiled.check_fits()
        compiled.check_overlaps()
        assert compiled.registers <= 128
