"""The fields that requests for completions and for chat have in common, and how they become a `GenerateRequest`.

Fields of OpenAI's API that mean nothing here are accepted at the value that has no effect, and refused by name at any
other. What other servers of open models have added to the API (vLLM's names) is taken as they take it.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvrelay.router.config import BATCH, DEFAULT_CLASS, INTERACTIVE
from kvrelay.router.request.reading import Asking, Form
from kvrelay.router.request.sampling import BIAS, LENGTHS, MAX_CHOICES, RANGES
from kvrelay.router.request.validation import MAX_COMPLETIONS, MAX_REQUEST_ID_CHARACTERS
from kvrelay.v1.inference_pb2 import Choice, Constraint, GenerateRequest, SamplingParams

MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1
SEED_BITS = 64
SERVED_TIERS = {"default": DEFAULT_CLASS, "flex": BATCH, "priority": INTERACTIVE}
"""Classes of service by OpenAI's names, as answers have them."""
TIERS = {**SERVED_TIERS, "auto": DEFAULT_CLASS, "scale": DEFAULT_CLASS}
"""The same, as requests have them."""


def misfit(field: str, value: JsonValue, allowed: str) -> PydanticCustomError:
    """The error of a field whose value doesn't fit to another field's."""
    return PydanticCustomError("misfit", "{allowed}", {"field": field, "value": value, "allowed": allowed})


def whole(value: Any) -> Any:
    """A number as an integer if it is one, however it is written: JSON doesn't tell `4892.0` from `4892`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_list(value: Any) -> Any:
    """A list with each number as by `whole`."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(each) for each in value]
    return value


Integer = Annotated[int | None, BeforeValidator(whole)]
"""An integer that may be left out."""


class Neutral:
    """Annotates a field that means nothing here: it is null, or one of some values."""

    def __init__(self, *values: JsonValue) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._values], "description": "Has no effect here."}

    def _check(self, value: Any) -> Any:
        value = whole(value)
        if value is not None and not any(type(value) is type(other) and value == other for other in self._values):
            allowed = " or ".join(json.dumps(each) for each in (None, *self._values))
            raise PydanticCustomError("not_served", "{allowed}", {"allowed": f"{allowed}; not served otherwise"})
        return value


def _fail_fast(schema: Any) -> None:
    """Sets `fail_fast` in all lists and dictionaries of a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Fields(BaseModel):
    """A JSON object with known fields only. The check of a list or of an object stops at its first error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's schema of the class, in which every list and dictionary fails fast: half a million errors of one
        list would hold the event loop for seconds."""
        schema = handler(source)
        _fail_fast(handler.resolve_ref_schema(schema))
        return schema


class StreamOptions(Fields):
    """Options of a streamed answer."""

    include_usage: bool = False
    """A last chunk without choices has the usage."""

    continuous_usage_stats: bool = False
    """Every chunk has the usage up to it; with include_usage."""

    include_obfuscation: Annotated[bool | None, Field()] = None
    """Has no effect here."""


class JsonSchemaFormat(Fields):
    """The schema of a `response_format`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    """Has no effect here: the schema always binds."""


class ResponseFormat(Fields):
    """Format that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise misfit("response_format.json_schema", None, "an object exactly with the type 'json_schema'")
        return self

    def constraint(self) -> Constraint | None:
        if self.json_schema is not None:
            return Constraint(json_schema=json.dumps(self.json_schema.schema_))
        return Constraint(json_object=True) if self.type == "json_object" else None


Schema = dict[str, JsonValue] | str
"""A JSON Schema, as an object or as its JSON."""


class StructuredOutputs(Fields):
    """Constraint on the text; exactly one of the fields is set."""

    json_: Schema | None = Field(None, alias="json")
    """A JSON Schema."""
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise misfit("structured_outputs", {}, "exactly one of json, json_object, regex, choice and grammar")
        return self

    def constraint(self) -> Constraint:
        if self.json_ is not None:
            return Constraint(json_schema=_schema_text(self.json_))
        if self.json_object is not None:
            return Constraint(json_object=True)
        if self.regex is not None:
            return Constraint(regex=self.regex)
        if self.choice is not None:
            return Constraint(choice=Choice(texts=self.choice))
        return Constraint(grammar=self.grammar)


def _ranged(name: str) -> Any:
    """A number that may be left out, within the range of the sampling parameter of this name."""
    return Field(None, **RANGES[name].bounds)


def _string(name: str) -> Any:
    """The limits of an entry of the sampling parameter of this name."""
    return Field(min_length=1, max_length=LENGTHS[name].characters)


class GenerateFields(Fields):
    """The fields that chat and completions have in common."""

    model: str | None = None
    """The served model or one of its aliases; null is the served model."""
    stream: bool | None = None
    """Answer by server-sent events, as tokens come."""
    stream_options: StreamOptions | None = None
    """Options of the stream; only with stream."""
    n: Integer = Field(None, ge=1, le=MAX_COMPLETIONS)
    """Completions of each prompt; completion i > 0 has a seed that is derived from `seed` and i."""
    max_tokens: Integer = Field(None, ge=0, le=MAX_UINT32)
    """Most tokens to generate."""
    temperature: float | None = _ranged("temperature")
    """0 is greedy."""
    top_p: float | None = _ranged("top_p")
    """Keep the smallest set of likeliest tokens whose probability reaches this."""
    stop: (
        Annotated[str, _string("stop")]
        | Annotated[list[Annotated[str, _string("stop")]], Field(max_length=LENGTHS["stop"].most)]
        | None
    ) = None
    """One string or several that end the text before them."""
    seed: Integer = Field(None, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS)
    """Equal seeds give equal tokens; a negative one counts modulo 2^64."""
    presence_penalty: float | None = _ranged("presence_penalty")
    """Subtracted from the logit of each token that the completion has."""
    frequency_penalty: float | None = _ranged("frequency_penalty")
    """Subtracted for each time that the completion has the token."""
    logit_bias: dict[Annotated[int, Field(ge=0, le=MAX_UINT32)], Annotated[float, Field(**BIAS.bounds)]] | None = None
    """Added to the logits of these token ids."""
    response_format: ResponseFormat | None = None
    """Format that the text must have."""
    user: str | None = None
    """Requests of one user prefer the same workers, unless prompt_cache_key or the header X-Session-Id is given."""

    top_k: Integer = Field(None, ge=-1, le=MAX_UINT32)
    """Keep the k likeliest tokens; 0 and -1 keep all."""
    min_p: float | None = _ranged("min_p")
    """Drop tokens less likely than this times the likeliest one."""
    repetition_penalty: float | None = _ranged("repetition_penalty")
    """Divides positive logits of tokens that prompt or completion have, and multiplies negative ones."""
    min_tokens: Integer = Field(None, ge=0, le=MAX_UINT32)
    """Tokens before which nothing ends the text."""
    ignore_eos: bool | None = None
    """Continue after the model's end-of-sequence tokens."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MAX_UINT32)]] | None, BeforeValidator(whole_list)] = (
        Field(None, max_length=LENGTHS["stop_token_ids"].most)
    )
    """Token ids that end the text."""
    bad_words: list[Annotated[str, _string("bad_words")]] | None = Field(None, max_length=LENGTHS["bad_words"].most)
    """Strings that the completion never has."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the text."""
    guided_json: Schema | None = None
    """The same as structured_outputs.json."""
    guided_regex: str | None = None
    """The same as structured_outputs.regex."""
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    """The same as structured_outputs.choice."""
    guided_grammar: str | None = None
    """The same as structured_outputs.grammar."""
    priority: Integer = Field(None, ge=-MAX_INT32 - 1, le=MAX_INT32)
    """Order among the waiting requests of one tenant: the smallest value goes first."""
    slo_class: str | None = None
    """Class of service: default, interactive, batch, or one of the router's configuration."""
    service_tier: Literal["auto", "default", "scale", "flex", "priority"] | None = None
    """OpenAI's name of a class of service: flex is `batch`, priority is `interactive`, the others are `default`."""
    cache_salt: str | None = None
    """Requests with different salts share no prefix cache."""
    prompt_cache_key: str | None = None
    """Requests with the same key go to the same workers where that costs nothing."""
    request_id: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARACTERS)
    """Name of the request in answers and logs; by default the header X-Request-Id, or a new one."""
    return_token_ids: bool | None = None
    """Choices have the ids of their tokens as `token_ids`."""
    timeline: bool | None = None
    """Choices have a `timeline` at their end: where their time went."""

    best_of: Annotated[Any, Neutral(1)] = None
    use_beam_search: Annotated[Any, Neutral(False)] = None
    length_penalty: Annotated[Any, Neutral(1)] = None
    early_stopping: Annotated[Any, Neutral(False)] = None
    skip_special_tokens: Annotated[Any, Neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    include_stop_str_in_output: Annotated[Any, Neutral(False)] = None
    truncate_prompt_tokens: Annotated[Any, Neutral()] = None
    prompt_logprobs: Annotated[Any, Neutral()] = None
    allowed_token_ids: Annotated[Any, Neutral()] = None
    logits_processors: Annotated[Any, Neutral()] = None
    guided_decoding_backend: Annotated[Any, Neutral()] = None
    guided_whitespace_pattern: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _check_common(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise misfit("stream_options", {}, "with stream only")
        if len(self._constraints()) > 1:
            raise misfit("structured_outputs", {}, "one constraint, among response_format and guided_* too")
        if self.service_tier not in (None, "auto") and self._class != TIERS[self.service_tier]:
            raise misfit("service_tier", self.service_tier, "null, auto, or the tier of the class that slo_class names")
        return self

    def form(self) -> Form:
        """The form of the answer, as far as both APIs have it."""
        options = self.stream_options or StreamOptions()
        return Form(
            n=self.n or 1,
            stream=bool(self.stream),
            usage_chunk=options.include_usage,
            usage_in_chunks=options.include_usage and options.continuous_usage_stats,
            token_ids=bool(self.return_token_ids),
            timeline=bool(self.timeline),
            service_tier=self._tier,
        )

    @property
    def _class(self) -> str:
        """The class of service; empty if none is named."""
        return self.slo_class or (TIERS[self.service_tier] if self.service_tier else "")

    @property
    def _tier(self) -> str:
        """OpenAI's name of the class that serves, or its own name if OpenAI has none; empty if none is named."""
        return next((tier for tier, name in SERVED_TIERS.items() if name == self._class), self._class)

    def _constraints(self) -> list[Constraint]:
        formats: list[Constraint | None] = [
            None if self.response_format is None else self.response_format.constraint(),
            None if self.structured_outputs is None else self.structured_outputs.constraint(),
            None if self.guided_json is None else Constraint(json_schema=_schema_text(self.guided_json)),
            None if self.guided_regex is None else Constraint(regex=self.guided_regex),
            None if self.guided_choice is None else Constraint(choice=Choice(texts=self.guided_choice)),
            None if self.guided_grammar is None else Constraint(grammar=self.guided_grammar),
        ]
        return [constraint for constraint in formats if constraint is not None]

    def request(self, asking: Asking) -> GenerateRequest:
        """All but the prompt, in the form of the public contract."""
        seed = self.seed if self.seed is None else self.seed % 2**SEED_BITS
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            bad_words=self.bad_words,
            constraint=next(iter(self._constraints()), None),
        )

        return GenerateRequest(
            sampling=sampling,
            model=self.model or "",
            n=self.n,
            priority=self.priority or 0,
            slo_class=self._class,
            cache_salt=self.cache_salt or "",
            session=asking.session or self.prompt_cache_key or _digest(self.user or ""),
        )


def _digest(user: str) -> str:
    """A session's name for any user's name."""
    return hashlib.blake2b(user.encode(), digest_size=16).hexdigest() if user else ""


def _schema_text(schema: Schema) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
