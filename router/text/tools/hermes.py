"""Tool calls of Hermes and Qwen: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, behind text."""

from kvrelay.router.text.tools.calls import CallObject, Parsed, long_id
from kvrelay.router.text.tools.marker import Marker

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Reads the calls of one completion. What stands between the tags and is no call is content, with its tag."""

    def __init__(self) -> None:
        self._open = Marker(OPEN)
        self._close: Marker | None = None
        self._call: CallObject | None = None
        self._raw = ""
        self._calls = 0

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = text
        while rest is not None:
            if self._call is not None:
                rest = self._push_call(self._call, rest, parsed)
            elif self._close is not None:
                _, rest = self._close.push(rest)
                if rest is not None:
                    self._close = None
            else:
                content, rest = self._open.push(rest)
                parsed.content += content
                if rest is not None:
                    self._call, self._raw = CallObject(self._calls, long_id()), OPEN
        return parsed

    def finish(self) -> Parsed:
        if self._call is not None and not self._call.begun:
            return Parsed(self._raw)
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
            self._call, self._close = None, Marker(CLOSE)
            self._calls += 1
            return rest
        return None
