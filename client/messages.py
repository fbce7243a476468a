"""What both clients send and return: plain values on this side, the contract's messages on the wire's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypedDict

from kvrelay.client.errors import InternalError, InvalidRequest
from kvrelay.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text; or token ids; or chat messages, `{"role": ..., "content": ...}` each."""

FinishReason = Literal["stop", "length"]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `complete`. What is left out, or None, takes the router's default."""

    max_tokens: int | None
    """Tokens to generate at most; 128, or what the context leaves, by default."""
    min_tokens: int | None
    """Tokens before which nothing but max_tokens ends the request; 0 by default."""
    temperature: float | None
    """0 is greedy; 1 by default, 100 at most."""
    top_k: int | None
    """Keep the k likeliest tokens; 0, the default, keeps all."""
    top_p: float | None
    """Keep the likeliest tokens that reach this probability together, in (0, 1]; 1 by default."""
    min_p: float | None
    """Drop tokens below this share of the likeliest one's probability, in [0, 1]; 0 by default."""
    seed: int | None
    """Equal seeds give equal tokens; drawn by the router by default."""
    stop: str | Sequence[str]
    """Up to 16 strings; the text ends before the first that comes up."""
    stop_token_ids: Sequence[int]
    """Up to 64 ids that end the request."""
    ignore_eos: bool
    """Go on past the model's end-of-sequence tokens."""
    tenant: str
    """Requests of different tenants share no prefix cache."""
    request_id: str
    """Your name for the request; drawn by the router by default."""
    timeout: float | None
    """Seconds until the call fails with DeadlineExceeded; the client's own by default."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt's, those whose KV was in the prefill worker's prefix cache."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one request's time went, in seconds; each part by one machine's clock, so that they overlap.

    The fields are those of `Timeline` in `kvrelay/v1/inference.proto`, which says what each one measures.
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new. The last chunk of a stream, and only that one, has a finish reason, usage and timeline."""

    text: str
    """Whole characters; may be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a cluster serves."""

    name: str
    architecture: str
    vocab_size: int
    max_context: int
    """Prompt plus completion, in tokens."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    has_chat_template: bool
    version: str
    """Of the router."""


TIMELINE_FIELDS = tuple(field.name for field in fields(Timeline))
_SCALARS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
_FINISH_REASONS: dict[pb.FinishReason, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request on the wire.

    Raises:
        InvalidRequest: a value can't be sent at all, e.g. a negative max_tokens; the router checks the rest.
        TypeError: there is no such option.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    _set(request, "request_id", options.get("request_id", ""))
    _set(request, "tenant", options.get("tenant", ""))
    for name in _SCALARS:
        value = options.get(name)
        if value is not None:
            _set(request.sampling, name, value, "sampling.")
    stop = options.get("stop", ())
    _extend(request.sampling, "stop", (stop,) if isinstance(stop, str) else stop, "sampling.")
    _extend(request.sampling, "stop_token_ids", options.get("stop_token_ids", ()), "sampling.")
    return request


def tokenize_request(prompt: str | Sequence[Mapping[str, str]]) -> pb.TokenizeRequest:
    """Raises InvalidRequest as `generate_request`."""
    request = pb.TokenizeRequest()
    _set_prompt(request, prompt)
    return request


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """Raises InvalidRequest as `generate_request`."""
    request = pb.DetokenizeRequest()
    _extend(request, "token_ids", token_ids)
    return request


def chunk(response: pb.GenerateResponse) -> Chunk:
    """One message of a stream."""
    reason = _FINISH_REASONS.get(response.finish_reason)
    if reason is None:
        return Chunk(response.text, tuple(response.token_ids))
    usage, timeline = response.usage, response.timeline
    return Chunk(
        response.text,
        tuple(response.token_ids),
        reason,
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        Timeline(**{name: getattr(timeline, name) for name in TIMELINE_FIELDS}),
    )


def completion(chunks: Sequence[Chunk]) -> Completion:
    """Puts the chunks of a whole stream together.

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
    )


def model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """What a cluster serves, as it says."""
    return ModelInfo(
        response.name,
        response.architecture,
        response.vocab_size,
        response.max_context,
        tuple(response.eos_token_ids),
        response.dtype,
        response.has_chat_template,
        response.version,
    )


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
        _extend(request.token_ids, "ids", prompt, "token_ids.")
    else:
        raise InvalidRequest("prompt has token ids; allowed: text or chat messages")


def _add_message(messages: pb.ChatMessages, index: int, message: object) -> None:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise InvalidRequest(f"messages[{index}]; allowed: an object with role and content")
    added = messages.messages.add()
    for name in ("role", "content"):
        _set(added, name, message[name], f"messages[{index}].")


def _set(message: object, name: str, value: object, where: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where}{name}: {_why(error)}") from error


def _extend(message: object, name: str, values: object, where: str = "") -> None:
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where}{name}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """UnicodeEncodeError shows the text that it is about, which is somebody's prompt."""
    return "not valid Unicode" if isinstance(error, UnicodeError) else str(error)
