"""Tool calls of Llama 3: the whole text is one call, {"name": "f", "parameters": {...}}, or several behind `;`."""

from collections.abc import Collection

from kvrelay.router.text.tools.calls import SPACE, CallObject, CallSequence, Parsed, long_id

TAG = "<|python_tag|>"


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
            if lead.removeprefix(TAG).lstrip() == "{":
                self._call = CallObject(self._calls, long_id(), self._names)
                self._call.push("{")
                return text[position + 1 :]
            if not (TAG.startswith(lead) or (lead.startswith(TAG) and not lead.removeprefix(TAG).strip())):
                self._give_up(parsed)
                return text[position + 1 :]
        return ""
