"""The answer to one HTTP request, from the messages of all of its completions: as chunks, or as a whole."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pydantic_core import to_json

from kvrelay.router.http.usage import Total
from kvrelay.router.reading import Form
from kvrelay.router.validation import CheckedRequest
from kvrelay.v1.inference_pb2 import GenerateResponse, TokenLogprobs

MARK = "\x00text\x00"
DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """One completion, as one of OpenAI's two APIs shows it."""

    async def begin(self, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        """Called once, before the first message is added.

        Args:
            prompt_logprobs: all that were asked for.
        """

    def add(self, message: GenerateResponse) -> str | dict[str, Any] | None:
        """What a message adds to the choice: a chunk's part without its index, or only text, or nothing."""

    def part(self, text: str) -> dict[str, Any]:
        """A chunk's part that adds only text."""

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer, without its index."""

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the completion so far, and those of them that are reasoning."""


class Reply:
    """Collects messages. A chunk that adds only text, as nearly all do, is the text between bytes that don't change."""

    def __init__(self, form: Form, kind: str, head: dict[str, Any], make: Callable[[CheckedRequest], Choice]):
        """
        Args:
            kind: `object` of a whole answer.
            head: further fields at the beginning of each answer: id, model and system_fingerprint.
            make: the choice for a completion of a prompt.
        """
        self._form = form
        self._make = make
        self._head = {"id": head.pop("id"), "object": kind, "created": int(time.time()), **head}
        self._chunk_head = self._head | {"object": kind if kind == "text_completion" else f"{kind}.chunk"}
        self._prompts: dict[int, CheckedRequest] = {}
        self._prompt_logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._choices: dict[int, Choice] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._total = Total()

    def begin(self, prompt: int, request: CheckedRequest) -> None:
        """Prompt number `prompt` was checked."""
        self._prompts[prompt] = request
        self._total.begin(prompt, len(request.prompt))

    async def add(self, prompt: int, message: GenerateResponse) -> bytes:
        """Adds a message about a prompt; returns the events that it makes, if any."""
        index = self._index(prompt, message)
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt].extend(message.prompt_logprobs)
        if index not in self._choices:
            choice = self._choices[index] = self._make(self._prompts[prompt])
            await choice.begin(self._prompt_logprobs[prompt])
        return self.add_more(prompt, message)

    def add_more(self, prompt: int, message: GenerateResponse) -> bytes:
        """As `add`, for a message after a completion's first one."""
        index = self._index(prompt, message)
        choice = self._choices[index]
        part = choice.add(message)
        if message.finish_reason:
            self._total.end(message.usage)
        if part is None:
            return b""
        if isinstance(part, str):
            if not self._form.usage_in_chunks:
                before, after = self._frame(index, choice)
                return before + to_json(part) + after
            part = choice.part(part)
        return self._event([{"index": index, **part}])

    def _index(self, prompt: int, message: GenerateResponse) -> int:
        return prompt * self._form.n + message.index

    def end(self) -> bytes:
        """The last events of a stream."""
        return (self._event([], usage=True) if self._form.usage_chunk else b"") + DONE

    def whole(self) -> bytes:
        """The whole answer."""
        choices = [{"index": index, **choice.whole()} for index, choice in sorted(self._choices.items())]
        return to_json({**self._head, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        return self._total.json([choice.counted for choice in self._choices.values()])

    def _event(self, choices: list[dict[str, Any]], *, usage: bool = False) -> bytes:
        chunk = {**self._chunk_head, "choices": choices}
        if self._form.usage_chunk:
            chunk["usage"] = self._usage() if usage or self._form.usage_in_chunks else None
        return b"data: " + to_json(chunk) + b"\n\n"

    def _frame(self, index: int, choice: Choice) -> tuple[bytes, bytes]:
        """The bytes before and behind the text in a chunk that adds only text."""
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._event([{"index": index, **choice.part(MARK)}]).partition(to_json(MARK))
            frame = self._frames[index] = before, after
        return frame
