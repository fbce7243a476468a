"""Tool calls as the elements of a JSON array: what a model writes that has to call a function."""

from collections.abc import Callable

from kvrelay.router.text.tools.calls import CallObject, CallSequence, Parsed, long_id


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
