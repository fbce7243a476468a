"""Chat messages and tools of a request, and how they become `ChatMessages`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from kvrelay.router.faces.http.fields import Fields, Integer, Neutral, misfit
from kvrelay.router.request.conversation import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from kvrelay.v1.inference_pb2 import ChatMessage, ChatMessages, ToolCall

MAX_PARTS = 4096
"""Most parts of one message's content."""


class TextPart(Fields):
    """A part of a message's content."""

    type: str
    """Only "text" is served."""
    text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        kind = value.get("type", "text") if isinstance(value, dict) else "text"
        if kind != "text":
            raise PydanticCustomError("text_only", "a part of the type 'text': this server takes text only")
        return value


class FunctionCall(Fields):
    """A function with its arguments."""

    name: str = Field(min_length=1)
    arguments: str = ""
    """The JSON of an object."""
    parsed_arguments: JsonValue = None
    """Has no effect here; as the next one, added by client libraries to the messages that they got."""
    provider_specific_fields: JsonValue = None
    """Has no effect here."""


class MessageToolCall(Fields):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Integer = None
    """Has no effect here."""
    provider_specific_fields: JsonValue = None
    """Has no effect here."""


class Message(Fields):
    """One message of a conversation."""

    role: str = Field(min_length=1)
    """system, user, assistant, tool, or another one that the chat template knows; developer is system."""
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    """Text, or parts of it, which are joined."""
    name: str | None = None
    """Name of the participant, if the template uses it."""
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_CALLS)
    """Calls that an assistant's message made."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""
    reasoning_content: str | None = None
    """Reasoning of an assistant's message, if the template uses it."""
    reasoning: str | None = None
    """The same as reasoning_content."""
    parsed: JsonValue = None
    """Has no effect here, as the next field: client libraries add both to the messages that they got."""
    provider_specific_fields: JsonValue = None
    """Has no effect here."""
    refusal: Annotated[Any, Neutral("")] = None
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral([])] = None

    def message(self) -> ChatMessage:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        calls = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=text,
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            reasoning_content=self.reasoning_content or self.reasoning or "",
        )


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON Schema of its arguments; null: an object of any fields."""
    strict: bool | None = None
    """Has no effect here: with tool_choice required or a named function, the schema always binds."""


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def text(self) -> str:
        return json.dumps(self.model_dump(exclude_none=True))


class ConversationFields(Fields):
    """The fields that the chat template renders."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """The conversation."""
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the beginning of an assistant's message; default true."""
    continue_final_message: bool | None = None
    """Continue the last message, of the assistant, in place of beginning a new one."""
    parse_special: bool | None = None
    """Names of special tokens in the messages' texts become these tokens; default false: they are plain text."""
    reasoning_effort: str | None = None
    """A variable of the chat template, if it uses it."""
    chat_template: Annotated[Any, Neutral()] = None
    documents: Annotated[Any, Neutral()] = None
    mm_processor_kwargs: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise misfit("tools", [], "functions with different names")
        return self

    def conversation(self, tools: Sequence[Tool] | None) -> ChatMessages:
        """The conversation, with the tools that the model shall know."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatMessages(
            messages=[message.message() for message in self.messages or ()],
            tools=[tool.text() for tool in tools or ()],
            template_kwargs=json.dumps(variables) if variables else "",
            continue_final_message=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt,
            parse_special=bool(self.parse_special),
        )
