"""Sampling that needs more than logits, end to end, against transformers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from kvrelay.client import Client, Completion, TokenLogprobs
from support.checkpoints import VOCAB_SIZE
from support.processes import ProcessCluster

CLOSE = 1e-4
"""Largest difference of log-probabilities between two float32 implementations of a model."""


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def client(pair: ProcessCluster) -> Iterator[Client]:
    with Client(pair.router, timeout=60) as client:
        yield client


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, VOCAB_SIZE), k=length)


def true_logprobs(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V] of the token after each."""
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0].log_softmax(-1)


def assert_true(found: tuple[TokenLogprobs, ...], tokens: list[int], rows: torch.Tensor, top: int) -> None:
    assert len(found) == len(tokens) == len(rows)
    for scores, token, row in zip(found, tokens, rows, strict=True):
        assert scores.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert list(scores.top_logprobs) == pytest.approx(row.topk(top).values.tolist(), abs=CLOSE)
        assert [float(row[id_]) for id_ in scores.top_ids] == pytest.approx(list(scores.top_logprobs), abs=CLOSE)
        near = int((row > row[token] + CLOSE).sum()), int((row > row[token] - CLOSE).sum())
        assert near[0] < scores.rank <= near[1]


@pytest.mark.parametrize("top", [0, 5, 20])
def test_logprobs_are_those_of_the_model(client: Client, oracle: PreTrainedModel, top: int) -> None:
    # Three chunks of the prompt, the last one short; what is drawn is far from what is likely.
    prompt = prompt_of(150, top)
    options: dict[str, Any] = {"temperature": 3.0, "repetition_penalty": 1.5, "top_k": 100, "logit_bias": {7: 5.0}}
    done = client.complete(
        prompt, max_tokens=12, seed=top, ignore_eos=True, logprobs=top, prompt_logprobs=top, **options
    )
    tokens = list(done.token_ids)
    rows = true_logprobs(oracle, prompt + tokens)
    assert_true(done.logprobs, tokens, rows[len(prompt) - 1 : -1], top)
    assert_true(done.prompt_logprobs, prompt[1:], rows[: len(prompt) - 1], top)
    assert done.usage.prompt_tokens == len(prompt)
    assert done.usage.completion_tokens == 12


def test_prompt_logprobs_of_a_cached_prompt_are_whole(client: Client) -> None:
    prompt = prompt_of(100)
    first = client.complete(prompt, max_tokens=2, temperature=0, prompt_logprobs=1)
    again = client.complete(prompt, max_tokens=2, temperature=0, prompt_logprobs=1)
    assert again.usage.cached_tokens == 0
    assert len(again.prompt_logprobs) == len(prompt) - 1
    assert again.prompt_logprobs == first.prompt_logprobs
    assert client.complete(prompt, max_tokens=2, temperature=0).usage.cached_tokens > 0


def test_logprobs_of_a_completion_cut_by_a_stop_string_belong_to_its_tokens(client: Client) -> None:
    whole = client.complete(prompt_of(30), max_tokens=24, seed=1, ignore_eos=True, logprobs=0)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = client.complete(prompt_of(30), max_tokens=24, seed=1, ignore_eos=True, logprobs=0, stop=stop)
    assert len(cut.token_ids) < len(whole.token_ids)
    assert len(cut.logprobs) == len(cut.token_ids)
    # The second prompt is found in the cache but for its last token, whose step has other rows than the first one's.
    for found, expected in zip(cut.logprobs, whole.logprobs, strict=False):
        assert found.rank == expected.rank
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_greedy_tokens_equal_transformers(client: Client, oracle: PreTrainedModel) -> None:
    bias, prompt = {9: 2.0, 200: -3.0}, prompt_of(40, 1)
    config = GenerationConfig(
        max_new_tokens=24,
        min_new_tokens=6,
        do_sample=False,
        eos_token_id=[1],
        pad_token_id=0,
        repetition_penalty=1.2,
        sequence_bias={(token,): value for token, value in bias.items()},
    )
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        whole = oracle.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    asked: dict[str, Any] = {"max_tokens": 24, "min_tokens": 6, "temperature": 0, "repetition_penalty": 1.2}
    assert list(client.complete(prompt, logit_bias=bias, **asked).token_ids) == whole[0, len(prompt) :].tolist()


def test_penalties_and_bad_words_follow_the_tokens(client: Client, oracle: PreTrainedModel) -> None:
    """Frequency and presence penalties, and bad words, against their formulas."""
    prompt = prompt_of(25, 2)

    def run(**options: Any) -> Completion:
        return client.complete(prompt, max_tokens=30, temperature=0, ignore_eos=True, **options)

    plain = run()
    expected: list[int] = []
    for _ in range(30):
        row = true_logprobs(oracle, prompt + expected)[-1].clone()
        for token in set(expected):
            row[token] -= 0.7 * expected.count(token) + 0.4
        expected.append(int(row.argmax()))
    assert list(run(frequency_penalty=0.7, presence_penalty=0.4).token_ids) == expected
    assert expected != list(plain.token_ids)
    word = client.detokenize(plain.token_ids[4:5])
    assert client.tokenize(word)[-1:] == list(plain.token_ids[4:5])
    without = run(bad_words=[word])
    assert plain.token_ids[4] not in without.token_ids
    assert without.token_ids[:4] == plain.token_ids[:4]
