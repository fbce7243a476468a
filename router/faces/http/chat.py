"""`/v1/chat/completions`: an assistant's next message, with tool calls and reasoning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvrelay.router.errors import InvalidRequest
from kvrelay.router.faces.http.fields import MAX_UINT32, Fields, GenerateFields, Integer, Neutral, misfit
from kvrelay.router.faces.http.messages import ConversationFields, Message
from kvrelay.router.faces.http.reply import chat_logprobs, finish_name, timeline_json
from kvrelay.router.request.conversation import MAX_MESSAGES
from kvrelay.router.request.reading import Asking, Form
from kvrelay.router.request.sampling import MAX_LOGPROBS
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.text.tools.calls import CallDelta, NamedParser, ToolParser
from kvrelay.router.text.tools.formats import ArrayParser, ToolFormat
from kvrelay.router.text.tools.reasoning import CLOSE, OPEN, Reasoning
from kvrelay.router.text.tools.schema import calls_schema, parameters_schema
from kvrelay.v1.inference_pb2 import Constraint, GenerateRequest, GenerateResponse, TokenLogprobs


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    """The one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerateFields, ConversationFields):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    """The conversation."""
    max_completion_tokens: Integer = Field(None, ge=1, le=MAX_UINT32)
    """Most tokens to generate, reasoning included; max_tokens is its older name."""
    max_tokens: Integer = Field(None, ge=1, le=MAX_UINT32)
    """Older name of max_completion_tokens."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether the model calls functions; default auto with tools."""
    parallel_tool_calls: bool | None = None
    """Whether it may call several; default true."""
    logprobs: bool | None = None
    """The answer has the log-probability of each token."""
    top_logprobs: Integer = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of likeliest tokens whose log-probabilities the answer also has; with logprobs."""
    include_reasoning: bool | None = None
    """Whether the answer has what the model thought; default true."""

    echo: Annotated[Any, Neutral(False)] = None
    functions: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral("none")] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    web_search_options: Annotated[Any, Neutral()] = None
    store: Annotated[Any, Neutral(False)] = None
    metadata: dict[str, str] | None = None
    """Has no effect here."""
    verbosity: Annotated[Any, Neutral("medium")] = None
    safety_identifier: str | None = None
    """Has no effect here."""
    prompt_cache_retention: str | None = None
    """Has no effect here."""
    add_special_tokens: Annotated[Any, Neutral(False)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise misfit("max_tokens", self.max_tokens, "equal to max_completion_tokens, its new name")
        if self.top_logprobs and not self.logprobs:
            raise misfit("top_logprobs", self.top_logprobs, "with logprobs only")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise misfit("tool_choice", self._choice_name, "null or none, without tools")
        if self.forced and self._constraints():
            raise misfit("tool_choice", self._choice_name, "none or auto, with a constraint of the text")
        if self.named is not None and self.named not in self.names:
            raise misfit("tool_choice.function.name", self.named, "the name of one of the tools")
        return self

    @property
    def _choice_name(self) -> str:
        return self.named or str(self.tool_choice)

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [tool.function.name for tool in self.tools or ()]

    @property
    def named(self) -> str | None:
        """The function that the model has to call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def forced(self) -> bool:
        """Whether the model has to call a function."""
        return self.tool_choice == "required" or self.named is not None

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def calls_schema(self) -> str:
        """The JSON Schema of the calls that the model has to make."""
        tools = {tool.function.name: tool.function.parameters for tool in self.tools or ()}
        if self.named is not None:
            return parameters_schema(tools[self.named])
        return calls_schema(tools, single=self.parallel_tool_calls is False)

    def form(self) -> Form:
        return replace(
            super().form(),
            logprobs=bool(self.logprobs),
            reasoning=self.include_reasoning is not False,
            tools=tuple(self.names) if self.may_call else (),
            forced=self.forced,
            named=self.named,
            one_call=self.parallel_tool_calls is False,
        )


class Chats:
    """Reader of the served model's chats, by its formats of tool calls and of reasoning."""

    def __init__(self, tokenizer: Tokenizer, format_: ToolFormat | None, *, reasons: bool) -> None:
        self.tokenizer = tokenizer
        self.format = format_
        self.reasons = reasons
        ids = [tokenizer.id_of(piece) for piece in (*(format_.special if format_ else ()), OPEN, CLOSE)]
        self.special = frozenset(token for token in ids if token is not None)

    def request(self, body: ChatRequest, request_id: str, asking: Asking) -> GenerateRequest:
        """The request for a body.

        Raises:
            InvalidRequest: the model has no format of tool calls.
        """
        if body.may_call and not body.forced and self.format is None:
            limit = "none, required or a named function: this model has no format of tool calls (router.tool_parser)"
            raise InvalidRequest("tool_choice", body.tool_choice or "auto", limit)
        request = body.request(asking)
        request.request_id = request_id
        request.messages.CopyFrom(body.conversation(body.tools if body.may_call else None))
        if body.max_completion_tokens is not None:
            request.sampling.max_tokens = body.max_completion_tokens
        if body.logprobs:
            request.sampling.logprobs = body.top_logprobs or 0
        if body.forced:
            request.sampling.constraint.CopyFrom(Constraint(json_schema=body.calls_schema()))
        return request

    def shown(self, form: Form) -> frozenset[int]:
        """Special tokens whose names the parsers need."""
        return self.special if form.tools or self.reasons else frozenset()

    def choice(self, form: Form, request: CheckedRequest) -> "ChatChoice":
        """One completion of a request."""
        reasoning = None
        # Such a constraint binds the text from its first token on, even where the prompt ends in the opening tag.
        constrained = request.sampling.constraint.WhichOneof("kind") in ("json_schema", "json_object", "choice")
        if self.reasons and not constrained:
            begun = self.tokenizer.names(request.tail).rstrip().endswith(OPEN)
            reasoning = Reasoning(begun, self.tokenizer.id_of(CLOSE))
        return ChatChoice(form, self.tokenizer, self._parser(form), reasoning)

    def _parser(self, form: Form) -> ToolParser | None:
        if form.named is not None:
            return NamedParser(form.named)
        if form.forced:
            return ArrayParser()
        return self.format.parser(form.tools) if form.tools and self.format is not None else None


class ChatChoice:
    """One completion."""

    def __init__(
        self, form: Form, tokenizer: Tokenizer, parser: ToolParser | None, reasoning: Reasoning | None
    ) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._parser = parser
        self._reasoning = reasoning
        self._most_calls = 1 if form.one_call else None
        self._begun = False
        self._content: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._tokens = 0
        self._end: dict[str, Any] = {"finish_reason": None}

    @property
    def counted(self) -> tuple[int, int]:
        return self._tokens, 0 if self._reasoning is None else self._reasoning.tokens

    async def begin(self, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        """Does nothing: an answer shows nothing of the prompt."""

    def add(self, message: GenerateResponse) -> str | dict[str, Any] | None:
        """The part of a chunk that a message adds, as a text if it is only text; None if it adds nothing."""
        ended = bool(message.finish_reason)
        self._tokens += len(message.token_ids)
        thought, content, calls = self._read(message, ended=ended)
        self._thought.append(thought)
        self._content.append(content)
        first, self._begun = not self._begun, True
        logprobs = None
        if self._form.logprobs and message.token_ids:
            logprobs = chat_logprobs(self._tokenizer, message.token_ids, message.logprobs)
            self._logprobs.extend(logprobs["content"])
        token_ids = list(message.token_ids) if self._form.token_ids else []
        self._token_ids.extend(token_ids)
        if ended:
            self._end = {"finish_reason": self._finish(message)}
            if self._form.timeline:
                self._end["timeline"] = timeline_json(message.timeline)
        if not (first or ended or thought or calls or logprobs or token_ids):
            return content or None
        delta: dict[str, Any] = {"role": "assistant", "content": content} if first else {}
        if content:
            delta["content"] = content
        if thought:
            delta["reasoning_content"] = thought
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        part = {"delta": delta, "logprobs": logprobs, **self._end}
        return part | ({"token_ids": token_ids} if token_ids else {})

    def part(self, text: str) -> dict[str, Any]:
        """A chunk's choice, without its index, that adds text only."""
        return {"delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer, without its index."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not content else content}
        message["refusal"] = None
        if self._reasoning is not None:
            message["reasoning_content"] = "".join(self._thought) or None
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        logprobs = {"content": self._logprobs, "refusal": None} if self._form.logprobs else None
        whole = {"message": message, "logprobs": logprobs, **self._end}
        return whole | ({"token_ids": self._token_ids} if self._form.token_ids else {})

    def _read(self, message: GenerateResponse, *, ended: bool) -> tuple[str, str, list[CallDelta]]:
        """The reasoning, the content and the calls in a message."""
        thought, text = "", message.text
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, list(message.token_ids))
            if ended:
                last_thought, last_text = self._reasoning.finish()
                thought, text = thought + last_thought, text + last_text
        if not self._form.reasoning:
            thought = ""
        if self._parser is None:
            return thought, text, []
        parsed = self._parser.push(text)
        if ended:
            parsed += self._parser.finish()
        calls = [call for call in parsed.calls if self._most_calls is None or call.index < self._most_calls]
        for call in calls:
            self._keep(call)
        return thought, parsed.content, calls

    def _keep(self, delta: CallDelta) -> None:
        known = self._calls.get(delta.index)
        if known is None:
            function = {"name": delta.name, "arguments": delta.arguments}
            self._calls[delta.index] = {"id": delta.id, "type": "function", "function": function}
        else:
            known["function"]["arguments"] += delta.arguments

    def _finish(self, message: GenerateResponse) -> str:
        name = finish_name(message.finish_reason)
        return "tool_calls" if name == "stop" and self._calls and self._form.named is None else name


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
    begin = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **begin, "function": function}
