"""Reads the bodies of the HTTP API, and answers those of `/tokenize` and `/detokenize`."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_json

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.faces.http.body import parse
from kvrelay.router.faces.http.chat import ChatRequest, Chats
from kvrelay.router.faces.http.completions import read_completion
from kvrelay.router.faces.http.fields import MAX_UINT32, Fields, GenerateFields, Neutral, misfit, whole_list
from kvrelay.router.faces.http.messages import ConversationFields
from kvrelay.router.request.reading import Asking, Plan, Reader
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import (
    DETOKENIZE_IDS,
    TOKENIZE_BYTES,
    TOKENIZE_WHY,
    check_name,
    checked_ids,
    text_tokens,
)
from kvrelay.router.request.wire import MAX_VALUES, is_light_json
from kvrelay.v1.inference_pb2 import TokenizeRequest as Texts


class TokenizeRequest(ConversationFields):
    """The body of `/tokenize`: a prompt, or messages."""

    model: str | None = None
    """Model's name, as in a completion."""
    prompt: str | None = Field(None, min_length=1)
    """Text."""
    return_token_strs: bool | None = None
    """The answer has the tokens' texts as `token_strs`."""
    add_special_tokens: Annotated[Any, Neutral(True)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise misfit("prompt", None, "a text exactly if there are no messages")
        return self

    async def answer(self, model: ModelInfo, tokenizer: Tokenizer) -> bytes:
        """
        Raises:
            InvalidRequest: the text is too long, or the template doesn't render the messages.
        """
        texts = Texts(text=self.prompt) if self.prompt is not None else Texts(messages=self.conversation(self.tools))
        tokens = await text_tokens(texts, tokenizer, TOKENIZE_BYTES, TOKENIZE_WHY)
        answer = {"count": len(tokens), "max_model_len": model.max_context, "tokens": tokens.tolist()}
        if self.return_token_strs:
            answer["token_strs"] = [tokenizer.token_bytes.name(token).decode(errors="replace") for token in tokens]
        return to_json(answer)


class DetokenizeRequest(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    """Model's name, as in a completion."""
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_UINT32)]], BeforeValidator(whole_list)] = Field(
        max_length=DETOKENIZE_IDS
    )
    """Token ids."""

    async def answer(self, model: ModelInfo, tokenizer: Tokenizer) -> bytes:
        """
        Raises:
            InvalidRequest: an id is outside of the vocabulary.
        """
        return to_json({"prompt": await tokenizer.decode(await checked_ids("tokens", self.tokens, model.vocab_size))})


TextT = TypeVar("TextT", TokenizeRequest, DetokenizeRequest)


def readers(tokenizer: Tokenizer, chats: Chats) -> dict[str, Reader]:
    """The readers, by the kinds of bodies."""

    async def chat(data: bytes, asking: Asking) -> Plan:
        body = parse(ChatRequest, data)
        asking.check_model(body.model or "")
        name = _name(body, asking)
        return Plan([chats.request(body, name, asking)], name, body.form())

    async def completion(data: bytes, asking: Asking) -> Plan:
        body = read_completion(data, MAX_VALUES + asking.model.max_context)
        asking.check_model(body.model or "")
        name = _name(body, asking)
        return Plan([*body.requests(name, asking)], name, body.form())

    async def text(parsed: Callable[[bytes], TextT], data: bytes, asking: Asking) -> bytes:
        body = parsed(data)
        asking.check_model(body.model or "")
        return await body.answer(asking.model, tokenizer)

    return {
        "chat": Reader(chat, is_light_json),
        "completion": Reader(completion, is_light_json),
        "tokenize": Reader(partial(text, partial(parse, TokenizeRequest)), is_light_json),
        "detokenize": Reader(
            partial(text, partial(parse, DetokenizeRequest, max_numbers=DETOKENIZE_IDS)), is_light_json
        ),
    }


def _name(body: GenerateFields, asking: Asking) -> str:
    """The request's name; that of the body wins over that of the header.

    Raises:
        InvalidRequest: the body's is not printable.
    """
    if body.request_id is None:
        return asking.name
    check_name("request_id", body.request_id)
    return body.request_id
