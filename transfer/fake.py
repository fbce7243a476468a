"""Links inside one process, with scripted faults: how everything above transports is tested."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kvrelay.transfer.transport import RECEIVER, SENDER, Link, LinkError, Rendezvous


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one frame."""

    kind: Literal["drop", "corrupt", "delay", "fail"]
    """drop: it never arrives; corrupt: one bit is flipped; delay: it comes late; fail: the link breaks at both ends."""
    seconds: float = 0.0
    """Of a delay."""


class FakeTransport:
    """Both ends of every link must use this same object.

    `script` is asked before each frame, with the number of frames sent before it over all links (warm-up bytes don't
    count), and answers what happens to it; None sends it as it is.
    """

    name = "fake"

    def __init__(self, script: Callable[[int], Fault | None] | None = None) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._frames = 0
        self._wires: dict[str, _Wire] = {}

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        try:
            if rank == SENDER:
                name, wire = uuid.uuid4().hex, _Wire()
                with self._lock:
                    self._wires[name] = wire
                meeting.set("wire", name)
                meeting.wait(["taken"])
            else:
                with self._lock:
                    wire = self._wires.pop(meeting.get("wire").decode())
                meeting.set("taken", b"")
        except RuntimeError as error:
            raise LinkError(f"fake: {error}") from error
        return FakeLink(self, wire, rank)

    def fault(self) -> Fault | None:
        """Of the next frame."""
        with self._lock:
            number, self._frames = self._frames, self._frames + 1
        return None if self._script is None else self._script(number)


class _Wire:
    """What the two ends of one link share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: tuple[deque[tuple[float, torch.Tensor]], ...] = (deque(), deque())
        self.broken: str | None = None

    def break_(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()


class FakeLink:
    """One end of a link."""

    def __init__(self, transport: FakeTransport, wire: _Wire, rank: int) -> None:
        self._transport = transport
        self._wire = wire
        self._rank = rank
        self._warm = False

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, data: torch.Tensor) -> "FakePending":
        fault = self._transport.fault() if self._warm and self._rank == SENDER else None
        self._warm = True
        data = data.clone()
        match fault:
            case Fault("fail"):
                self._wire.break_("scripted failure")
            case Fault("corrupt"):
                data[len(data) // 2] ^= 1
        arrives = time.monotonic() + (fault.seconds if fault is not None and fault.kind == "delay" else 0.0)
        with self._wire.changed:
            if fault is None or fault.kind != "drop":
                self._wire.queues[self._rank].append((arrives, data))
                self._wire.changed.notify_all()
        return FakePending(self._wire, None, None)

    def recv(self, into: torch.Tensor) -> "FakePending":
        return FakePending(self._wire, self._wire.queues[RECEIVER if self._rank == SENDER else SENDER], into)

    def abort(self) -> None:
        self._wire.break_("the other end has closed")

    def close(self) -> None:
        self.abort()


class FakePending:
    """A send, or (with `queue` and `into`) a receive."""

    def __init__(self, wire: _Wire, queue: deque[tuple[float, torch.Tensor]] | None, into: torch.Tensor | None) -> None:
        self._wire = wire
        self._queue = queue
        self._into = into

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._wire.changed:
            while True:
                at = time.monotonic()
                if self._wire.broken is not None:
                    raise LinkError(f"fake: {self._wire.broken}")
                if self._queue is None or self._into is None:
                    return
                if self._queue and self._queue[0][0] <= at:
                    break
                if at >= deadline:
                    raise LinkError(f"fake: nothing came within {timeout} s")
                self._wire.changed.wait(min(deadline, self._queue[0][0] if self._queue else deadline) - at)
            _, data = self._queue.popleft()
        if data.numel() != self._into.numel():
            raise LinkError(f"fake: {data.numel()} bytes came; {self._into.numel()} were expected")
        self._into.copy_(data)
