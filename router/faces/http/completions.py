"""`/v1/completions`: text behind one prompt or several."""

import asyncio
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, from_json

from kvrelay.router.errors import InvalidArgument
from kvrelay.router.faces.http.body import parse
from kvrelay.router.faces.http.fields import MAX_UINT32, GenerateFields, Integer, Neutral, misfit, whole_list
from kvrelay.router.faces.http.reply import TextLogprobs, finish_name, timeline_json
from kvrelay.router.request.prompt import PART_TOKENS
from kvrelay.router.request.reading import Asking, Form
from kvrelay.router.request.sampling import MAX_LOGPROBS
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.request.wire import SMALL_BYTES
from kvrelay.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenIds, TokenLogprobs

MAX_PROMPTS = 1024


MAX_CUT = 16384
"""Token ids of a large body that are parsed at a time."""
_CUT = secrets.token_hex(16)
"""Stands for token ids that were cut out of a body. No client can guess it."""
_IDS = b"0123456789,[] \t\r\n"


def read_completion(data: bytes, max_ids: int) -> "CompletionRequest":
    """The request in a body. Token ids of a large body are parsed apart, in parts: together they would hold the
    interpreter for too long.

    Args:
        max_ids: most ids of all prompts.

    Raises:
        InvalidArgument: as `parse`.
    """
    if len(data) > SMALL_BYTES and (cut := _cut_prompt(data, max_ids)) is not None:
        prompt, rest = cut
        body = parse(CompletionRequest, rest)
        if body.prompt == [_CUT]:
            body.prompt = prompt
            return body
    return parse(CompletionRequest, data)


def _cut_prompt(data: bytes, max_ids: int) -> "tuple[list[array[int]], bytes] | None":
    """The token ids behind the first key `prompt`, and the body with _CUT in their place; None if there are none."""
    key = data.find(b'"prompt"')
    start = data.find(b"[", key)
    if key < 0 or start < 0 or data[key + 8 : start].strip() != b":":
        return None
    nested = data[start + 1 : start + 64].lstrip()[:1] == b"["
    end = data.find(b"]", start)
    if nested:
        ends = [at for at in (data.find(b'"', start), data.find(b"}", start)) if at >= 0]
        end = data.rfind(b"]", start, min(ends, default=len(data)))
    if end < 0 or data[start : end + 1].translate(None, _IDS):
        return None
    text = data[start + 1 : end]
    if text.count(b",") > max_ids:
        raise InvalidArgument(f"prompt: number of token ids is above {max_ids}; allowed: up to {max_ids}")
    lists = [text]
    if nested:
        lists = (b"," + text).split(b"]", MAX_PROMPTS)
        if lists.pop().strip() or not all(each.partition(b"[")[0].strip() == b"," for each in lists):
            return None
        lists = [each.partition(b"[")[2] for each in lists]
    try:
        return [_ids(each) for each in lists], data[:start] + f'"{_CUT}"'.encode() + data[end + 1 :]
    except ValueError:
        return None


def _ids(text: bytes) -> "array[int]":
    """The ids in a list's text, parsed in parts.

    Raises:
        ValueError: it isn't a list of numbers of 32 bits, or empty.
    """
    ids: array[int] = array("I")
    start = 0
    while True:
        end = min(len(text), start + MAX_CUT)
        comma = text.find(b",", end)
        part = text[start:] if comma < 0 else text[start:comma]
        try:
            found = array("I", from_json(b"[%b]" % part))
        except (TypeError, OverflowError):
            found = None
        if not found:
            raise ValueError("no list of token ids")
        ids.extend(found)
        if comma < 0:
            return ids
        start = comma + 1


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _check_prompt(value: Any) -> Any:
    """Checks the four forms of a prompt; each by hand, since a union of lists would be tried member by member."""
    value = whole_list(value)
    single = isinstance(value, str) or _is_ids(value)
    prompts = [value] if single or not isinstance(value, list) else value
    # The length is checked first, so that a list of 65,536 lists isn't looked at any further.
    if 1 <= len(prompts) <= MAX_PROMPTS:
        prompts = list(map(whole_list, prompts))
    if not 1 <= len(prompts) <= MAX_PROMPTS or not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        allowed = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
        raise PydanticCustomError("prompt", "{allowed}", {"allowed": allowed})
    for ids in prompts:
        if not isinstance(ids, str) and not 0 <= min(ids) <= max(ids) <= MAX_UINT32:
            raise PydanticCustomError("prompt", "token ids of the model's vocabulary")
    return prompts


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_UINT32}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKENS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "Text, token ids, or a list of either.",
}


class CompletionRequest(GenerateFields):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    """Text, token ids, or a list of either. After the check, a list of prompts."""
    echo: bool | None = None
    """The text begins with the prompt; with max_tokens of 0, it is the prompt alone."""
    logprobs: Integer = Field(None, ge=0, le=MAX_LOGPROBS)
    """Log-probabilities of each token and of this many likeliest ones; with echo, of the prompt's too."""

    suffix: Annotated[Any, Neutral("")] = None
    add_special_tokens: Annotated[Any, Neutral(True)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise misfit("max_tokens", 0, "1 or more, or 0 with echo")
        return self

    def requests(self, request_id: str, asking: Asking) -> Iterator[GenerateRequest]:
        """One request for each prompt."""
        for at, prompt in enumerate(self.prompt):
            request = self.request(asking)
            request.request_id = f"{request_id}-{at}" if at else request_id
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.CopyFrom(TokenIds(ids=prompt))
            if self.max_tokens == 0:
                request.sampling.max_tokens = 1  # a worker generates at least one token; `TextChoice` drops it
            if self.logprobs is not None:
                request.sampling.logprobs = self.logprobs
                if self.echo:
                    request.sampling.prompt_logprobs = self.logprobs
            yield request

    def form(self) -> Form:
        alone = self.max_tokens == 0
        return replace(super().form(), echo=bool(self.echo), alone=alone, logprobs=self.logprobs is not None)


class TextChoice:
    """One completion of one prompt."""

    def __init__(self, form: Form, tokenizer: Tokenizer, request: CheckedRequest) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._prompt = request.prompt
        self._echo = ""
        """The prompt's text, until a message has shown it."""
        self._logprobs = TextLogprobs(tokenizer) if form.logprobs else None
        self._text: list[str] = []
        self._end: dict[str, Any] = {}
        self._token_ids: list[int] = []

    async def begin(self, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        """Prepares the prompt and its log-probabilities for the first message, if they were asked for."""
        if not self._form.echo:
            return
        await asyncio.sleep(0)
        prompt = self._prompt.submit(()).token_ids
        parts = []
        for start in range(0, len(prompt), PART_TOKENS):
            await asyncio.sleep(0)
            parts.append(self._tokenizer.token_bytes.join(prompt[start : start + PART_TOKENS]))
        self._echo = b"".join(parts).decode(errors="replace")
        if self._logprobs is not None:
            await self._logprobs.add_prompt(prompt, prompt_logprobs)

    def add(self, message: GenerateResponse) -> str | dict[str, Any] | None:
        """The part of a chunk that a message adds, as a text if it is only text; None if it adds nothing."""
        ended = bool(message.finish_reason)
        alone = self._form.alone
        echoed = self._form.echo and not self._text
        text = "" if alone else message.text
        if echoed:
            text, self._echo = self._echo + text, ""
        if self._logprobs is not None and not alone:
            self._logprobs.add(message.token_ids, message.logprobs)
        self._text.append(text)
        if not alone:
            self._token_ids.extend(message.token_ids)
        if ended:
            self._end["finish_reason"] = "length" if alone else finish_name(message.finish_reason)
            if self._form.timeline:
                self._end["timeline"] = timeline_json(message.timeline)
        if not self._form.stream:
            return None
        plain = self._logprobs is None and not self._form.token_ids and not ended
        if plain:
            return text or None
        if not (message.token_ids or ended):
            return None
        part = self.part(text)
        if self._form.token_ids:
            part["token_ids"] = list(message.token_ids)
        if self._logprobs is not None and (message.token_ids or echoed):
            part["logprobs"] = self._logprobs.take()
        return part | (self._end if ended else {})

    @property
    def counted(self) -> tuple[int, int]:
        return len(self._token_ids), 0

    def part(self, text: str) -> dict[str, Any]:
        """A chunk's choice, without its index, that adds text only."""
        return {"text": text, "logprobs": None, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer, without its index."""
        whole = self.part("".join(self._text))
        if self._logprobs is not None:
            whole["logprobs"] = self._logprobs.take()
        if self._form.token_ids:
            whole["token_ids"] = self._token_ids
        return whole | self._end
