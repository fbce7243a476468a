"""Both state machines of one attempt, joined by lossy message queues and by links that fail.

`Model.steps` lists what can happen next, and `Model.check` checks the guarantees. Hypothesis looks for the shortest
sequence of steps that breaks one; `support.simulation` covers the coordinators and whole clusters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.transfer.events import (
    BlocksFreed,
    Cancel,
    Commit,
    Committed,
    Computed,
    Expected,
    Failed,
    Finished,
    Frame,
    FrameEnded,
    LinkLost,
    LinkUp,
    Manifest,
    Outcome,
    PeerLost,
    ReceiveEvent,
    ReceiveFrame,
    ReleaseHold,
    Renewed,
    Reserve,
    Reserved,
    SendEvent,
    SendFinish,
    SendFrame,
    State,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.messages import Code, Finish, Message, Push
from kvrelay.transfer.protocol import ReceiveAttempt, SendAttempt

KEY = ("request", 2)
TIMEOUTS = Timeouts(lease=5, grant=30, prefill=120, transfer=60)
BLOCK = 4
TOKEN_BYTES = 6


@dataclass(eq=False)
class Held:
    """A stand-in for a hold or a reservation."""

    name: str
    released: int = 0
    given_away: int = 0


@dataclass
class Side:
    """The holds and frames of one end."""

    holds: list[Held] = field(default_factory=list)
    waiting: dict[Frame, None] = field(default_factory=dict)
    """Frames whose blocks no link has touched yet."""
    touching: dict[Frame, list[Held]] = field(default_factory=dict)
    """Frames whose blocks the link reads or writes now, and the holds on these blocks when it began."""
    failed: list[Failed] = field(default_factory=list)

    def release(self, hold: Held) -> None:
        for frame, needed in self.touching.items():
            assert hold not in needed, f"{hold.name} was released while the link touches {frame}"
        hold.released += 1

    def touch(self, frame: Frame) -> None:
        del self.waiting[frame]
        self.touching[frame] = [hold for hold in self.holds if not hold.released]


class Model:
    """One attempt and its world."""

    def __init__(self, tokens: int = 11, have: int = 0, frame_blocks: int = 1) -> None:
        self.now = 100.0
        self.shape = Manifest(tokens, b"d" * 16, TOKEN_BYTES, BLOCK, frame_blocks * BLOCK)
        self.have = have
        self.sender = SendAttempt(KEY, self.shape, TIMEOUTS, self.now)
        self.receiver = ReceiveAttempt(KEY, TIMEOUTS, self.now)
        self.left, self.right = Side(), Side()
        self.to_receiver: list[Message] = [self.sender.offer]
        self.to_sender: list[Message] = []
        self.link_epoch = 1
        self.last: Finish | None = None
        """Waits for the announcements of the frames before it."""
        self.sent: set[Frame] = set()
        self.corrupted: set[Frame] = set()
        self.written: set[int] = set()
        """Tokens whose KV has arrived intact."""
        self.computed = 0
        self.finished = False
        self.asked = 0
        self.committed = 0
        self.acknowledged = 0
        self._receiver_on(LinkUp(1))

    # Plumbing.

    def _sender_on(self, event: SendEvent) -> None:
        self._sender_do(self.sender.on(event, self.now))

    def _receiver_on(self, event: ReceiveEvent) -> None:
        self._receiver_do(self.receiver.on(event, self.now))

    def _sender_do(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Tell(message):
                    self.to_receiver.append(message)
                case SendFrame(frame):
                    self.left.waiting[frame] = None
                case SendFinish(message):
                    self.last = message
                    self._send_last()
                case StopFrames(frames):
                    self._stop(self.left, frames, lambda frame: self._sender_on(FrameEnded(frame)))
                case ReleaseHold(hold):
                    self.left.release(hold)
                case Committed():
                    self.acknowledged += 1
                    assert self.committed, "the sender accepts an acknowledgement without a commit"
                case Failed():
                    self.left.failed.append(action)
                case _:
                    raise AssertionError(action)

    def _send_last(self) -> None:
        """Sends Finish once every frame before it is announced."""
        if self.last is not None and not self.left.waiting and not self.left.touching:
            self.to_receiver.append(self.last)
            self.last = None

    def _receiver_do(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Tell(message):
                    self.to_sender.append(message)
                case Reserve():
                    self.asked += 1
                case ReceiveFrame(frame):
                    self.right.waiting[frame] = None
                case StopFrames(frames):
                    self._stop(self.right, frames, lambda frame: self._receiver_on(FrameEnded(frame, Outcome.LOST)))
                case ReleaseHold(hold):
                    self.right.release(hold)
                case Commit(reservation, first_token):
                    self._check_commit(first_token)
                    reservation.given_away += 1
                case Failed():
                    self.right.failed.append(action)
                case _:
                    raise AssertionError(action)

    @staticmethod
    def _stop(side: Side, frames: Sequence[Frame], tell: Callable[[Frame], None]) -> None:
        for frame in frames:
            assert frame in side.waiting or frame in side.touching
            if frame in side.waiting:
                del side.waiting[frame]
                tell(frame)

    def _check_commit(self, first_token: int) -> None:
        self.committed += 1
        assert first_token == 77
        assert not self.right.touching
        missing = sorted(set(range(self.have, self.shape.tokens)) - self.written)
        assert not missing, f"committed with tokens {missing} not verified"

    def _hold(self, side: Side, name: str) -> Held:
        hold = Held(name)
        side.holds.append(hold)
        return hold

    # The steps.

    def steps(self) -> dict[str, Callable[[], None]]:
        """What may happen next."""
        every: dict[str, tuple[bool, Callable[[], None]]] = {
            "compute": (self.computed + BLOCK < self.shape.tokens and not self.finished, self.compute),
            "finish": (not self.finished, self.finish),
            "expect": (True, lambda: self._receiver_on(Expected(self.shape))),
            "reserve": (self.asked > 0, lambda: self.reserve(True)),
            "no blocks": (self.asked > 0, lambda: self.reserve(False)),
            "blocks freed": (True, lambda: self._receiver_on(BlocksFreed())),
            "read": (bool(self.left.waiting), self.begin_read),
            "was read": (bool(self.left.touching), self.end_read),
            "write": (self._arrived() is not None, self.begin_write),
            "was written": (bool(self.right.touching), lambda: self.end_write(Outcome.VERIFIED)),
            "receive fails": (bool(self.right.waiting), self.lose_receive),
            "link lost": (True, self.lose_link),
            "renew": (True, self.renew),
            "cancel sender": (True, lambda: self._sender_on(Cancel())),
            "cancel receiver": (True, lambda: self._receiver_on(Cancel())),
            "sender's peer lost": (True, lambda: self._sender_on(PeerLost(Code.CLOSED, "gone"))),
            "receiver's peer lost": (True, lambda: self._receiver_on(PeerLost(Code.CLOSED, "gone"))),
        }
        return {name: step for name, (possible, step) in every.items() if possible}

    def compute(self) -> None:
        self.computed += BLOCK
        self._sender_on(Computed(self.computed, self._hold(self.left, f"chunk to {self.computed}")))

    def finish(self) -> None:
        self.finished = True
        self._sender_on(Finished(77, self._hold(self.left, "all")))

    def reserve(self, free: bool) -> None:
        self.asked -= 1
        self._receiver_on(Reserved(self._hold(self.right, "reservation") if free else None, self.have))

    def begin_read(self) -> None:
        self.left.touch(next(iter(self.left.waiting)))

    def end_read(self) -> None:
        """The frame was copied from the blocks; it is announced and sent."""
        frame = next(iter(self.left.touching))
        del self.left.touching[frame]
        self.sent.add(frame)
        self.to_receiver.append(Push(*KEY, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes))
        self._send_last()
        self._sender_on(FrameEnded(frame))

    def corrupt(self) -> None:
        self.corrupted |= self.sent

    def _arrived(self) -> Frame | None:
        return next((frame for frame in self.right.waiting if frame.epoch == self.link_epoch), None)

    def begin_write(self) -> None:
        frame = self._arrived()
        assert frame is not None
        if frame in self.corrupted:
            del self.right.waiting[frame]
            self._receiver_on(FrameEnded(frame, Outcome.CORRUPT))
        else:
            self.right.touch(frame)

    def end_write(self, outcome: Outcome) -> None:
        frame = next(iter(self.right.touching))
        del self.right.touching[frame]
        self.written |= set(range(frame.first, frame.first + frame.tokens))
        self._receiver_on(FrameEnded(frame, outcome))

    def lose_receive(self) -> None:
        frame = next(iter(self.right.waiting))
        del self.right.waiting[frame]
        self._receiver_on(FrameEnded(frame, Outcome.LOST))

    def lose_link(self) -> None:
        """Both ends lose the link and dial the next one."""
        lost, self.link_epoch = self.link_epoch, self.link_epoch + 1
        self.last = None
        for frame in [frame for frame in self.left.waiting if frame.epoch == lost]:
            del self.left.waiting[frame]
            self._sender_on(FrameEnded(frame))
        for frame in [frame for frame in self.right.waiting if frame.epoch == lost]:
            del self.right.waiting[frame]
            self._receiver_on(FrameEnded(frame, Outcome.LOST))
        self._sender_on(LinkLost(lost))
        self._receiver_on(LinkUp(self.link_epoch))

    def renew(self) -> None:
        self._sender_on(Renewed())
        self._receiver_on(Renewed())

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._sender_do(self.sender.poll(self.now))
        self._receiver_do(self.receiver.poll(self.now))

    def deliver(self, forward: bool, index: int, keep: bool = False) -> None:
        """Delivers one queued message, perhaps out of order; with `keep` it stays queued and may come again."""
        queue = self.to_receiver if forward else self.to_sender
        if not queue:
            return
        message = queue[index % len(queue)]
        if not keep:
            del queue[index % len(queue)]
        if forward:
            self._receiver_on(message)  # type: ignore[arg-type]  # every message in this queue is a receiver's event
        else:
            self._sender_on(message)  # type: ignore[arg-type]  # every message in this queue is a sender's event

    def drop(self, forward: bool, index: int) -> None:
        queue = self.to_receiver if forward else self.to_sender
        if queue:
            del queue[index % len(queue)]

    # What must hold.

    def check(self) -> None:
        for side, machine in ((self.left, self.sender), (self.right, self.receiver)):
            for hold in side.holds:
                assert hold.released + hold.given_away <= 1, f"{hold.name} is released twice"
                if machine.over:
                    assert hold.released + hold.given_away == 1, f"{hold.name} leaked in {machine.state}"
            assert len(side.failed) <= 1
            assert machine.state.over == (machine.deadline == float("inf")), f"{machine.state} has the wrong deadline"
            assert machine.deadline > self.now, "a deadline has passed without effect"
        assert self.committed <= 1
        assert self.acknowledged <= 1
        assert (self.receiver.state is State.COMMITTED) == (self.committed == 1)

    def settle(self) -> None:
        """Lets every deadline pass and every frame end: then both machines must be over and hold nothing."""
        self.advance(TIMEOUTS.prefill + TIMEOUTS.grant + TIMEOUTS.transfer)
        while self.left.touching:
            self.end_read()
        while self.right.touching:
            self.end_write(Outcome.VERIFIED)
        while self.asked:
            self.reserve(True)
        self.check()
        assert self.sender.over
        assert self.receiver.over
        assert not self.left.waiting
        assert not self.right.waiting
