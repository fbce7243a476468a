"""The two ends of a simulated hand-off: each machine, told events, and the checks after each."""

from collections.abc import Sequence
from typing import Any

from kvrelay.transfer.events import (
    Commit,
    Committed,
    Failed,
    Frame,
    FrameEnded,
    LinkLost,
    LinkUp,
    Outcome,
    ReceiveFrame,
    ReleaseHold,
    Renewed,
    Reserve,
    SendFinish,
    SendFrame,
    State,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.frames import BlockClaim
from kvrelay.transfer.messages import Abort, Ack, Finish, Grant, Key, Nack, Offer, Push, Wait
from kvrelay.transfer.protocol import ReceiveAttempt, SendAttempt
from support.simulated_blocks import Hold, Violation
from support.simulated_links import Job, Stream, blocks_in

TIMEOUTS = Timeouts(lease=2.0, grant=4.0, prefill=8.0, transfer=4.0)
FIRST_TOKEN = 77
SIGNS_OF_LIFE = frozenset((Renewed, Wait, Grant, Ack, Nack, Offer, Push, Finish, Abort))
TICK = 0.1
"""How late a process may look at its deadlines."""


class End:
    """One end of one attempt: its machine, told events and checked after each."""

    __slots__ = ("failures", "guards", "heard", "key", "machine", "process", "stream", "table", "watched", "world")
    role = ""
    noted: frozenset[type] = frozenset()
    """Events from which the checker itself learns something."""
    fenced: frozenset[type] = frozenset()
    """Messages of which nothing may come if they are another attempt's or epoch's."""

    def __init__(self, process: Any, machine: Any, stream: Stream | None) -> None:
        self.world = process.world
        self.process = process
        self.machine = machine
        self.key: Key = machine.key
        self.stream = stream
        self.table: list[int] = []
        self.guards: dict[Frame, Any] = {}
        self.failures = 0
        self.heard: float | None = None
        """When the other end last gave a sign of life, by this process's clock; None where it needn't."""
        self.watched = float("inf")
        """The deadline at which somebody is going to look."""
        self._watch()

    def blocks_of(self, frame: Frame) -> list[int]:
        return blocks_in(self.table, frame)

    def feed(self, event: Any) -> None:
        """Tells the machine, checks what it makes of it, and does what it asks for."""
        machine, now = self.machine, self.process.clock()
        if now >= machine.deadline:
            self.poll()
        before, kind = machine.state, type(event)
        if kind in self.noted:
            self.note(event)
        if self.heard is not None and kind in SIGNS_OF_LIFE:
            self.heard = now
        actions = machine.on(event, now)
        self._record(kind.__name__, before, actions)
        if kind in self.fenced:
            self.judge(event, before, actions)
        self._check(now)
        if actions:
            self.apply(actions)
        if machine.state.over:
            self.process.forget(self)
        else:
            self._watch()

    def poll(self) -> None:
        """Looks at the clock."""
        machine, now = self.machine, self.process.clock()
        before = machine.state
        actions = machine.poll(now)
        self._record("Deadline", before, actions)
        self._check(now)
        if actions:
            self.apply(actions)
        if machine.state.over:
            self.process.forget(self)

    def _watch(self) -> None:
        """Makes sure that somebody looks when the deadline passes."""
        deadline = self.machine.deadline - self.process.skew
        if deadline < self.watched:
            self.watched = deadline
            world = self.world
            world.post(max(0.0, deadline - world.now) + world.random() * TICK, self.process, self.look)

    def look(self) -> None:
        """Ends the attempt if it is time; looks again later if not."""
        if not self.machine.state.over:
            self.watched = float("inf")
            if self.process.clock() >= self.machine.deadline:
                self.poll()
            self._watch()

    def _record(self, event: str, before: State, actions: Sequence[Any]) -> None:
        world, after = self.world, self.machine.state
        names = world.seen.get(pair := (self.role, before._value_, event, after._value_))
        if names is None:
            names = world.seen[pair] = set()
        for action in actions:
            name = type(action).__name__
            names.add(type(action.message).__name__ if name == "Tell" else name)
        if world.trace is not None:
            world.say(f"{self.process} {self.key} {self.role} {before.name} {event} -> {after.name} {actions}")

    def _check(self, now: float) -> None:
        """No wait without a deadline; and none beyond the lease where the other end must be heard of."""
        machine = self.machine
        deadline = machine.deadline
        if machine.state.over:
            if deadline != float("inf"):
                raise Violation("deadline", f"{self.key}: {machine.state} still waits for {deadline}")
        elif not now < deadline < float("inf"):
            raise Violation("deadline", f"{self.key}: {self.role} {machine.state} at {now}, until {deadline}")
        elif self.heard is not None and deadline > self.heard + TIMEOUTS.lease + 1e-9:
            raise Violation("deadline", f"{self.key}: {self.role} waits until {deadline}, last sign at {self.heard}")

    def unmoved(self, event: Any, before: State, actions: Sequence[Any], why: str) -> None:
        """Nothing may have come of `event`."""
        if actions or self.machine.state is not before:
            raise Violation("fence", f"{self.key}: {event} of another {why} made {actions}, {self.machine.state}")

    def failed(self, action: Failed) -> None:
        self.failures += 1
        if self.failures > 1 or self.machine.state is not State.FAILED:
            raise Violation("report", f"{self.key}: {self.role} {self.machine.state} says again: {action}")

    def stop(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if self.guards[frame].close():
                self.feed(FrameEnded(frame, Outcome.LOST))

    def new_guard(self, frame: Frame) -> Any:
        if frame in self.guards:
            raise Violation("fence", f"{self.key}: {frame} is transferred twice")
        guard = self.guards[frame] = BlockClaim()
        return guard

    def note(self, event: Any) -> None: ...

    def judge(self, event: Any, before: State, actions: Sequence[Any]) -> None: ...

    def apply(self, actions: Sequence[Any]) -> None: ...

    def check_end(self) -> None:
        """When all is quiet."""
        machine = self.machine
        if not machine.over:
            raise Violation("leak", f"{self.key}: {self.role} is left {machine.state}")
        if self.failures != (machine.state is State.FAILED):
            raise Violation("report", f"{self.key}: {self.role} {machine.state}, said {self.failures} times to fail")


class SendingEnd(End):
    __slots__ = ("credits", "finished", "lost")
    role = "sender"
    noted = frozenset((Grant, LinkLost))
    fenced = frozenset((Wait, Grant, Ack, Nack))

    def __init__(self, process: Any, machine: SendAttempt, stream: Stream) -> None:
        super().__init__(process, machine, stream)
        self.heard = process.clock()
        self.credits: dict[int, tuple[int, int]] = {}
        """Epoch -> tokens that may be sent, as far as the receiver has said so."""
        self.lost = 0
        """The latest epoch whose link is known to be lost."""
        self.finished: set[int] = set()

    def note(self, event: Any) -> None:
        match event:
            case Grant(epoch=epoch, have=have, limit=limit) if event.key == self.key:
                self.credits[epoch] = have, max(limit, self.credits.get(epoch, (0, 0))[1])
            case LinkLost(epoch):
                self.lost = max(self.lost, epoch)

    def judge(self, event: Any, before: State, actions: Sequence[Any]) -> None:
        if event.key != self.key:
            self.unmoved(event, before, actions, "attempt")
        elif (type(event) is Grant and event.epoch <= self.lost) or (
            type(event) is Ack and event.epoch not in self.finished
        ):
            self.unmoved(event, before, actions, "epoch")

    def apply(self, actions: Sequence[Any]) -> None:
        stream = self.stream
        assert stream is not None
        for action in actions:
            match action:
                case Tell(message):
                    stream.send(True, message)
                case SendFrame(frame):
                    self._send(stream, frame)
                case SendFinish(message):
                    self.finished.add(message.epoch)
                    link = stream.left_link
                    if link is not None and link.epoch == message.epoch:
                        link.send(Job(None, None, None, 0, message))
                case StopFrames(frames):
                    self.stop(frames)
                case ReleaseHold(hold):
                    self.process.blocks.release(hold)
                case Committed():
                    if self.key not in self.world.commits:
                        raise Violation("commit", f"{self.key}: the sender believes in a commit that never was")
                case Failed():
                    self.failed(action)
                    self.world.router.report(self.key, "failed")

    def _send(self, stream: Stream, frame: Frame) -> None:
        first, limit = self.credits.get(frame.epoch, (0, 0))
        if frame.epoch <= self.lost or frame.first < first or frame.first + frame.tokens > limit:
            raise Violation("credit", f"{self.key}: {frame} without credit: {self.credits}, lost {self.lost}")
        job = Job(self, frame, self.new_guard(frame), frame.nbytes)
        link = stream.left_link
        if link is not None and link.epoch == frame.epoch:
            link.send(job)
        else:
            self.world.post(0.0, self.process, self._not_sent, job)

    def _not_sent(self, job: Job) -> None:
        if job.guard.close():
            self.feed(FrameEnded(job.frame, Outcome.LOST))


class ReceivingEnd(End):
    __slots__ = ("committed", "expected", "granted", "left", "reservation", "up")
    role = "receiver"
    noted = frozenset((Offer, LinkUp))
    fenced = frozenset((Offer, Push, Finish, Abort))

    def __init__(self, process: Any, machine: ReceiveAttempt, left: Any) -> None:
        super().__init__(process, machine, None)
        self.left = left
        self.expected = False
        self.reservation: Hold | None = None
        self.granted = self.up = 0
        """Epoch of the last grant, and of the latest link."""
        self.committed = False

    def note(self, event: Any) -> None:
        match event:
            case Offer() if event.key == self.key and self.heard is None and not self.machine.state.over:
                self.heard = self.process.clock()
            case LinkUp(epoch):
                self.up = max(self.up, epoch)

    def judge(self, event: Any, before: State, actions: Sequence[Any]) -> None:
        if event.key != self.key:
            self.unmoved(event, before, actions, "attempt")
        elif type(event) in (Push, Finish) and (event.epoch != self.granted or event.epoch != self.up):
            self.unmoved(event, before, actions, "epoch")

    def apply(self, actions: Sequence[Any]) -> None:
        process, world = self.process, self.world
        for action in actions:
            match action:
                case Tell(message):
                    if isinstance(message, Grant):
                        self.granted = message.epoch
                    if self.stream is not None:
                        self.stream.send(False, message)
                case Reserve():
                    process.reserve(self)
                case ReceiveFrame(frame):
                    self._receive(frame)
                case StopFrames(frames):
                    self.stop(frames)
                case ReleaseHold(hold):
                    process.release(hold)
                case Commit(hold, first_token):
                    self._commit(hold, first_token)
                case Failed():
                    self.failed(action)
                    if self.expected:
                        world.router.report(self.key, "failed")

    def _receive(self, frame: Frame) -> None:
        if self.reservation is None or self.reservation.released:
            raise Violation("credit", f"{self.key}: {frame} is received without a reservation")
        job = Job(self, frame, self.new_guard(frame), frame.nbytes)
        link = self.stream.right_link if self.stream is not None else None
        if link is not None and link.epoch == frame.epoch:
            link.receive(job)
        elif job.guard.close():
            self.world.post(0.0, self.process, self.feed, FrameEnded(frame, Outcome.LOST))

    def _commit(self, hold: Hold, first_token: int) -> None:
        world = self.world
        if self.key in world.commits:
            raise Violation("commit", f"{self.key} is committed twice")
        if self.failures or first_token != FIRST_TOKEN:
            raise Violation("commit", f"{self.key} is committed with {first_token} after {self.failures} failures")
        world.commits.add(self.key)
        self.process.check_tokens(hold)
        world.router.report(self.key, "imported")
        world.post(world.random() * 1.5, self.process, self.process.decoded, hold)
