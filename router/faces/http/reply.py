"""The answer to one HTTP request, from the messages of all of its completions: as chunks, or as a whole.

Also the parts of it that both of OpenAI's APIs share: usage, and log-probabilities of tokens.
"""

import asyncio
import codecs
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict
from pydantic_core import to_json

from kvrelay.router.request.reading import Form
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP, FinishReason, GenerateResponse, Timeline, TokenLogprobs, Usage


class Total:
    """The usage of a request's prompts. Its completions count their own tokens."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached_tokens = 0

    def begin(self, prompt: int, tokens: int) -> None:
        """Sets the number of tokens of prompt number `prompt`."""
        self._prompts[prompt] = tokens

    def end(self, usage: Usage) -> None:
        """Adds the cached tokens of an ended completion; only the first completion of a prompt has any."""
        self._cached_tokens += usage.cached_tokens

    def json(self, completions: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """OpenAI's `usage`; `completions` has for each its tokens, and those of them that are reasoning."""
        prompt_tokens = sum(self._prompts.values())
        tokens, reasoning = (sum(each) for each in zip((0, 0), *completions, strict=True))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def finish_name(reason: FinishReason) -> str:
    """OpenAI's name of a finish reason."""
    return "stop" if reason == FINISH_REASON_STOP else "length"


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """All fields of a timeline, in seconds and bytes."""
    return MessageToDict(timeline, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


PART_TOKENS = 64
"""Tokens whose log-probabilities are made JSON at a time, in a millisecond."""
LEAST = -9999.0
"""Value in place of minus infinity, which JSON doesn't have."""


_CUT = secrets.token_hex(16)
"""Stands for an `Encoded` in JSON. No client can guess it."""
_CUT_JSON = to_json(_CUT)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is JSON already."""

    json: bytes


def _json(value: Any) -> bytes:
    """JSON of a value, in which there may be an `Encoded` wherever a value may be."""
    found: list[bytes] = []

    def cut(part: Any) -> str:
        if not isinstance(part, Encoded):
            raise TypeError(f"{type(part).__name__} in an answer")
        found.append(part.json)
        return _CUT

    data = to_json(value, fallback=cut)
    if not found:
        return data
    first, *others = data.split(_CUT_JSON)
    return b"".join((first, *(part for pair in zip(found, others, strict=True) for part in pair)))


class TextLogprobs:
    """`logprobs` of a choice of `/v1/completions`: one list for each property of the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._new = _no_logprobs()
        self._encoded: list[dict[str, bytes]] = []
        """The tokens before those in `_new`, in parts: the entries of each list as JSON."""

    async def add_prompt(self, token_ids: Sequence[int], values: Sequence[TokenLogprobs]) -> None:
        """Adds a prompt, whose first token has no probability, in parts, between which others have their turn."""
        self.add(token_ids[:1], [None])
        for start in range(0, len(values), PART_TOKENS):
            part = values[start : start + PART_TOKENS]
            self.add(token_ids[start + 1 : start + 1 + len(part)], part)
            await asyncio.sleep(0)

    def add(self, token_ids: Sequence[int], values: Sequence[TokenLogprobs | None]) -> None:
        """Adds tokens; None for the first token of a prompt, which has no probability."""
        for token, value in zip(token_ids, values, strict=True):
            name = self._name(token)
            self._new["tokens"].append(name)
            self._new["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes[token]))
            self._new["token_logprobs"].append(None if value is None else _finite(value.logprob))
            self._new["top_logprobs"].append(None if value is None else self._top(name, value))
        if len(self._new["tokens"]) >= PART_TOKENS:
            self._encode()

    def take(self) -> "dict[str, Any] | Encoded":
        """The tokens that were added since the last call."""
        if not self._encoded:
            taken, self._new = self._new, _no_logprobs()
            return taken
        self._encode()
        parts, self._encoded = self._encoded, []
        lists = (b'"%b":[%b]' % (key.encode(), b",".join(part[key] for part in parts)) for key in self._new)
        return Encoded(b"{%b}" % b",".join(lists))

    def _encode(self) -> None:
        if self._new["tokens"]:
            self._encoded.append({key: to_json(values)[1:-1] for key, values in self._new.items()})
            self._new = _no_logprobs()

    def _top(self, name: str, value: TokenLogprobs) -> dict[str, float]:
        pairs = zip(value.top_ids, value.top_logprobs, strict=True)
        return {name: _finite(value.logprob)} | {self._name(token): _finite(logprob) for token, logprob in pairs}

    def _name(self, token: int) -> str:
        """The token's text; `bytes:\\xe2\\x82` for a part of a character."""
        known = self._tokenizer.token_bytes.name(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], values: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/chat/completions`: one object for each token."""
    content = [
        {
            **_entry(tokenizer, token, value.logprob),
            "top_logprobs": [
                _entry(tokenizer, other, logprob)
                for other, logprob in zip(value.top_ids, value.top_logprobs, strict=True)
            ],
        }
        for token, value in zip(token_ids, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    known = tokenizer.token_bytes.name(token)
    return {"token": known.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(known)}


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)


MARK = "\x00text\x00"
DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """One completion, as one of OpenAI's two APIs shows it."""

    async def begin(self, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        """Called once, before the first message is added.

        Args:
            prompt_logprobs: all that were asked for.
        """

    def add(self, message: GenerateResponse) -> str | dict[str, Any] | None:
        """The part of a chunk that a message adds to the choice, without its index; a text if it is only text.

        None if the message adds nothing.
        """

    def part(self, text: str) -> dict[str, Any]:
        """A chunk's part that adds only text."""

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer, without its index."""

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the completion so far, and those of them that are reasoning."""


class Reply:
    """Collects messages. A chunk that adds only text, as nearly all do, is the text between bytes that don't change."""

    def __init__(self, form: Form, kind: str, head: dict[str, Any], make: Callable[[CheckedRequest], Choice]):
        """
        Args:
            kind: `object` of a whole answer.
            head: further fields at the beginning of each answer: id, model and system_fingerprint.
            make: the choice for a completion of a prompt.
        """
        self._form = form
        self._make = make
        tier = {"service_tier": form.service_tier} if form.service_tier else {}
        self._head = {"id": head.pop("id"), "object": kind, "created": int(time.time()), **head, **tier}
        self._chunk_head = self._head | {"object": kind if kind == "text_completion" else f"{kind}.chunk"}
        self._prompts: dict[int, CheckedRequest] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        self._choices: dict[int, Choice] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._total = Total()

    def begin(self, prompt: int, request: CheckedRequest) -> None:
        """Notes prompt number `prompt`, which was checked."""
        self._prompts[prompt] = request
        self._total.begin(prompt, len(request.prompt))

    async def add(self, prompt: int, message: GenerateResponse) -> bytes:
        """Adds a message about a prompt; returns the events that it makes, if any."""
        index = self._index(prompt, message)
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        if index not in self._choices:
            choice = self._choices[index] = self._make(self._prompts[prompt])
            await choice.begin(self._prompt_logprobs.get(prompt, ()))
        return self.add_more(prompt, message)

    def add_more(self, prompt: int, message: GenerateResponse) -> bytes:
        """As `add`, for a message after a completion's first one."""
        index = self._index(prompt, message)
        choice = self._choices[index]
        part = choice.add(message)
        if message.finish_reason:
            self._total.end(message.usage)
        if part is None or not self._form.stream:
            return b""
        if isinstance(part, str):
            if not self._form.usage_in_chunks:
                before, after = self._frame(index, choice)
                return before + to_json(part) + after
            part = choice.part(part)
        return self._event([{"index": index, **part}])

    def _index(self, prompt: int, message: GenerateResponse) -> int:
        return prompt * self._form.n + message.index

    def end(self) -> bytes:
        """The last events of a stream."""
        return (self._event([], usage=True) if self._form.usage_chunk else b"") + DONE

    def whole(self) -> bytes:
        """The whole answer."""
        choices = [{"index": index, **choice.whole()} for index, choice in sorted(self._choices.items())]
        return _json({**self._head, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return self._total.json([choice.counted for choice in self._choices.values()])

    def _event(self, choices: list[dict[str, Any]], *, usage: bool = False) -> bytes:
        chunk = {**self._chunk_head, "choices": choices}
        if self._form.usage_chunk:
            chunk["usage"] = self._usage() if usage or self._form.usage_in_chunks else None
        return b"data: %b\n\n" % _json(chunk)

    def _frame(self, index: int, choice: Choice) -> tuple[bytes, bytes]:
        """The bytes before and behind the text in a chunk that adds only text."""
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._event([{"index": index, **choice.part(MARK)}]).partition(to_json(MARK))
            frame = self._frames[index] = before, after
        return frame
