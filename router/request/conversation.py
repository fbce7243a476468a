"""Chat messages of the public contract, as templates of Hugging Face models take them."""

import json
import re
from collections.abc import Iterator
from typing import Any

from kvrelay.router.errors import InvalidArgument, InvalidRequest
from kvrelay.router.request.chat import Conversation
from kvrelay.router.request.wire import BadOutline, check_json
from kvrelay.router.text.tools.calls import encodable
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, ToolCall

MAX_MESSAGES = 4096
MAX_CALLS = 4096
"""Most calls in all messages together."""
MAX_TOOLS = 512
RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "additional_special_tokens"),
    *("raise_exception", "strftime_now"),
}
"""Variables of templates that no request sets; nor does it set those of special tokens, such as `bos_token`."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def conversation(chat: ChatMessages) -> Conversation:
    """The conversation that a template renders.

    Raises:
        InvalidRequest: there is no message, a field is no JSON object, or the last message can't be continued.
    """
    if not chat.messages:
        raise InvalidRequest("messages: number of messages", 0, "at least 1")
    continued = chat.continue_final_message
    if continued and chat.messages[-1].role != "assistant":
        raise InvalidRequest("messages.continue_final_message", True, "with a last message of the role 'assistant'")
    if continued and chat.add_generation_prompt and chat.HasField("add_generation_prompt"):
        raise InvalidRequest("messages.add_generation_prompt", True, "false with continue_final_message")
    asked = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
    variables = _object("messages.template_kwargs", chat.template_kwargs) if chat.template_kwargs else {}
    for name in variables:
        if name in RESERVED or name.endswith("_token"):
            limit = "variables of the template that the request's other fields and the model's files don't set"
            raise InvalidRequest("messages.template_kwargs: name", name, limit)
    return Conversation(
        [_message(f"messages[{at}]", message) for at, message in enumerate(chat.messages)],
        [_object(f"tools[{at}]", tool) for at, tool in enumerate(chat.tools)],
        variables,
        asked,
        continued,
        chat.parse_special,
    )


def size(chat: ChatMessages) -> int:
    """Bytes of all texts that a template may render, encoded as UTF-8.

    Raises:
        InvalidRequest: there are too many messages, calls or tools.
    """
    _check_count("messages: number of messages", len(chat.messages), MAX_MESSAGES)
    _check_count("messages: number of tool calls", _calls(chat), MAX_CALLS)
    _check_count("tools: number of tools", len(chat.tools), MAX_TOOLS)
    return sum(len(text.encode()) for text in _texts(chat))


def _calls(chat: ChatMessages) -> int:
    return sum(len(message.tool_calls) for message in chat.messages)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(field, count, f"up to {most}")


def _texts(chat: ChatMessages) -> Iterator[str]:
    yield from chat.tools
    yield chat.template_kwargs
    for message in chat.messages:
        yield message.role
        yield message.content
        yield message.name
        yield message.tool_call_id
        yield message.reasoning_content
        for call in message.tool_calls:
            yield call.id
            yield call.name
            yield call.arguments


def _message(where: str, message: ChatMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        shown["tool_calls"] = [_call(f"{where}.tool_calls[{at}].arguments", call) for at, call in calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if value := getattr(message, name):
            shown[name] = value
    return shown


def _call(where: str, call: ToolCall) -> dict[str, Any]:
    arguments = _object(where, call.arguments) if call.arguments else {}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object(where: str, text: str) -> dict[str, Any]:
    """A JSON object; its text isn't part of the error. Halves of surrogate pairs in it become U+FFFD."""
    try:
        check_json(text.encode(), 0)
        value = json.loads(text)
        if _SURROGATE.search(text) is not None:
            value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    except BadOutline as error:
        raise InvalidArgument(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: number of characters", len(text), "the JSON of an object")
    return value
