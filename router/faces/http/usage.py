"""Usage and other figures of a request as JSON values."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict

from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP, FinishReason, Timeline, Usage


class Total:
    """The usage of a request's prompts. Its completions count their own tokens."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached_tokens = 0

    def begin(self, prompt: int, tokens: int) -> None:
        """Prompt number `prompt` has `tokens` tokens."""
        self._prompts[prompt] = tokens

    def end(self, usage: Usage) -> None:
        """A completion has ended. Only the first one of a prompt counts cached tokens."""
        self._cached_tokens += usage.cached_tokens

    def json(self, completions: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """OpenAI's `usage`; `completions` has for each its tokens, and those of them that are reasoning."""
        prompt_tokens = sum(self._prompts.values())
        tokens, reasoning = (sum(each) for each in zip((0, 0), *completions, strict=True))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def finish_name(reason: FinishReason) -> str:
    """OpenAI's name of a finish reason."""
    return "stop" if reason == FINISH_REASON_STOP else "length"


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """All fields of a timeline, in seconds and bytes."""
    return MessageToDict(timeline, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
