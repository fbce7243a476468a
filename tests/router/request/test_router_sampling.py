"""A request's sampling as workers get it: the model's defaults, bad words as tokens, limits on what is sent back."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.internal.v1.worker_pb2 import ModelInfo, Sampling
from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.sampling import (
    MAX_PROMPT_VALUES,
    NO_EFFECT,
    Defaults,
    fit_to_prompt,
    read_defaults,
    sampling_of,
)
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.v1.inference_pb2 import Constraint, SamplingParams
from support.tokenizers import byte_level_tokenizer

MODEL = ModelInfo(vocab_size=10, eos_token_ids=[1])


def defaults_of(folder: Path, **config: Any) -> Defaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_defaults(folder)


def sampling(
    folder: Path,
    params: SamplingParams,
    defaults: Defaults = NO_EFFECT,
    model: ModelInfo = MODEL,
) -> Sampling:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    try:
        return asyncio.run(sampling_of(params, model, defaults, tokenizer))
    finally:
        tokenizer.close()


def test_what_a_request_leaves_out_is_as_the_model_says(tmp_path: Path) -> None:
    defaults = defaults_of(
        tmp_path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.25, do_sample=True, eos_token_id=1
    )
    found = sampling(tmp_path, SamplingParams(), defaults)
    assert (found.temperature, found.top_p) == (pytest.approx(0.6), pytest.approx(0.95))
    assert (found.top_k, found.min_p, found.repetition_penalty) == (20, 0.0, 1.25)
    # What a request says counts, also if it is 0.
    given = sampling(tmp_path, SamplingParams(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0), defaults)
    assert (given.temperature, given.top_k, given.top_p, given.repetition_penalty) == (0.0, 0, 1.0, 1.0)


def test_a_model_without_defaults(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == NO_EFFECT
    assert defaults_of(tmp_path, eos_token_id=1, temperature=None) == NO_EFFECT
    assert defaults_of(tmp_path, do_sample=False, temperature=0.7)["temperature"] == 0.0


@pytest.mark.parametrize("config", [{"top_p": 0}, {"top_k": "many"}, {"temperature": -1}, {"top_k": -3}])
def test_defaults_that_cannot_be_used_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: .*" + next(iter(config))):
        defaults_of(tmp_path, **config)


def test_a_bad_word_is_banned_alone_and_after_a_space(tmp_path: Path) -> None:
    plain = byte_level_tokenizer()
    found = sampling(tmp_path, SamplingParams(bad_words=["def", "x"]))
    expected = [plain.encode(form).ids for form in ("def", " def", "x", " x")]
    assert [list(word.ids) for word in found.bad_words] == expected


def test_a_prompt_has_no_more_log_probabilities_than_a_message_holds() -> None:
    most = MAX_PROMPT_VALUES // 6
    fit_to_prompt(Sampling(prompt_logprobs=5), most, 10)
    fit_to_prompt(Sampling(), 10**6, 10)
    with pytest.raises(InvalidRequest, match=f"number of tokens is {most + 1}; allowed: up to {most} with"):
        fit_to_prompt(Sampling(prompt_logprobs=5), most + 1, 10)


def test_a_model_without_an_end_takes_no_constraint(tmp_path: Path) -> None:
    params = SamplingParams(constraint=Constraint(regex="a"))
    assert sampling(tmp_path, params).constraint.regex == "a"
    with pytest.raises(InvalidRequest, match=r"sampling\.constraint is 'regex'; allowed: none"):
        sampling(tmp_path, params, model=ModelInfo(vocab_size=10))
