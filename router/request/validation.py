"""Checks a client's request: the result can be served by any worker, or an error names field, value and limit.

This is the only check of a prompt by a user's standards; workers check what they get from a router once more, by their
own limits.
"""

import asyncio
import hashlib
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from xxhash import xxh3_64_intdigest

from kvrelay.internal.v1.worker_pb2 import ClientCall, ModelInfo, Sampling
from kvrelay.router.errors import InvalidRequest, PromptTooLong, shorten
from kvrelay.router.placing.prefixes import UNIT, chain_of
from kvrelay.router.placing.queue import NO_CLAIM, Claim
from kvrelay.router.request.chat import TemplateFailed
from kvrelay.router.request.conversation import conversation
from kvrelay.router.request.conversation import size as conversation_size
from kvrelay.router.request.prompt import PART_TOKENS, Prompt
from kvrelay.router.request.sampling import Defaults, check_ids, fit_to_prompt, sampling_of
from kvrelay.router.request.tokenizer import Tokenizer, TooManyTokens
from kvrelay.rpc.identity import CONTEXT_REASONS
from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    ChatMessages,
    FinishReason,
    GenerateRequest,
    Resume,
    SamplingParams,
    TokenizeRequest,
)

MAX_REQUEST_ID_CHARACTERS = 128
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
MAX_COMPLETIONS = 128
TOKENIZE_BYTES = 512 * 1024
"""Largest text to be tokenized alone: what the event loop can send in some milliseconds."""
DETOKENIZE_IDS = 64 * 1024
"""Most ids to be detokenized: a token may have a text of some hundred bytes."""
TOKENIZE_WHY = "send a longer text in parts"
TAIL_TOKENS = UNIT
"""Last tokens of a prompt that are kept at hand: all that no digest of its chain names are among them."""

WIRE_NAME_CHARACTERS = 100
"""Characters of the client's name that go into a wire id, which may have 128."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The tokens that the client has from earlier calls of its request."""

    tokens: Sequence[int] = ()
    finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED
    """Way in which the last of the tokens ends the completion, stop strings aside; unspecified if it doesn't."""
    field: str = ""
    """The tokens' name in the request, for errors."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request within all limits, with the defaults filled in."""

    request_id: str
    """The client's name for the request, or one drawn by the router."""
    wire_id: str
    """The name between router and workers: unlike the client's name, unique among the requests in flight."""
    prompt: Prompt
    sampling: Sampling
    """Sampling as workers get it; must not be changed."""
    stop: tuple[str, ...]
    tenant: str
    """Tenant of the caller."""
    tail: tuple[int, ...] = ()
    """The last tokens of the prompt, at most TAIL_TOKENS."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose names are part of the text."""
    index: int = 0
    """Number of this completion among those of the request, from 0."""
    namespace: str = ""
    """Namespace of the prefix cache: requests of the same tenant with the same salt share it."""
    chain: Sequence[int] = ()
    """Digests of the prompt's prefixes in that namespace (`router/placing/prefixes.py`)."""
    key: int = 0
    """Affinity key: requests with equal keys (one session, or the same prompt) prefer the same workers; 0 for none."""
    claim: Claim = NO_CLAIM
    """Facts that decide its turn while it waits."""
    first_token_seconds: float = 0.0
    """Most seconds from receipt to the first token."""
    client_call: ClientCall | None = None
    """This call, if the client may continue the request by another one."""
    resumed: Resumed = Resumed()
    others_resumed: tuple[Resumed, ...] = ()
    """Tokens from earlier calls for completions 1, 2, ...; only in completion 0."""

    @property
    def resumes(self) -> int:
        """Earlier calls of this request."""
        return 0 if self.client_call is None else self.client_call.call - 1


async def check(
    request: GenerateRequest, tenant: str, model: ModelInfo, tokenizer: Tokenizer, defaults: Defaults
) -> CheckedRequest:
    """Checks the fields that cost nothing, tokenizes, then checks the limits that depend on the tokens.

    Args:
        tenant: the caller's.
        defaults: of the fields that the request leaves out.

    Raises:
        InvalidRequest: a field is beyond its limit; the text contains nothing of the prompt.
    """
    request_id, wire_id = _names(request.request_id)
    params = request.sampling
    _check_count(request)
    for field in ("cache_salt", "session"):
        check_name(field, getattr(request, field))
    client_call = _client_call(request.resume, params, tenant) if request.HasField("resume") else None
    sampling = await sampling_of(params, model, defaults, tokenizer)
    tokens = await prompt_tokens(request, tokenizer, model)
    fit_to_prompt(sampling, len(tokens), _room(params, len(tokens), model))
    if request.resume.token_ids:
        # They came with the first of these tokens.
        sampling.ClearField("prompt_logprobs")
    # No tenant has this character.
    namespace = f"{tenant}\0{request.cache_salt}" if request.cache_salt else tenant
    chain = await chain_of(tokens, namespace)
    return CheckedRequest(
        request_id,
        wire_id,
        await Prompt.of(tokens),
        sampling,
        tuple(params.stop),
        tenant,
        tuple(tokens[-TAIL_TOKENS:]),
        namespace=namespace,
        chain=chain,
        key=_key(namespace, request.session, chain),
        client_call=client_call,
        resumed=await _resumed("resume.token_ids", request.resume.token_ids, sampling, model),
        others_resumed=tuple(
            [
                await _resumed(f"resume.others[{at}].ids", other.ids, sampling, model)
                for at, other in enumerate(request.resume.others)
            ]
        ),
    )


def completions(checked: CheckedRequest, count: int) -> list[CheckedRequest]:
    """The `count` completions of a prompt, the first of which is `checked`; each has its own seed and wire id."""
    return [checked, *(_later_completion(checked, index) for index in range(1, count))]


def completion_seed(seed: int, index: int) -> int:
    """The seed of a request's completion: the first 8 bytes of BLAKE2b("<seed>/<index>"), little-endian; of the first
    completion, `seed` itself."""
    if not index:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def _later_completion(checked: CheckedRequest, index: int) -> CheckedRequest:
    sampling = Sampling()
    sampling.CopyFrom(checked.sampling)
    sampling.seed = completion_seed(sampling.seed, index)
    sampling.ClearField("prompt_logprobs")  # the first completion has them
    resumed = checked.others_resumed[index - 1] if index <= len(checked.others_resumed) else Resumed()
    wire_id = f"{checked.wire_id}/{index}"
    return replace(checked, wire_id=wire_id, sampling=sampling, index=index, resumed=resumed, others_resumed=())


def _check_count(request: GenerateRequest) -> None:
    count = request.n if request.HasField("n") else 1
    if not 1 <= count <= MAX_COMPLETIONS:
        raise InvalidRequest("n", count, f"1 to {MAX_COMPLETIONS}")
    if len(request.resume.others) >= count:
        raise InvalidRequest(
            "resume.others: number of lists", len(request.resume.others), f"up to {count - 1}, one less than n"
        )


async def prompt_tokens(request: GenerateRequest, tokenizer: Tokenizer, model: ModelInfo) -> "array[int]":
    """The token ids of a request's input, at least one, each of the vocabulary.

    A text that is longer than the longest text of `max_context` tokens is refused before it is tokenized.

    Raises:
        InvalidRequest: there is no input, it is too long, or it can't be tokenized.
    """
    if request.WhichOneof("input") == "token_ids":
        ids = request.token_ids.ids
        if not ids:
            raise InvalidRequest("token_ids.ids", [], "at least 1 id")
        if len(ids) >= model.max_context:
            raise _too_long(len(ids), model)
        return await checked_ids("token_ids.ids", ids, model.vocab_size)
    longest = model.max_context * tokenizer.longest_token_bytes
    why = f"{_context(model)}, of up to {tokenizer.longest_token_bytes} bytes each"
    try:
        tokens = await text_tokens(request, tokenizer, longest, why, model.max_context)
    except TooManyTokens as error:
        raise _too_long(error.count, model) from None
    check_ids("prompt: token ids", tokens, model.vocab_size)
    return tokens


async def text_tokens(
    request: GenerateRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    max_bytes: int,
    why: str,
    most: int | None = None,
) -> "array[int]":
    """The token ids of a text or of chat messages, at least one.

    Args:
        max_bytes: of all texts together, encoded as UTF-8.
        why: what that limit is.
        most: tokens.

    Raises:
        InvalidRequest: there is no input, it is too long, or it can't be tokenized.
        TooManyTokens: it has more tokens than `most`.
    """
    given = request.WhichOneof("input")
    match given:
        case "text":
            if not request.text:
                raise InvalidRequest("text", request.text, "at least 1 character")
            size = len(request.text.encode())
        case "messages":
            size = conversation_size(request.messages)
        case _:
            raise InvalidRequest("input", None, "text, messages or token ids")
    if size > max_bytes:
        raise InvalidRequest(f"{given}: number of bytes", size, f"up to {max_bytes}, {why}")
    if given == "text":
        tokens = await tokenizer.encode(request.text, most)
    else:
        tokens = await _encode_chat(request.messages, tokenizer, max_bytes, most)
    if not tokens:
        raise InvalidRequest(f"{given}: number of tokens", 0, "at least 1")
    return tokens


async def checked_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> "array[int]":
    """A compact copy of `token_ids`, made in parts, between which other requests have their turn.

    Raises:
        InvalidRequest: an id is outside of the vocabulary.
    """
    copy = array("I")
    for start in range(0, len(token_ids), PART_TOKENS):
        if start:
            await asyncio.sleep(0)
        part = array("I", token_ids[start : start + PART_TOKENS])
        check_ids(field, part, vocab_size, start)
        copy.extend(part)
    return copy


async def _encode_chat(chat: ChatMessages, tokenizer: Tokenizer, max_bytes: int, most: int | None) -> "array[int]":
    count = len(chat.messages)
    try:
        return await tokenizer.encode_chat(partial(conversation, chat), max_bytes, most)
    except LookupError as error:
        limit = "0: this model has no chat template, send text or token ids"
        raise InvalidRequest("messages: number of messages", count, limit) from error
    except TemplateFailed as error:
        limit = f"what the model's chat template renders ({shorten(str(error))})"
        raise InvalidRequest("messages: number of messages", count, limit) from error


def is_name(name: str) -> bool:
    """Whether a request, a session or a tenant may have this name; empty is none."""
    return len(name) <= MAX_REQUEST_ID_CHARACTERS and name.isascii() and name.isprintable()


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest unless `is_name`."""
    if not is_name(name):
        raise InvalidRequest(field, name, f"1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters, or empty")


def _key(namespace: str, session: str, chain: Sequence[int]) -> int:
    if session:
        return xxh3_64_intdigest(f"{namespace}\0{session}".encode())
    return chain[-1] if chain else 0


def _names(request_id: str) -> tuple[str, str]:
    unique = uuid.uuid4().hex
    if not request_id:
        return unique, unique
    check_name("request_id", request_id)
    return request_id, f"{request_id[:WIRE_NAME_CHARACTERS]}/{unique[:12]}"


def _client_call(resume: Resume, params: SamplingParams, tenant: str) -> ClientCall:
    """The call's place among those of its request. No error contains the key, and workers get a digest of it, so that
    it ends requests of the same tenant only."""
    if not MIN_KEY_BYTES <= len(resume.key) <= MAX_KEY_BYTES:
        raise InvalidRequest("resume.key: number of bytes", len(resume.key), f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    if resume.call < 1:
        raise InvalidRequest("resume.call", resume.call, "1 or more")
    had = max(map(len, (resume.token_ids, *(other.ids for other in resume.others))))
    if resume.call == 1 and had:
        raise InvalidRequest("resume: number of token ids", had, "0 in the request's first call")
    drawn = not params.HasField("temperature") or params.temperature > 0
    if had and drawn and not params.HasField("seed"):
        raise InvalidRequest("sampling.seed", None, "the seed of the request's first call, or temperature 0")
    digest = hashlib.blake2b(tenant.encode(), key=resume.key, digest_size=MIN_KEY_BYTES).digest()
    return ClientCall(key=digest, call=resume.call)


async def _resumed(field: str, token_ids: Sequence[int], sampling: Sampling, model: ModelInfo) -> Resumed:
    if not token_ids:
        return Resumed()
    if len(token_ids) > sampling.max_tokens:
        limit = f"up to max_tokens, {sampling.max_tokens} here"
        raise InvalidRequest(f"{field}: number of ids", len(token_ids), limit)
    tokens = await checked_ids(field, token_ids, model.vocab_size)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    if tokens[-1] in ends and len(tokens) >= sampling.min_tokens:
        return Resumed(tokens, FINISH_REASON_STOP, field)
    ended = FINISH_REASON_LENGTH if len(tokens) == sampling.max_tokens else FINISH_REASON_UNSPECIFIED
    return Resumed(tokens, ended, field)


def _room(params: SamplingParams, prompt: int, model: ModelInfo) -> int:
    """Tokens that a completion may have behind a prompt of so many; never fewer than were asked for."""
    left = model.max_context - prompt
    if left < 1:
        raise _too_long(prompt, model)
    if params.max_tokens > left:
        limit = f"up to {left}: the prompt has {prompt} tokens and {_context(model)}"
        raise PromptTooLong("sampling.max_tokens", params.max_tokens, limit)
    return left


def _too_long(prompt: int, model: ModelInfo) -> PromptTooLong:
    limit = f"up to {model.max_context - 1}: {_context(model)}, and one must be left to generate"
    return PromptTooLong("prompt: number of tokens", prompt, limit)


def _context(model: ModelInfo) -> str:
    """The context's limit and what it comes from."""
    return CONTEXT_REASONS[model.context_limit].format(model.max_context)
