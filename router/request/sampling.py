"""How tokens are to be chosen: a client's `SamplingParams` and the model's defaults, checked, as workers get them.

Checks by comparison are written so that NaN fails each of them.
"""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvrelay.internal.v1.worker_pb2 import ModelInfo, Sampling
from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.tokenizer import Tokenizer, read_object
from kvrelay.v1.inference_pb2 import Constraint, SamplingParams, TokenIds

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
"""A logit that is divided by it stays finite."""
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_VALUES = 2**14
"""Log-probabilities of a prompt's tokens and their likeliest ones: they go to the client in one message, with the first
token, so that a client that has a token has all of them. 131,072 of them held the event loop for seconds."""
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the fields that a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, folder: Path) -> "SamplingDefaults":
        """The defaults in a checkpoint's `generation_config.json`, if it has one. If that says `do_sample: false`, the
        model is greedy by default.

        Raises:
            ValueError: a value is beyond the limit of a request's field; the text names file, field and value.
        """
        path = folder / "generation_config.json"
        config = read_object(path)
        names = [field.name for field in fields(cls)]
        given: dict[str, Any] = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        for name, value in given.items():
            try:
                check_choice(SamplingParams(**{name: value}))
            except (TypeError, ValueError, InvalidRequest) as error:
                raise ValueError(f"{path}: {name} is {value!r}: {error}") from error
        return cls(**given)


def check_params(params: SamplingParams, model: ModelInfo) -> None:
    """Checks all that doesn't depend on the prompt.

    Raises:
        InvalidRequest: a field is beyond its limit, or two fields exclude each other.
    """
    check_choice(params)
    _check_strings("sampling.stop", params.stop, MAX_STOPS, MAX_STOP_CHARACTERS)
    _check_strings("sampling.bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    _check_count("sampling.stop_token_ids: number of ids", len(params.stop_token_ids), MAX_STOP_IDS)
    check_ids("sampling.stop_token_ids", params.stop_token_ids, model.vocab_size)
    _check_count("sampling.logit_bias: number of entries", len(params.logit_bias), MAX_BIASES)
    for token, bias in params.logit_bias.items():
        if token >= model.vocab_size:
            raise InvalidRequest("sampling.logit_bias: id", token, _vocabulary(model.vocab_size))
        _check_number(f"sampling.logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and getattr(params, name) > MAX_LOGPROBS:
            raise InvalidRequest(f"sampling.{name}", getattr(params, name), f"0 to {MAX_LOGPROBS}")
    if params.HasField("constraint"):
        _check_constraint(params, model)


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Raises InvalidRequest if a prompt is too long for the log-probabilities that were asked for."""
    most = MAX_PROMPT_VALUES // (params.prompt_logprobs + 1)
    if params.HasField("prompt_logprobs") and prompt_tokens > most:
        limit = f"up to {most} with sampling.prompt_logprobs {params.prompt_logprobs}"
        raise InvalidRequest("prompt: number of tokens", prompt_tokens, limit)


async def sampling_of(
    params: SamplingParams, max_tokens: int, defaults: SamplingDefaults, tokenizer: Tokenizer
) -> Sampling:
    """The sampling message for workers, from checked parameters."""
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        bad_words=[TokenIds(ids=ids) for ids in await tokenizer.encode_words(params.bad_words)],
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        constraint=params.constraint if params.HasField("constraint") else None,
    )
    for field in fields(defaults):
        given = params if params.HasField(field.name) else defaults
        setattr(sampling, field.name, getattr(given, field.name))
    return sampling


def check_choice(params: SamplingParams) -> None:
    """Checks the numbers that say how tokens are chosen. Raises InvalidRequest."""
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", params.max_tokens, "1 or more")
    _check_number("sampling.temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if params.HasField("top_p") and not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", _number(params.top_p), "above 0, up to 1")
    _check_number("sampling.min_p", params.min_p, 0.0, 1.0)
    _check_number("sampling.presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_number("sampling.frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if params.HasField("repetition_penalty"):
        least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _check_number("sampling.repetition_penalty", params.repetition_penalty, least, most)


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """Raises InvalidRequest, naming the first id outside of the vocabulary; `first` is the index of token_ids[0]."""
    if token_ids and max(token_ids) >= vocab_size:
        index, token = next((at, token) for at, token in enumerate(token_ids, first) if token >= vocab_size)
        raise InvalidRequest(f"{field}[{index}]", token, _vocabulary(vocab_size))


def _check_constraint(params: SamplingParams, model: ModelInfo) -> None:
    """Workers check what takes a compiler; here, what can be said of the fields alone."""
    constraint = params.constraint
    kind = constraint.WhichOneof("kind")
    field = f"sampling.constraint.{kind}"
    if kind is None:
        raise InvalidRequest("sampling.constraint", None, "json_schema, json_object, regex, choice or grammar")
    if constraint.ByteSize() > MAX_CONSTRAINT_BYTES:
        raise InvalidRequest(f"{field}: number of bytes", constraint.ByteSize(), f"up to {MAX_CONSTRAINT_BYTES}")
    if kind == "json_object" and not constraint.json_object:
        raise InvalidRequest(field, False, "true, or no constraint")
    if kind == "choice":
        _check_choices(field, constraint)
    elif kind != "json_object" and not getattr(constraint, kind).strip():
        raise InvalidRequest(f"{field}: number of characters", 0, "1 or more, not all white space")
    if kind == "json_schema":
        _check_schema(field, constraint.json_schema)
    if params.ignore_eos or not model.eos_token_ids:
        limit = "none with ignore_eos, and for a model with an end-of-sequence token only, which ends the text"
        raise InvalidRequest("sampling.constraint", kind, limit)
    if params.min_tokens:
        raise InvalidRequest("sampling.min_tokens", params.min_tokens, "0 with a constraint, which says where to end")


def _check_choices(field: str, constraint: Constraint) -> None:
    texts = constraint.choice.texts
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(f"{field}.texts: number of texts", len(texts), f"1 to {MAX_CHOICES}")
    if not all(texts):
        raise InvalidRequest(f"{field}.texts[{list(texts).index('')}]", "", "at least 1 character")


def _check_schema(field: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidRequest(field, text, f"a JSON Schema, as JSON ({why})") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, text, "a JSON object")


def _check_strings(field: str, strings: Sequence[str], most: int, characters: int) -> None:
    _check_count(f"{field}: number of strings", len(strings), most)
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= characters:
            raise InvalidRequest(f"{field}[{index}]: number of characters", len(string), f"1 to {characters}")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(field, count, f"at most {most}")


def _check_number(field: str, value: float, least: float, most: float) -> None:
    # A limit that no 32-bit float equals still allows the one beside it.
    if not least <= _number(value) <= most:
        raise InvalidRequest(field, _number(value), f"{least:g} to {most:g}")


def _vocabulary(size: int) -> str:
    return f"0 to {size - 1}, the model's vocabulary"


def _number(value: float) -> float:
    """A 32-bit float with the digits that its sender wrote."""
    return float(f"{value:.7g}") if math.isfinite(value) else value
