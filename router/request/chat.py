"""Renders chat messages to one prompt, by the model's own Jinja template."""

import json
import math
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 2.0
"""Time limit for rendering a template, in seconds."""
MAX_CHARACTERS = 64 * 2**20
"""Size limit of a rendered prompt in characters, where nothing else limits it."""
MAX_REPEATED = 2**20
"""Most characters of a text, or entries of a list, that a template may make by multiplying."""
MAX_EXPONENT = 64
_NOT_ASCII = re.compile(r"[^\x00-~]")


class TemplateFailed(ValueError):
    """The template can't render these messages. The text is the template's own message, or the type of the error."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the form of Hugging Face's templates; at least one."""
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an assistant's message."""
    continue_final_message: bool = False
    """End with the last message's content, which the model is to continue."""
    parse_special: bool = False
    """Whether names of special tokens in the texts become these tokens."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit of time: a template is stopped when it next calls, looks up or multiplies."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._limits = threading.local()

    @contextmanager
    def limited(self, seconds: float, signs: Collection[str]) -> Iterator[None]:
        """Limits what the current thread renders in a `with`.

        Args:
            signs: characters that stand for others, of ASCII, so that JSON has them as they are.
        """
        self._limits.until, self._limits.signs = time.monotonic() + seconds, signs
        try:
            yield
        finally:
            self._limits.until = math.inf

    def tojson(self, value: object, ensure_ascii: bool = False, **options: Any) -> str:
        """Replaces Jinja's own filter, which escapes HTML; no model was trained on that."""
        signs = self._limits.signs
        if not (ensure_ascii and signs):
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)
        text = json.dumps(value, ensure_ascii=False, **options)
        return _NOT_ASCII.sub(lambda part: part[0] if part[0] in signs else json.dumps(part[0])[1:-1], text)

    def check_time(self) -> None:
        if time.monotonic() > self._limits.until:
            raise _Refused(f"the template took more than {RENDER_SECONDS:g} s")

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, Sized) else abs(value) for value in (left, right)]
        if operator == "**" and sizes[1] > MAX_EXPONENT:
            raise _Refused(f"the template takes a power above {MAX_EXPONENT}")
        if isinstance(left, Sized) != isinstance(right, Sized) and sizes[0] * sizes[1] > MAX_REPEATED:
            raise _Refused(f"the template repeats a text up to more than {MAX_REPEATED} characters")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template, with the globals that templates of Hugging Face models use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: the template.
            special_tokens: variables of the template, e.g. `bos_token`.

        Raises:
            ValueError: `source` is no Jinja template.
        """
        self.source = source
        self._environment = _Environment()
        self._environment.filters["tojson"] = self._environment.tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, conversation: Conversation, max_characters: int = MAX_CHARACTERS, signs: Collection[str] = ()
    ) -> str:
        """The prompt, special tokens included.

        Args:
            signs: characters of the conversation that stand for others, of ASCII.

        Raises:
            TemplateFailed: the template refuses the messages, takes too long, or renders more than `max_characters`.
        """
        parts: list[str] = []
        length = 0
        try:
            with self._environment.limited(RENDER_SECONDS, signs):
                for part in self._template.generate(self._variables(conversation)):
                    self._environment.check_time()
                    parts.append(part)
                    length += len(part)
                    if length > max_characters:
                        raise _Refused(f"the template renders more than {max_characters} characters")
        except _Refused as error:
            raise TemplateFailed(str(error)) from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(f"{type(error).__name__} in the template") from error
        text = "".join(parts)
        return _cut(text, conversation.messages[-1]) if conversation.continue_final_message else text

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        return {
            "documents": None,
            **conversation.variables,
            **self._special_tokens,
            "messages": [dict(message) for message in conversation.messages],
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }


def _cut(text: str, message: Mapping[str, Any]) -> str:
    """A rendered prompt up to the content of its last message, which a template may have stripped."""
    content = str(message.get("content", ""))
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        raise TemplateFailed("the template doesn't render the last message as it is, so it can't be continued")
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else content.strip())]


def load_chat_template(folder: Path, config: Mapping[str, Any], chosen: Path | None = None) -> ChatTemplate | None:
    """The chosen template; or that of a checkpoint: `chat_template.jinja`, or the one in its tokenizer_config.json
    (`config`); or None.

    Raises:
        ValueError: the template can't be used.
    """
    path = chosen or folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if chosen or path.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {type(source).__name__}; allowed: string"
        )
    tokens = {name: token_text(value) for name, value in config.items() if name.endswith("_token") and value}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def token_text(value: object) -> str | None:
    """The text of a special token in tokenizer_config.json: a string, or an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class _Refused(jinja2.TemplateError):
    """The template has called `raise_exception`, or takes more time or memory than it may."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
