"""Formats of tool calls: a parser of each, and the choice of a model's parsers by its options or its chat template.

array     [{"name": "f", "arguments": {...}}, ...]: what a model writes that has to call a function
hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, behind text; Qwen's too
llama3    the whole text is one call, {"name": "f", "parameters": {...}}, or several behind `;`
mistral   behind text and the token [TOOL_CALLS]: [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...] by older
          tokenizers, [TOOL_CALLS]f[CALL_ID]0123abcde[ARGS]{...}[TOOL_CALLS]g ... by newer ones; the id may be missing
"""

import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from kvrelay.router.text.tools.calls import (
    SPACE,
    CallDelta,
    CallObject,
    CallSequence,
    JsonValue,
    Parsed,
    ToolParser,
    long_id,
)
from kvrelay.router.text.tools.marker import Marker
from kvrelay.router.text.tools.reasoning import OPEN as THINK_TAG

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES_TAG = re.compile(f"{HERMES_OPEN}|{HERMES_CLOSE}")
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_SPECIAL = (MISTRAL_OPEN, MISTRAL_CALL_ID, MISTRAL_ARGS)
"""Special tokens whose text the parser needs."""
MISTRAL_ID_CHARACTERS = 9

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral"]
ReasoningParserName = Literal["auto", "none", "think"]


class ArrayParser(CallSequence):
    """Reads [{"name": "f", "arguments": {...}}, ...]; what is no such array is content."""

    def __init__(self, make_id: Callable[[], str] = long_id) -> None:
        super().__init__()
        self._make_id = make_id

    def finish(self) -> Parsed:
        return Parsed(self._raw if self._call is None or not self._call.begun else "")

    def _seek(self, text: str, parsed: Parsed) -> str:
        for position, character in enumerate(text):
            before = self._raw.strip()
            if character == "{" and before in ("[", ","):
                self._call = CallObject(self._calls, self._make_id())
                return text[position:]
            self._raw += character
            if character == "]" and self._calls:
                self._raw, self._ended = "", True
                return text[position + 1 :]
            if not character.isspace() and (before or character != ("," if self._calls else "[")):
                self._give_up(parsed)
                return text[position + 1 :]
        return ""


class HermesParser:
    """Reads the calls of one completion. What stands between the tags and is no call is content, with its tag; so is
    the text behind a call without a closing tag."""

    def __init__(self) -> None:
        self._open = Marker(HERMES_OPEN)
        self._behind: str | None = None
        """Text behind a call whose closing tag has not come; None outside of it."""
        self._call: CallObject | None = None
        self._raw = ""
        self._calls = 0

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = text
        while rest is not None:
            if self._call is not None:
                rest = self._push_call(self._call, rest, parsed)
            elif self._behind is not None:
                rest = self._push_behind(self._behind, rest, parsed)
            else:
                content, rest = self._open.push(rest)
                parsed.content += content
                if rest is not None:
                    self._call, self._raw = CallObject(self._calls, long_id()), f"{self._open.space}{HERMES_OPEN}"
        return parsed

    def finish(self) -> Parsed:
        if self._call is not None and not self._call.begun:
            return Parsed(self._raw)
        if self._behind is not None:
            return Parsed(self._behind if self._behind.strip() else "")
        return Parsed(self._open.flush())

    def _push_call(self, call: CallObject, text: str, parsed: Parsed) -> str | None:
        deltas, rest = call.push(text)
        parsed.calls += deltas
        if not call.begun:
            self._raw += text[: len(text) - len(rest)]
        if call.failed and not call.begun:
            parsed.content += self._raw
            self._call = None
            return rest
        if call.ended or call.failed:
            self._call, self._behind = None, ""
            self._calls += 1
            return rest
        return None

    def _push_behind(self, behind: str, text: str, parsed: Parsed) -> str | None:
        """Reads up to the closing tag of a call or, if it has none, up to the next call."""
        known, behind = len(behind), behind + text
        tag = _HERMES_TAG.search(behind, max(0, known - len(HERMES_CLOSE)))
        if tag is None:
            self._behind = behind
            return None
        self._behind = None
        if tag[0] == HERMES_CLOSE:
            return behind[tag.end() :]
        parsed.content += behind[: tag.start()].rstrip()
        return behind[tag.start() :]


class Llama3Parser(CallSequence):
    """Reads the calls of one completion. A text that doesn't begin with a call of a known function is content."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: those of the functions. An ordinary answer may be a JSON object with a name, too."""
        super().__init__()
        self._names = names

    def finish(self) -> Parsed:
        held = "" if self._call is not None and self._call.begun else self._raw
        return Parsed(held if not self._calls or held.strip(SPACE + ";") else "")

    def _seek(self, text: str, parsed: Parsed) -> str:
        for position, character in enumerate(text):
            self._raw += character
            lead = self._raw.lstrip(SPACE + (";" if self._calls else ""))
            if lead.removeprefix(LLAMA3_TAG).lstrip() == "{":
                self._call = CallObject(self._calls, long_id(), self._names)
                self._call.push("{")
                return text[position + 1 :]
            if not (
                LLAMA3_TAG.startswith(lead)
                or (lead.startswith(LLAMA3_TAG) and not lead.removeprefix(LLAMA3_TAG).strip())
            ):
                self._give_up(parsed)
                return text[position + 1 :]
        return ""


def short_id() -> str:
    """A call's id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_CHARACTERS))


class MistralParser:
    """Reads the calls of one completion."""

    def __init__(self) -> None:
        self._open = Marker(MISTRAL_OPEN)
        self._array: ArrayParser | None = None
        self._lead = ""
        """Marker of a list that may turn out to be none, and the space before it."""
        self._head: str | None = None
        """Text read before a call's arguments; None outside of it."""
        self._value: JsonValue | None = None
        self._calls = 0

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = text
        while rest:
            if self._array is not None:
                parsed += self._led(self._array.push(rest))
                rest = None
            elif self._value is not None:
                rest = self._push_arguments(self._value, rest, parsed)
            elif self._head is not None:
                rest = self._push_head(self._head + rest, parsed)
            else:
                content, rest = self._open.push(rest)
                parsed.content += content if not self._calls else content.lstrip()
                self._head = None if rest is None else ""
        return parsed

    def finish(self) -> Parsed:
        if self._array is not None:
            return self._led(self._array.finish())
        return Parsed(self._open.flush() if self._head is None else f"{self._open.space}{MISTRAL_OPEN}{self._head}")

    def _led(self, found: Parsed) -> Parsed:
        """The findings in a list, with the marker before it if that is no list of calls."""
        if found.calls or found.content:
            found.content, self._lead = found.content if found.calls else self._lead + found.content, ""
        return found

    def _push_head(self, head: str, parsed: Parsed) -> str | None:
        if head.lstrip().startswith("["):
            self._array, self._lead = ArrayParser(short_id), f"{self._open.space}{MISTRAL_OPEN}"
            return head
        name, brace, rest = head.partition("{")
        if not brace:
            self._head = head
            return None
        self._head = None
        if not (called := name.strip().removesuffix(MISTRAL_ARGS)):
            parsed.content += f"{self._open.space}{MISTRAL_OPEN}{name}{brace}"
            return rest
        name, _, call_id = called.partition(MISTRAL_CALL_ID)
        self._value = JsonValue()
        parsed.calls.append(CallDelta(self._calls, "", call_id or short_id(), name.strip()))
        return head[head.index("{") :]

    def _push_arguments(self, value: JsonValue, text: str, parsed: Parsed) -> str:
        for position, character in enumerate(text, 1):
            if value.push(character):
                parsed.calls.append(CallDelta(self._calls, text[:position]))
                self._calls += 1
                self._value = None
                return text[position:]
        parsed.calls.append(CallDelta(self._calls, text))
        return ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a model writes tool calls."""

    name: str
    signs: tuple[str, ...]
    """Texts of which a template of the format has one."""
    parser: Callable[[Collection[str]], ToolParser]
    """Makes the parser of one completion from the names of the functions."""
    special: tuple[str, ...] = ()
    """Special tokens whose text the parser needs."""


FORMATS = (
    ToolFormat("hermes", (HERMES_OPEN,), lambda names: HermesParser()),
    ToolFormat("mistral", (MISTRAL_OPEN,), lambda names: MistralParser(), MISTRAL_SPECIAL),
    ToolFormat("llama3", (LLAMA3_TAG, "Environment: ipython"), Llama3Parser, (LLAMA3_TAG,)),
)


def tool_format(name: ToolParserName, template: str) -> ToolFormat | None:
    """The format of a model's tool calls; None if it has none."""
    if name == "auto":
        return next((format_ for format_ in FORMATS if any(sign in template for sign in format_.signs)), None)
    return next((format_ for format_ in FORMATS if format_.name == name), None)


def reasons(name: ReasoningParserName, template: str) -> bool:
    """Whether a model's reasoning is split from its answers."""
    return name == "think" or (name == "auto" and THINK_TAG in template)
