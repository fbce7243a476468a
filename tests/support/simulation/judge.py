"""The machines of the product, with a judge behind each: it checks every transition, and records it."""

from collections.abc import Sequence
from typing import Any

from kvrelay.transfer.protocol.events import Failed, LinkLost, LinkUp, Renewed, SendFinish, SendFrame, State, Tell
from kvrelay.transfer.protocol.messages import Ack, Finish, Grant, Offer, Push, ToAttempt
from kvrelay.transfer.protocol.table import ReceiveAttempt, SendAttempt
from support.simulation.blocks import Violation

Seen = dict[tuple[str, str, str, str], set[str]]
"""Names of the actions, by (machine, state, event, next state)."""


class Observer:
    """An observer that records what the machines of one world did. `now` is set while a world runs."""

    current: "Observer"

    def __init__(self) -> None:
        self.seen: Seen = {}
        self.trace: list[str] | None = None
        self.clock = 0.0

    def record(self, machine: Any, event: str, before: State, actions: Sequence[Any]) -> None:
        after = machine.state
        names = self.seen.setdefault((machine.role, before.value, event, after.value), set())
        for action in actions:
            name = type(action).__name__
            names.add(type(action.message).__name__ if name == "Tell" else name)
        if self.trace is not None:
            text = f"{machine.key} {machine.role} {before.name} {event} -> {after.name} {list(actions)}"
            self.trace.append(f"{self.clock:8.3f}  {text}")


class _Observed:
    """Mixin in front of a machine."""

    role = ""
    state: State
    key: Any
    deadline: float
    heard: float | None = None
    """Time of the other end's last message, by this process's clock; None before it must send any."""
    failures = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.observer = Observer.current

    def poll(self, now: float) -> list[Any]:
        before = self.state
        actions: list[Any] = super().poll(now)  # type: ignore[misc]  # the machine's
        if actions:
            self.observer.record(self, "Deadline", before, actions)
            self._check(now, actions)
        return actions

    def on(self, event: Any, now: float) -> list[Any]:
        ended = self.poll(now)
        before = self.state
        if self.heard is not None and (isinstance(event, Renewed) or getattr(event, "key", None) == self.key):
            self.heard = now
        self.note(event, now)
        actions: list[Any] = super().on(event, now)  # type: ignore[misc]  # the machine's
        self.observer.record(self, type(event).__name__, before, actions)
        if isinstance(event, ToAttempt) and self.is_stale(event) and (actions or self.state is not before):
            raise Violation("fence", f"{self.key}: {event}, which is stale, made {actions}, {self.state}")
        self._check(now, actions)
        return ended + actions

    def _check(self, now: float, actions: Sequence[Any]) -> None:
        """Checks that each state has a deadline, within the lease while the other end must renew it."""
        self.failures += sum(isinstance(action, Failed) for action in actions)
        if self.failures != (self.state is State.FAILED):
            raise Violation("report", f"{self.key}: {self.role} {self.state}, failed {self.failures} times")
        deadline = self.deadline
        if self.state.over:
            if deadline != float("inf"):
                raise Violation("deadline", f"{self.key}: {self.state} still waits for {deadline}")
        elif not now < deadline < float("inf"):
            raise Violation("deadline", f"{self.key}: {self.role} {self.state} at {now}, until {deadline}")
        elif self.heard is not None and deadline > self.heard + LEASE + 1e-9:
            raise Violation("deadline", f"{self.key}: {self.role} waits until {deadline}, last heard at {self.heard}")
        self.judge(actions)

    def note(self, event: Any, now: float) -> None: ...

    def is_stale(self, event: Any) -> bool:
        return False

    def judge(self, actions: Sequence[Any]) -> None: ...


LEASE = 2.0
"""Lease of the simulated configuration in seconds."""


class ObservedSendAttempt(_Observed, SendAttempt):
    role = "sender"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard = arguments[-1]
        self.granted: dict[int, tuple[tuple[int, ...], int]] = {}
        """First tokens whose KV, and whose hidden states, may be sent, by epoch."""
        self.lost = 0
        """The latest epoch whose link is known to be lost."""
        self.finished: set[int] = set()

    def note(self, event: Any, now: float) -> None:
        match event:
            case Grant(epoch=epoch, have=have, states=states) if event.key == self.key:
                self.granted.setdefault(epoch, (have, states))
            case LinkLost(epoch):
                self.lost = max(self.lost, epoch)

    def is_stale(self, event: Any) -> bool:
        if event.key != self.key:
            return True
        lost_grant = type(event) is Grant and event.epoch <= self.lost
        return lost_grant or (type(event) is Ack and event.epoch not in self.finished)

    def judge(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case SendFrame(frame):
                    firsts = self.granted.get(frame.epoch)
                    first = None if firsts is None else firsts[1] if frame.states else firsts[0][frame.track]
                    if first is None or frame.epoch <= self.lost or frame.first < first:
                        raise Violation("credit", f"{self.key}: {frame} without a grant: {self.granted}, {self.lost}")
                case SendFinish(message):
                    self.finished.add(message.epoch)


class ObservedReceiveAttempt(_Observed, ReceiveAttempt):
    role = "receiver"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.granted = self.up = 0
        """Epoch of the last grant, and of the latest link."""

    def note(self, event: Any, now: float) -> None:
        match event:
            case Offer() if event.key == self.key and self.heard is None and not self.state.over:
                self.heard = now
            case LinkUp(epoch):
                self.up = max(self.up, epoch)

    def is_stale(self, event: Any) -> bool:
        if event.key != self.key:
            return True
        return isinstance(event, Push | Finish) and (event.epoch != self.granted or event.epoch != self.up)

    def judge(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, Tell) and isinstance(action.message, Grant):
                self.granted = action.message.epoch
