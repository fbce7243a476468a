"""W3C trace context: which trace a request belongs to, across processes and in every log line about it."""

import random
import re
from dataclasses import dataclass

HEADER, STATE_HEADER = "traceparent", "tracestate"
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
_MAX_STATE, _MAX_MEMBERS = 512, 32
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace (https://www.w3.org/TR/trace-context/)."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str = ""
    """16 hexadecimal digits: the id of the caller's span; empty if the trace begins here."""
    flags: int = 0
    state: str = ""
    """The caller's `tracestate`, to be passed on."""

    @classmethod
    def new(cls) -> "TraceContext":
        """A context for a trace that begins here."""
        return cls(f"{random.getrandbits(128) or 1:032x}")

    @classmethod
    def read(cls, parent: str | None, state: str | None = None) -> "TraceContext":
        """The context that a caller sent; a new trace if it sent none or an invalid one, as the standard demands."""
        match = None if parent is None else _PARENT.fullmatch(parent.strip())
        if match is None or match["version"] == "ff" or (match["version"] == "00" and match[5]):
            return cls.new()
        if not int(match["trace"], 16) or not int(match["span"], 16):
            return cls.new()
        kept = state if state is not None and _is_state(state) else ""
        return cls(match["trace"], match["span"], int(match["flags"], 16), kept)

    @property
    def sampled(self) -> bool:
        """Whether the caller records this trace."""
        return bool(self.flags & SAMPLED)


def _is_state(state: str) -> bool:
    """Whether a text is a valid `tracestate`. OpenTelemetry logs an invalid one."""
    if len(state) > _MAX_STATE:
        return False
    members = [found for member in state.split(",") if (found := member.strip(" \t"))]
    return len(members) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
