"""One tool call as a JSON object, read character by character: {"name": "f", "arguments": {...}}."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The piece of one call that a piece of text adds."""

    index: int
    arguments: str = ""
    """A piece of a JSON object's text."""
    id: str = ""
    """Id of the call; set with the name, in the call's first delta only."""
    name: str = ""


@dataclass(slots=True)
class Parsed:
    """The content and the calls in a piece of text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __iadd__(self, other: "Parsed") -> "Parsed":
        self.content += other.content
        self.calls += other.calls
        return self


class ToolParser(Protocol):
    """Reads the calls of one completion."""

    def push(self, text: str) -> Parsed:
        """Adds text."""

    def finish(self) -> Parsed:
        """Ends the text: what was held back as the beginning of a call is content."""


def long_id() -> str:
    """A call's id as OpenAI makes them."""
    return f"call_{uuid.uuid4().hex[:24]}"


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    """Place before the first character of a value."""
    IN_VALUE = auto()
    COMMA = auto()
    """Place behind a value."""
    END = auto()
    FAILED = auto()


class CallObject:
    """Reads one object. Its arguments come out raw, as they are written, from the moment on when the name is known."""

    def __init__(self, index: int, call_id: str, known: Collection[str] | None = None) -> None:
        """`known`: the names that are a call; None if every name is."""
        self._index = index
        self._id = call_id
        self._known = known
        self._at = _At.OBJECT
        self._value = JsonValue()
        self._key = ""
        self._name = ""
        self._arguments = ""
        self._taken = 0
        self._has_arguments = False
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the call was given on."""
        return self._begun

    @property
    def ended(self) -> bool:
        return self._at is _At.END

    @property
    def failed(self) -> bool:
        """Whether the text is no call."""
        return self._at is _At.FAILED

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """Adds text; returns what it adds to the call, and the text behind the object's end or the first mistake."""
        for position, character in enumerate(text):
            if self.ended or self.failed:
                return self._deltas(), text[position:]
            self._step(character)
        return self._deltas(), ""

    def _step(self, character: str) -> None:
        match self._at:
            case _At.OBJECT if character == "{":
                self._at = _At.KEY
            case _At.KEY if character == '"':
                self._key, self._at, self._value = "", _At.IN_KEY, JsonValue()
                self._value.push(character)
            case _At.KEY | _At.COMMA if character == "}":
                self._end()
            case _At.IN_KEY:
                if self._value.push(character):
                    self._key, self._at = _string(self._value.text), _At.COLON
            case _At.COLON if character == ":":
                self._at, self._value = _At.VALUE, JsonValue()
            case _At.VALUE | _At.IN_VALUE:
                self._step_value(character)
            case _At.COMMA if character == ",":
                self._at = _At.KEY
            case _ if character not in SPACE:
                self._at = _At.FAILED

    def _step_value(self, character: str) -> None:
        if self._at is _At.VALUE and character in SPACE:
            return
        self._at = _At.IN_VALUE
        if self._value.bare and character in ",}" + SPACE:
            self._end_value()
            self._step(character)
            return
        ended = self._value.push(character)
        if self._key in ARGUMENTS and not self._value.quoted:
            self._arguments, self._has_arguments = self._value.text, True
        if ended:
            self._end_value()

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._key == NAME and self._value.quoted:
            self._name = _string(self._value.text)
            if not self._name or (self._known is not None and self._name not in self._known):
                self._at = _At.FAILED
        elif self._key in ARGUMENTS:
            # Some models write the arguments as a string with JSON in it.
            text = self._value.text
            self._arguments, self._has_arguments = _string(text) if self._value.quoted else text, True

    def _end(self) -> None:
        self._at = _At.END if self._name else _At.FAILED
        if not self._has_arguments:
            self._arguments = "{}"

    def _deltas(self) -> list[CallDelta]:
        if not self._name or self.failed:
            return []
        new, self._taken = self._arguments[self._taken :], len(self._arguments)
        if not self._begun:
            self._begun = True
            return [CallDelta(self._index, new, self._id, self._name)]
        return [CallDelta(self._index, new)] if new else []


class CallSequence(ABC):
    """Reads call after call, until something is read that can be none: from there on the text is content."""

    def __init__(self) -> None:
        self._call: CallObject | None = None
        """Call that is being read."""
        self._calls = 0
        self._raw = ""
        """Text since the end of the last call, which may be the beginning of one."""
        self._ended = False

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        while text:
            if self._ended:
                parsed.content += text
                break
            text = self._seek(text, parsed) if self._call is None else self._push_call(self._call, text, parsed)
        return parsed

    @abstractmethod
    def _seek(self, text: str, parsed: Parsed) -> str:
        """Reads up to the next call, and returns what is to be read next."""

    def _push_call(self, call: CallObject, text: str, parsed: Parsed) -> str:
        deltas, rest = call.push(text)
        parsed.calls += deltas
        self._raw += text[: len(text) - len(rest)]
        if call.failed and not call.begun:
            self._give_up(parsed)
        elif call.ended or call.failed:
            self._call, self._raw = None, ""
            self._calls += 1
        return rest

    def _give_up(self, parsed: Parsed) -> None:
        """Ends the reading of calls: the text held back is content, and so is all that follows."""
        self._call, self._ended = None, True
        parsed.content += self._raw
        self._raw = ""


class JsonValue:
    """The text of one JSON value, and where it ends."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def quoted(self) -> bool:
        """Whether it is a string."""
        return bool(self._parts) and self._parts[0].startswith('"')

    @property
    def bare(self) -> bool:
        """Whether it is a number or a word, which ends before what follows."""
        return bool(self._parts) and self._parts[0][0] not in '"{['

    def push(self, character: str) -> bool:
        """Adds a character; returns whether it is the last one of an object, a list or a string."""
        self._parts.append(character)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return not self._depth
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return not self._depth
        return False


def _string(text: str) -> str:
    """The string that a JSON text is; empty if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return encodable(value) if isinstance(value, str) else ""


def encodable(text: str) -> str:
    """A text in which U+FFFD stands for each half of a surrogate pair, as JSON may write it by `\\ud83d`. UTF-8 has no
    such halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class NamedParser:
    """Reads the arguments of one function, which are the whole text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Parsed:
        if self._begun:
            return Parsed(calls=[CallDelta(0, text)] if text else [])
        self._begun = True
        return Parsed(calls=[CallDelta(0, text, long_id(), self._name)])

    def finish(self) -> Parsed:
        return Parsed()
