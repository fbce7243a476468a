"""Tool calls of Llama 3: the whole text is one call, {"name": "f", "parameters": {...}}, or several behind `;`."""

from collections.abc import Collection

from kvrelay.router.tools.calls import SPACE, CallObject, Parsed, long_id

TAG = "<|python_tag|>"


class Llama3Parser:
    """Reads the calls of one completion. A text that doesn't begin with a call of a known function is content."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: those of the functions. An ordinary answer may be a JSON object with a name, too."""
        self._names = names
        self._call: CallObject | None = None
        self._calls = 0
        self._raw = ""
        """What was read since the last call, and may be the beginning of one."""
        self._content = False

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        while text:
            if self._content:
                parsed.content += text
                break
            text = self._seek(text, parsed) if self._call is None else self._push_call(self._call, text, parsed)
        return parsed

    def finish(self) -> Parsed:
        held = "" if self._call is not None and self._call.begun else self._raw
        return Parsed(held if not self._calls or held.strip(SPACE + ";") else "")

    def _seek(self, text: str, parsed: Parsed) -> str:
        """Reads up to the `{` of a call; everything is content from the first character on that can't be before one."""
        for position, character in enumerate(text):
            self._raw += character
            lead = self._raw.lstrip(SPACE + (";" if self._calls else ""))
            if lead.removeprefix(TAG).lstrip() == "{":
                self._call = CallObject(self._calls, long_id(), self._names)
                self._call.push("{")
                return text[position + 1 :]
            if not (TAG.startswith(lead) or (lead.startswith(TAG) and not lead.removeprefix(TAG).strip())):
                return self._give_up(text[position + 1 :], parsed)
        return ""

    def _push_call(self, call: CallObject, text: str, parsed: Parsed) -> str:
        deltas, rest = call.push(text)
        parsed.calls += deltas
        self._raw += text[: len(text) - len(rest)]
        if call.failed and not call.begun:
            return self._give_up(rest, parsed)
        if call.ended or call.failed:
            self._call, self._raw = None, ""
            self._calls += 1
        return rest

    def _give_up(self, rest: str, parsed: Parsed) -> str:
        self._call, self._content = None, True
        parsed.content += self._raw
        self._raw = ""
        return rest
