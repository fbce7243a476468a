"""W3C trace context: which trace a request belongs to, across processes and in every log line about it."""

import random
import re
from dataclasses import dataclass

HEADER, STATE_HEADER = "traceparent", "tracestate"
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
_MAX_STATE = 512
SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace (https://www.w3.org/TR/trace-context/)."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str = ""
    """16 hexadecimal digits: of the caller's span; empty if the trace begins here."""
    flags: int = 0
    state: str = ""
    """The caller's `tracestate`, to be passed on."""

    @classmethod
    def new(cls) -> "TraceContext":
        """Of a trace that begins here."""
        return cls(f"{random.getrandbits(128) or 1:032x}")

    @classmethod
    def read(cls, parent: str | None, state: str | None = None) -> "TraceContext":
        """What a caller has sent; a new trace if it has sent none, or none that is valid, as the standard demands."""
        match = None if parent is None else _PARENT.fullmatch(parent.strip())
        if match is None or match["version"] == "ff" or (match["version"] == "00" and match[5]):
            return cls.new()
        if not int(match["trace"], 16) or not int(match["span"], 16):
            return cls.new()
        kept = (
            state if state is not None and len(state) <= _MAX_STATE and state.isascii() and state.isprintable() else ""
        )
        return cls(match["trace"], match["span"], int(match["flags"], 16), kept)

    @property
    def sampled(self) -> bool:
        """Whether the caller records this trace."""
        return bool(self.flags & SAMPLED)
