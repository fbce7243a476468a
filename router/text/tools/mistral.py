"""Tool calls of Mistral, behind text and the token [TOOL_CALLS]:

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]           older tokenizers
[TOOL_CALLS]f[CALL_ID]0123abcde[ARGS]{...}[TOOL_CALLS]g ...     newer ones; the id may be missing
"""

import secrets
import string

from kvrelay.router.text.tools.array import ArrayParser
from kvrelay.router.text.tools.calls import CallDelta, JsonValue, Parsed
from kvrelay.router.text.tools.marker import Marker

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
SPECIAL = (OPEN, CALL_ID, ARGS)
"""Special tokens whose text the parser needs."""
ID_CHARACTERS = 9


def short_id() -> str:
    """A call's id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARACTERS))


class MistralParser:
    """Reads the calls of one completion."""

    def __init__(self) -> None:
        self._open = Marker(OPEN)
        self._array: ArrayParser | None = None
        self._head: str | None = None
        """Text read before a call's arguments; None outside of it."""
        self._value: JsonValue | None = None
        self._calls = 0

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = text
        while rest:
            if self._array is not None:
                parsed += self._array.push(rest)
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
            return self._array.finish()
        return Parsed(self._open.flush() if self._head is None else f"{OPEN}{self._head}")

    def _push_head(self, head: str, parsed: Parsed) -> str | None:
        if head.lstrip().startswith("["):
            self._array = ArrayParser(short_id)
            return head
        name, brace, _ = head.partition("{")
        if not brace:
            self._head = head
            return None
        name = name.strip().removesuffix(ARGS)
        name, _, call_id = name.partition(CALL_ID)
        self._head, self._value = None, JsonValue()
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
