"""Links inside one process, with scripted faults, to test everything above the transports."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kvrelay.transfer.protocol.ports import SENDER
from kvrelay.transfer.transports.base import Link, LinkError, Pending, Rendezvous


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one frame."""

    kind: Literal["corrupt", "truncate", "replay", "drop", "delay", "fail"]
    """Kind of the fault. corrupt: one bit flips; truncate: only half of it arrives; replay: the frame before arrives in
    its place; drop: it never arrives; delay: it arrives late; fail: the link breaks at both ends."""
    seconds: float = 0.0
    """Seconds of a delay."""


class FakeTransport:
    """A transport in one process; both ends of every link must use this same object.

    `script(number)` gives the fault of each frame, or None. `number` counts the frames sent before it over all links,
    without warm-up bytes.
    """

    name = "fake"
    scope = ""

    def __init__(self, script: Callable[[int], Fault | None] | None = None) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._frames = 0
        self._wires: dict[str, _Wire] = {}

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        try:
            wire = self._offer(meeting) if rank == SENDER else self._take(meeting)
        except RuntimeError as error:
            raise LinkError(f"fake: {error}") from error
        return FakeLink(self, wire, rank)

    def _offer(self, meeting: Rendezvous) -> "_Wire":
        name, wire = uuid.uuid4().hex, _Wire()
        with self._lock:
            self._wires[name] = wire
        meeting.set("wire", name)
        try:
            meeting.wait(["taken"])
        except RuntimeError:
            wire.break_("the other end did not come")
            raise
        return wire

    def _take(self, meeting: Rendezvous) -> "_Wire":
        name = meeting.get("wire").decode()
        meeting.set("taken", b"")
        with self._lock:
            return self._wires.pop(name)

    def fault(self) -> Fault | None:
        """The fault of the next frame; None if it has none."""
        with self._lock:
            number, self._frames = self._frames, self._frames + 1
        return None if self._script is None else self._script(number)


class _Wire:
    """State that the two ends of one link share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: tuple[deque[tuple[float, int, torch.Tensor]], ...] = (deque(), deque())
        """Frames on their way from each end: arrival time, number on the link, bytes."""
        self.broken: str | None = None

    def break_(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()

    def check(self) -> None:
        if self.broken is not None:
            raise LinkError(f"fake: {self.broken}")


class FakeLink:
    """One end of a link."""

    stream = None
    lender = None
    mac_key = None

    def __init__(self, transport: FakeTransport, wire: _Wire, rank: int) -> None:
        self._transport = transport
        self._wire = wire
        self._rank = rank
        self._sent = self._received = 0
        self._before = torch.empty(0, dtype=torch.uint8)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, data: torch.Tensor) -> Pending:
        fault = self._transport.fault() if self._sent and self._rank == SENDER else None
        number, self._sent = self._sent, self._sent + 1
        data = data.clone()
        before, self._before = self._before, data
        match fault:
            case Fault("fail"):
                self._wire.break_("scripted failure")
            case Fault("corrupt"):
                data = data.clone()
                data[len(data) // 2] ^= 1
            case Fault("truncate"):
                data = data[: len(data) // 2]
            case Fault("replay"):
                data = before
        if fault is None or fault.kind != "drop":
            with self._wire.changed:
                arrives = time.monotonic() + (0.0 if fault is None else fault.seconds)
                self._wire.queues[self._rank].append((arrives, number, data))
                self._wire.changed.notify_all()
        return Pending(lambda timeout: self._wire.check())

    def recv(self, into: torch.Tensor) -> Pending:
        number, self._received = self._received, self._received + 1
        queue, changed = self._wire.queues[1 - self._rank], self._wire.changed

        def receive(deadline: float) -> None:
            with changed:
                # The number of a dropped frame never arrives.
                while not queue or queue[0][0] > time.monotonic() or queue[0][1] != number:
                    self._wire.check()
                    if time.monotonic() > deadline:
                        raise LinkError("fake: nothing arrived in time")
                    changed.wait(0.005)
                self._wire.check()
                data = queue.popleft()[2]
            if data.numel() != into.numel():
                raise LinkError(f"fake: {data.numel()} bytes arrived; {into.numel()} were expected")
            into.copy_(data)

        return Pending.in_wait(receive)

    def abort(self) -> None:
        self._wire.break_("the other end has closed")

    def close(self) -> None:
        self.abort()
