"""Renders chat messages to one prompt, by the model's own Jinja template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateFailed(ValueError):
    """The template can't render these messages. The text is the template's own message, or the type of the error."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the assistant's next message, special tokens included.

        Raises:
            TemplateFailed: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _RaisedByTemplate as error:
            raise TemplateFailed(str(error)) from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateFailed(f"{type(error).__name__} in the template") from error


def load_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint: `chat_template.jinja`, or the one in its tokenizer_config.json (`config`), or None.

    Raises:
        ValueError: the template can't be used.
    """
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
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


class _RaisedByTemplate(jinja2.TemplateError):
    """Raised by the template's `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML; no model was trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
