"""Log-probabilities of tokens in the forms of OpenAI's two APIs."""

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.v1.inference_pb2 import TokenLogprobs

PART_TOKENS = 256
"""Tokens of a prompt that are added at a time, in some milliseconds."""
LEAST = -9999.0
"""In place of minus infinity, which JSON doesn't have."""


class TextLogprobs:
    """`logprobs` of a choice of `/v1/completions`: one list for each property of the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._taken = 0
        self._all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    async def add_prompt(self, token_ids: Sequence[int], values: Sequence[TokenLogprobs]) -> None:
        """Adds a prompt, whose first token has no probability, in parts, between which others have their turn."""
        known = [None, *values]
        for start in range(0, len(token_ids), PART_TOKENS):
            self.add(token_ids[start : start + PART_TOKENS], known[start : start + PART_TOKENS])
            await asyncio.sleep(0)

    def add(self, token_ids: Sequence[int], values: Sequence[TokenLogprobs | None]) -> None:
        """Adds tokens; None for the first token of a prompt, which has no probability."""
        for token, value in zip(token_ids, values, strict=True):
            name = self._name(token)
            self._all["tokens"].append(name)
            self._all["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes[token]))
            self._all["token_logprobs"].append(None if value is None else _finite(value.logprob))
            self._all["top_logprobs"].append(None if value is None else self._top(name, value))

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        start, self._taken = self._taken, len(self._all["tokens"])
        return {key: values[start:] for key, values in self._all.items()}

    def whole(self) -> dict[str, Any]:
        return self._all

    def _top(self, name: str, value: TokenLogprobs) -> dict[str, float]:
        pairs = zip(value.top_ids, value.top_logprobs, strict=True)
        return {name: _finite(value.logprob)} | {self._name(token): _finite(logprob) for token, logprob in pairs}

    def _name(self, token: int) -> str:
        """The token's text; `bytes:\\xe2\\x82` for a part of a character."""
        known = self._tokenizer.bytes_of(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)


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
    known = tokenizer.bytes_of(token)
    return {"token": known.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(known)}


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
