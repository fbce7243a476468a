"""Converts between the values that both clients take and return, and the messages on the wire."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, cast

from google.protobuf.message import Message

from kvrelay.client.errors import InternalError, InvalidRequest
from kvrelay.v1 import inference_pb2 as pb

MAX_MESSAGE_BYTES = 64 * 2**20

PING_SECONDS = 20
PING_OTHERS_SECONDS = 2
"""Silence after which a client pings its router, and how long the answer may take; the second if it knows others."""


def channel_options(routers: int) -> tuple[tuple[str, int], ...]:
    """Options of the channel to one of so many routers.

    A router that ends is noticed at once, while a call runs. One that is frozen, or unreachable without a word, is
    noticed one to two times PING_SECONDS after its last sign of life: long enough that no stream ends because one of
    the two processes gets no CPU for some seconds. If there are other routers, the stream goes on there in any case, so
    PING_OTHERS_SECONDS count.
    """
    seconds = PING_SECONDS if routers == 1 else PING_OTHERS_SECONDS
    return (
        ("grpc.keepalive_time_ms", seconds * 1000),
        ("grpc.keepalive_timeout_ms", seconds * 1000),
        ("grpc.http2.ping_timeout_ms", seconds * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        # Also the time limit of a connection's first bytes, which a frozen router never sends.
        ("grpc.min_reconnect_backoff_ms", seconds * 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    )


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages of the form `{"role": ..., "content": ...}`."""

FinishReason = Literal["stop", "length"]
"""The names of `kvrelay.v1.FinishReason`, without their prefix."""

REQUEST_FIELDS = ("request_id", "tenant", "model", "n", "priority", "slo_class", "cache_salt", "session")
"""The options that are fields of the request itself; the others are its sampling parameters."""

ValueT = TypeVar("ValueT")


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `complete`. None, or leaving one out, means the router's default."""

    max_tokens: int | None
    """Most tokens to generate; by default what the prompt leaves of the model's context."""
    min_tokens: int | None
    """Number of tokens before which nothing but max_tokens ends the request; 0 by default."""
    temperature: float | None
    """0 is greedy; 1 by default; at most 100. The model's generation_config.json may have another default, as for
    top_k, top_p, min_p and repetition_penalty."""
    top_k: int | None
    """Keep the k likeliest tokens; 0, the default, keeps all."""
    top_p: float | None
    """Keep the smallest set of likeliest tokens whose total probability reaches this, in (0, 1]; 1 by default."""
    min_p: float | None
    """Drop tokens less likely than this fraction of the likeliest one, in [0, 1]; 0 by default."""
    seed: int | None
    """Equal seeds give equal tokens; drawn by the client by default."""
    stop: str | Sequence[str]
    """Up to 16 strings; the text ends before the first match."""
    stop_token_ids: Sequence[int]
    """Up to 64 token ids that end the request."""
    ignore_eos: bool
    """Continue after the model's end-of-sequence tokens."""
    presence_penalty: float | None
    """Subtracted once from the logit of each token that the completion has, -2 to 2; 0 by default."""
    frequency_penalty: float | None
    """Subtracted for each time that the completion has the token, -2 to 2; 0 by default."""
    repetition_penalty: float | None
    """Above 1, tokens that the prompt or the completion has become less likely; up to 10; 1 by default."""
    logit_bias: Mapping[int, float]
    """Added to the logits of these token ids, -100 to 100; at most 1024 ids."""
    bad_words: Sequence[str]
    """Up to 64 strings that the completion never has as tokens."""
    logprobs: int | None
    """Return each token's log-probability, and those of this many likeliest tokens, up to 20; none by default."""
    prompt_logprobs: int | None
    """Number of likeliest tokens for each prompt token but the first, like `logprobs`; none by default."""
    json_schema: str | Mapping[str, Any]
    """The completion is JSON that obeys this schema. Of the options from here to `grammar`, at most one."""
    json_object: bool
    """The completion is a JSON object."""
    regex: str
    """The whole completion matches this regular expression."""
    choice: Sequence[str]
    """The completion is one of these texts."""
    grammar: str
    """The completion follows this context-free grammar in Lark's form."""
    n: int | None
    """Completions of the prompt, 1 to 128; 1 by default. Completion i > 0 has a seed derived from `seed` and i."""
    model: str
    """A name that the model is served under; the model by default."""
    priority: int
    """Order among the waiting requests of one tenant: the smallest value goes first; 0 by default."""
    slo_class: str
    """Name of a class of service that the router's configuration has."""
    cache_salt: str
    """Requests with different salts never share prefix-cache blocks."""
    session: str
    """Requests with the same key go to the same workers where that costs nothing, e.g. the turns of a conversation."""
    tenant: str
    """Fails the call unless the router knows its caller as this tenant, by the API key or the client's certificate."""
    request_id: str
    """A name for the request; drawn by the client by default."""
    timeout: float | None
    """Seconds until the call fails with DeadlineExceeded; the client's own by default."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefill worker's prefix cache."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one request's time went, in seconds; the parts overlap, since each is measured by one machine's clock.

    `Timeline` in `kvrelay/v1/inference.proto` defines each field.
    """

    route_seconds: float
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    handoff_seconds: float
    first_token_seconds: float
    decode_queue_seconds: float
    decode_seconds: float
    total_seconds: float
    transfer_bytes: int
    retries: int
    prefill_worker: str
    decode_worker: str
    migrations: int
    resumes: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    way: str = ""
    predicted_first_token_seconds: float = 0.0
    predicted_token_seconds: float = 0.0
    predicted_handoff_seconds: float = 0.0
    runner_up: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, by the model's own distribution."""

    logprob: float
    """Logarithm of the probability of the token itself."""
    rank: int
    """Rank of the token among all tokens, from 1 for the likeliest."""
    top_ids: tuple[int, ...]
    """The likeliest tokens, likeliest first, as many as were asked for."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output. The last chunk of a completion, and no other of it, has a finish reason, usage and timeline."""

    text: str
    """Whole characters; may be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the prompt but the first, with the first token, if they were asked for."""
    seed: int | None = None
    """Seed of the completion; only in the completion's first chunk of a call."""
    index: int = 0
    """Number of the completion that this chunk belongs to, from 0 to n - 1."""
    request_id: str = ""
    """The request's name, for `kvrelay doctor` and the routers' page."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities as in `Chunk`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt as in `Chunk`; of n completions, only the first one has them."""
    seed: int | None = None
    """Seed of the completion; with it and otherwise the same options, the prompt gets the same tokens again."""
    request_id: str = ""
    """Name of the request as in `Chunk`; the same for all of n completions."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a cluster serves."""

    name: str
    architecture: str
    vocab_size: int
    max_context: int
    """Prompt plus completion, in tokens."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    has_chat_template: bool
    version: str
    """Version of kvrelay that the router runs."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message of a request.

    Raises:
        InvalidRequest: a value can't be sent at all, e.g. a negative max_tokens; the router checks the rest.
        TypeError: there is no such option.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name in REQUEST_FIELDS:
        if (value := options.get(name)) is not None:
            _set(request, name, value)
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        value = options.get(name)
        if value is not None:
            _set(request.sampling, name, (value,) if name == "stop" and isinstance(value, str) else value, "sampling.")
    _set_constraint(request.sampling, options)
    return request


def _set_constraint(sampling: pb.SamplingParams, options: GenerateOptions) -> None:
    kinds = [field.name for field in pb.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields]
    given = {kind: value for kind in kinds if (value := options.get(kind)) not in (None, False)}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are given; allowed: one of them")
    for kind, value in given.items():
        if kind == "choice":
            sampling.constraint.choice.SetInParent()
            _set(sampling.constraint.choice, "texts", value, "sampling.constraint.choice.")
        else:
            text = json.dumps(value) if kind == "json_schema" and isinstance(value, Mapping) else value
            _set(sampling.constraint, kind, text, "sampling.constraint.")


def tokenize_request(prompt: str | Sequence[Mapping[str, str]]) -> pb.TokenizeRequest:
    """Raises InvalidRequest as `generate_request`."""
    request = pb.TokenizeRequest()
    _set_prompt(request, prompt)
    return request


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """Raises InvalidRequest as `generate_request`."""
    request = pb.DetokenizeRequest()
    _set(request, "token_ids", token_ids)
    return request


def chunk(response: pb.GenerateResponse) -> Chunk:
    """One message of a stream."""
    text, token_ids = response.text, tuple(response.token_ids)
    logprobs, prompt_logprobs = _logprobs(response.logprobs), _logprobs(response.prompt_logprobs)
    seed = response.seed if response.HasField("seed") else None
    finish_reason, usage, timeline = None, None, None
    if response.finish_reason:
        name = pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
        finish_reason = cast(FinishReason, name)
        usage, timeline = _mirror(Usage, response.usage), _mirror(Timeline, response.timeline)
    return Chunk(
        text,
        token_ids,
        finish_reason,
        usage,
        timeline,
        logprobs,
        prompt_logprobs,
        seed,
        response.index,
        response.request_id,
    )


def _logprobs(found: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(one.logprob, one.rank, tuple(one.top_ids), tuple(one.top_logprobs)) for one in found])


def completion(chunks: Sequence[Chunk]) -> Completion:
    """Joins the chunks of a whole stream.

    Raises:
        InternalError: the stream ended without its last message.
    """
    last = chunks[-1] if chunks else Chunk("", ())
    if last.finish_reason is None or last.usage is None or last.timeline is None:
        raise InternalError("the stream ended without its last message")
    return Completion(
        "".join(part.text for part in chunks),
        tuple(token for part in chunks for token in part.token_ids),
        last.finish_reason,
        last.usage,
        last.timeline,
        tuple(one for part in chunks for one in part.logprobs),
        tuple(one for part in chunks for one in part.prompt_logprobs),
        next((part.seed for part in chunks if part.seed is not None), None),
        last.request_id,
    )


def completions(chunks: Iterable[Chunk], count: int) -> list[Completion]:
    """Joins the chunks of a stream of so many completions.

    Raises:
        InternalError: as `completion`.
    """
    parts: list[list[Chunk]] = [[] for _ in range(count)]
    for part in chunks:
        parts[part.index].append(part)
    return [completion(each) for each in parts]


def check_single(options: GenerateOptions) -> None:
    """
    Raises:
        InvalidRequest: the options ask for several completions.
    """
    if (count := options.get("n")) not in (None, 1):
        raise InvalidRequest(f"n is {count!r}; allowed: 1 here; `completions` returns several")


def model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """The model that a router reports."""
    return replace(_mirror(ModelInfo, response), eos_token_ids=tuple(response.eos_token_ids))


def _mirror(kind: type[ValueT], message: object) -> ValueT:
    """A dataclass whose fields have the names and values of the message's."""
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})  # type: ignore[arg-type]  # a dataclass


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt is {type(prompt).__name__}; allowed: text, token ids, or chat messages")
    elif prompt and isinstance(prompt[0], Mapping):
        request.messages.SetInParent()
        for index, message in enumerate(prompt):
            _add_message(request.messages, index, message)
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", prompt, "token_ids.")
    else:
        raise InvalidRequest("prompt has token ids; allowed: text or chat messages")


def _add_message(messages: pb.ChatMessages, index: int, message: object) -> None:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise InvalidRequest(f"messages[{index}]; allowed: an object with role and content")
    added = messages.messages.add()
    for name in ("role", "content"):
        _set(added, name, message[name], f"messages[{index}].")


def _set(message: Message, name: str, value: Any, where: str = "") -> None:
    try:
        if message.DESCRIPTOR.fields_by_name[name].is_repeated:
            target = getattr(message, name)
            if isinstance(value, str | bytes):
                # Python would take it for the list of its characters.
                raise TypeError(f"it is {type(value).__name__}; allowed: a list")
            if isinstance(value, Mapping):
                target.update(value)
            else:
                target.extend(value)
        else:
            setattr(message, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        # The text of a UnicodeEncodeError contains the value, which may be a prompt.
        why = "not valid Unicode" if isinstance(error, UnicodeError) else str(error)
        raise InvalidRequest(f"{where}{name}: {why}") from error
