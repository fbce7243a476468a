"""Reads the bodies of the HTTP API."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvrelay.router.http.body import parse
from kvrelay.router.http.chat import ChatRequest, Chats
from kvrelay.router.http.completions import read_completion
from kvrelay.router.http.fields import GenerateFields
from kvrelay.router.http.texts import DetokenizeRequest, TokenizeRequest
from kvrelay.router.reading import Asking, Plan, Reader
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.validation import DETOKENIZE_IDS, check_name
from kvrelay.router.wire import MAX_VALUES, is_light_json

TextT = TypeVar("TextT", TokenizeRequest, DetokenizeRequest)


def readers(tokenizer: Tokenizer, chats: Chats) -> dict[str, Reader]:
    """The readers, by the kinds of bodies."""

    async def chat(data: bytes, asking: Asking) -> Plan:
        body = parse(ChatRequest, data)
        asking.check_model(body.model or "")
        name = _name(body, asking)
        return Plan([chats.request(body, name)], name, body.form())

    async def completion(data: bytes, asking: Asking) -> Plan:
        body = read_completion(data, MAX_VALUES + asking.model.max_context)
        asking.check_model(body.model or "")
        name = _name(body, asking)
        return Plan([*body.requests(name)], name, body.form())

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
