"""Tool calls as the elements of a JSON array: what a model writes that has to call a function."""

from collections.abc import Callable

from kvrelay.router.tools.calls import CallObject, Parsed, long_id


class ArrayParser:
    """Reads [{"name": "f", "arguments": {...}}, ...]; what is no such array is content."""

    def __init__(self, make_id: Callable[[], str] = long_id) -> None:
        self._make_id = make_id
        self._call: CallObject | None = None
        self._calls = 0
        self._raw = ""
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the array's end, or something else than an array, was read."""
        return self._ended

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        while text:
            if self._ended:
                parsed.content += text
                break
            text = self._seek(text, parsed) if self._call is None else self._push_call(self._call, text, parsed)
        return parsed

    def finish(self) -> Parsed:
        return Parsed(self._raw if self._call is None or not self._call.begun else "")

    def _seek(self, text: str, parsed: Parsed) -> str:
        """Reads up to the next element."""
        for position, character in enumerate(text):
            before = self._raw.strip()
            if character == "{" and before in ("[", ","):
                self._call = CallObject(self._calls, self._make_id())
                return text[position:]
            self._raw += character
            if character == "]" and (self._calls or before == "["):
                self._ended = True
                self._raw = "" if self._calls else self._raw
                return text[position + 1 :]
            if not character.isspace() and (before or character != ("," if self._calls else "[")):
                self._give_up(parsed)
                return text[position + 1 :]
        return ""

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
        self._call, self._ended = None, True
        parsed.content += self._raw
        self._raw = ""
