"""How tokens are to be chosen: the limits of a client's parameters, their one check, and the message that workers get.

    HTTP fields --.
                   SamplingParams --checked, with the model's defaults--> Sampling --> the engine
    gRPC message -'

Checks by comparison are written so that NaN fails each of them.
"""

import json
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.internal.v1.worker_pb2 import ModelInfo, Sampling
from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.tokenizer import Tokenizer, read_object
from kvrelay.v1.inference_pb2 import Constraint, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number, from `least` to `most`."""

    least: float
    most: float
    above: bool = False
    """Whether `least` itself is not allowed."""

    @property
    def bounds(self) -> dict[str, Any]:
        """The range as arguments of pydantic's `Field`."""
        return {"gt" if self.above else "ge": self.least, "le": self.most}

    def check(self, field: str, value: float) -> None:
        """Raises InvalidRequest, naming field, value and range, unless the value is within."""
        # A limit that isn't a 32-bit float still allows the nearest one.
        shown = value if isinstance(value, int) else _number(value)
        if not self.least <= shown <= self.most or (self.above and shown == self.least):
            allowed = f"{self.least:g} to {self.most:g}"
            if self.most == math.inf:
                allowed = f"{self.least:g} or more"
            elif self.above:
                allowed = f"above {self.least:g}, up to {self.most:g}"
            raise InvalidRequest(field, shown, allowed)


@dataclass(frozen=True, slots=True)
class Length:
    """Lengths that a list may have."""

    unit: str
    """Word for the entries, in the plural."""
    most: int
    characters: int = 0
    """Most characters of an entry that is a string."""

    def check(self, field: str, values: Collection[Any]) -> None:
        """Raises InvalidRequest, naming field, length and limit, unless the list and its strings fit."""
        if len(values) > self.most:
            raise InvalidRequest(f"{field}: number of {self.unit}", len(values), f"at most {self.most}")
        for index, value in enumerate(values if self.characters else ()):
            if not 1 <= len(value) <= self.characters:
                raise InvalidRequest(f"{field}[{index}]: number of characters", len(value), f"1 to {self.characters}")


MAX_LOGPROBS = 20
RANGES = {
    "max_tokens": Range(1, math.inf),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, above=True),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 10.0),  # a logit that is divided by it stays finite
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
"""Ranges of the parameters that are numbers. The faces and the check of a request take them from here."""
BIAS = Range(-100.0, 100.0)
"""Range of a value of `logit_bias`."""
LENGTHS = {
    "stop": Length("strings", 16, characters=256),
    "bad_words": Length("strings", 64, characters=256),
    "stop_token_ids": Length("ids", 64),
    "logit_bias": Length("entries", 1024),
}
"""Lengths of the parameters that are lists."""
MAX_PROMPT_VALUES = 2**14
"""Log-probabilities of a prompt's tokens and their likeliest ones: they go to the client in one message, with the first
token, so that a client that has a token has all of them. 131,072 of them held the event loop for seconds."""
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_CHOICES = 1024

Defaults = Mapping[str, float]
"""Values of the parameters that a request may leave out to the model, by name."""
NO_EFFECT: Defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Defaults of a model that names none."""


def read_defaults(folder: Path) -> Defaults:
    """The defaults in a checkpoint's `generation_config.json`, if it has one. If that says `do_sample: false`, the
    model is greedy by default.

    Raises:
        ValueError: a value is beyond the limit of a request's field; the text names file, field and value.
    """
    path = folder / "generation_config.json"
    config = read_object(path)
    given: dict[str, Any] = {name: config[name] for name in NO_EFFECT if config.get(name) is not None}
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    for name, value in given.items():
        try:
            _check_ranges(SamplingParams(**{name: value}))
        except (TypeError, ValueError, InvalidRequest) as error:
            raise ValueError(f"{path}: {name} is {value!r}: {error}") from error
    return {**NO_EFFECT, **given}


async def sampling_of(params: SamplingParams, model: ModelInfo, defaults: Defaults, tokenizer: Tokenizer) -> Sampling:
    """A client's parameters as workers get them, after all checks that don't depend on the prompt.

    Raises:
        InvalidRequest: a field is beyond its limit, or two fields exclude each other.
    """
    _check_ranges(params)
    for name, length in LENGTHS.items():
        length.check(f"sampling.{name}", getattr(params, name))
    check_ids("sampling.stop_token_ids", params.stop_token_ids, model.vocab_size)
    for token, bias in params.logit_bias.items():
        if token >= model.vocab_size:
            raise InvalidRequest("sampling.logit_bias: id", token, _vocabulary(model.vocab_size))
        BIAS.check(f"sampling.logit_bias[{token}]", bias)
    if params.HasField("constraint"):
        _check_constraint(params, model)
    given: dict[str, Any] = {field.name: value for field, value in params.ListFields() if field.name != "stop"}
    given["bad_words"] = [TokenIds(ids=ids) for ids in await tokenizer.encode_words(params.bad_words)]
    return Sampling(**{"seed": secrets.randbits(64), **defaults, **given})


def fit_to_prompt(sampling: Sampling, prompt_tokens: int, room: int) -> None:
    """Sets or checks what depends on the prompt.

    Args:
        room: tokens that a completion may have behind the prompt.

    Raises:
        InvalidRequest: the prompt is too long for the log-probabilities, or the completion for `min_tokens`.
    """
    sampling.max_tokens = sampling.max_tokens or room
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("sampling.min_tokens", sampling.min_tokens, f"0 to max_tokens, {sampling.max_tokens} here")
    most = MAX_PROMPT_VALUES // (sampling.prompt_logprobs + 1)
    if sampling.HasField("prompt_logprobs") and prompt_tokens > most:
        limit = f"up to {most} with sampling.prompt_logprobs {sampling.prompt_logprobs}"
        raise InvalidRequest("prompt: number of tokens", prompt_tokens, limit)


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """Raises InvalidRequest, naming the first id outside of the vocabulary; `first` is the index of token_ids[0]."""
    if token_ids and max(token_ids) >= vocab_size:
        index, token = next((at, token) for at, token in enumerate(token_ids, first) if token >= vocab_size)
        raise InvalidRequest(f"{field}[{index}]", token, _vocabulary(vocab_size))


def _check_ranges(params: SamplingParams) -> None:
    for name, allowed in RANGES.items():
        if params.HasField(name):
            allowed.check(f"sampling.{name}", getattr(params, name))


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


def _vocabulary(size: int) -> str:
    return f"0 to {size - 1}, the model's vocabulary"


def _number(value: float) -> float:
    """A 32-bit float with the digits that its sender wrote."""
    return float(f"{value:.7g}") if math.isfinite(value) else value
