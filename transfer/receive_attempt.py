"""The decode worker's end of one attempt: half of the table in `kvrelay.transfer.protocol`."""

from collections.abc import Iterator

from kvrelay.transfer.events import (
    BlocksFreed,
    Cancel,
    Commit,
    Expected,
    Failed,
    Frame,
    FrameEnded,
    Hold,
    LinkUp,
    Manifest,
    Outcome,
    PeerLost,
    ReceiveAction,
    ReceiveEvent,
    ReceiveFrame,
    ReleaseHold,
    Renewed,
    Reserve,
    Reserved,
    State,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.messages import Abort, Ack, Code, Finish, Grant, Key, Nack, Offer, Push, ToAttempt, Wait
from kvrelay.transfer.packing import clip


class ReceiveAttempt:
    """The decode worker's end of one attempt."""

    def __init__(self, key: Key, limits: Timeouts, now: float) -> None:
        self.key = key
        self.state = State.ADMITTED
        self.dropped = 0
        self._limits = limits
        self._deadline = now + limits.prefill
        self._lease = float("inf")
        self._shape: Manifest | None = None
        self._offer: Offer | None = None
        self._asked = self._ask_again = self._told_wait = False
        self._reservation: Hold | None = None
        self._quarantine: set[Frame] = set()
        self._epoch = 0
        self._granted_epoch = 0
        self._base = self._next = self._index = 0
        self._group: tuple[int, int, int] | None = None
        """While layers come in groups: the token at which each group begins, this one's first layer, its layers."""
        self._verified = 0
        self._finish: Finish | None = None

    @property
    def over(self) -> bool:
        """Ended, with no reservation left here and none under way."""
        return self.state.over and self._reservation is None and not self._asked

    @property
    def deadline(self) -> float:
        """When `poll` will have something to say unless an event comes first; infinite once it ended."""
        return float("inf") if self.state.over else min(self._deadline, self._lease)

    def poll(self, now: float) -> list[ReceiveAction]:
        """Ends the attempt if a deadline has passed."""
        if now < self.deadline:
            return []
        if self.state is State.WAITING and self._lease > now:
            return list(self._end(State.FAILED, Code.NO_ROOM, f"no room within {self._limits.grant} s"))
        what = "no sign of life from the sender" if self._lease <= now else f"still {self.state.value} at its deadline"
        return list(self._end(State.FAILED, Code.TIMEOUT, what))

    def on(self, event: ReceiveEvent, now: float) -> list[ReceiveAction]:
        """The actions that `event` asks for, after those of a deadline that has passed."""
        actions = self.poll(now)
        if isinstance(event, ToAttempt) and event.key != self.key:
            self.dropped += 1
        else:
            actions += self._after_end(event) if self.state.over else self._on(event, now)
        return actions

    def _on(self, event: ReceiveEvent, now: float) -> Iterator[ReceiveAction]:
        if self._offer is not None and isinstance(event, Push | Finish | Renewed):
            self._lease = now + self._limits.lease
        match event:
            case Expected(shape) if self._shape is None:
                self._shape = shape
                yield from self._admit(now)
            case Offer() if self._offer is None:
                self._offer = event
                self._lease = now + self._limits.lease
                self._deadline = now + self._limits.grant
                yield from self._admit(now)
            case Expected() | Offer():
                self.dropped += 1
            case Reserved(reservation, have):
                yield from self._on_reserved(reservation, have, now)
            case BlocksFreed() if self.state is State.WAITING:
                yield from self._ask()
            case LinkUp(epoch):
                self._epoch = max(self._epoch, epoch)
                yield from self._grant()
            case Push():
                yield from self._on_push(event)
            case Finish():
                yield from self._on_finish(event, now)
            case FrameEnded(frame, outcome):
                yield from self._on_frame_ended(frame, outcome)
            case Abort(code=code, message=message):
                yield from self._end(State.FAILED, code, message, tell=False)
            case PeerLost(code=code, message=message):
                yield from self._end(State.FAILED, code, message)
            case Cancel():
                yield from self._end(State.CANCELLED, Code.CANCELLED, "cancelled by the receiver")

    def _after_end(self, event: ReceiveEvent) -> Iterator[ReceiveAction]:
        match event:
            case Reserved(reservation):
                self._asked = False
                if reservation is not None:
                    yield ReleaseHold(reservation)
            case FrameEnded(frame):
                self._quarantine.discard(frame)
                yield from self._release()
            case _:
                self.dropped += 1

    def _admit(self, now: float) -> Iterator[ReceiveAction]:
        shape, offer = self._shape, self._offer
        if self.state is not State.ADMITTED or shape is None or offer is None:
            return
        if (offer.tokens, offer.digest) != (shape.tokens, shape.digest):
            message = f"tokens: {shape.tokens} announced here, {offer.tokens} offered"
            if offer.tokens == shape.tokens:
                message = "digest: the offered tokens are not those announced here"
            yield from self._end(State.FAILED, Code.MANIFEST, message)
            return
        self.state = State.WAITING
        self._deadline = now + self._limits.grant
        yield from self._ask()

    def _ask(self) -> Iterator[ReceiveAction]:
        self._ask_again = self._asked
        if not self._asked:
            self._asked = True
            yield Reserve()

    def _on_reserved(self, reservation: Hold | None, have: int, now: float) -> Iterator[ReceiveAction]:
        self._asked = False
        if reservation is not None:
            self._reservation = reservation
            self._verified = have
            self.state = State.TRANSFERRING
            self._deadline = now + self._limits.prefill
            yield from self._grant()
        elif self._ask_again:
            yield from self._ask()
        elif not self._told_wait:
            self._told_wait = True
            yield Tell(Wait(*self.key))

    def _grant(self) -> Iterator[ReceiveAction]:
        """Credit for all that is missing, once per epoch, and not while an older epoch's frame may still be written."""
        if self.state is not State.TRANSFERRING or self._granted_epoch == self._epoch or self._quarantine:
            return
        self._granted_epoch = self._epoch
        self._base = self._next = self._verified
        self._index = 0
        self._group = None
        self._finish = None
        yield Tell(Grant(*self.key, self._epoch, self._base, self._whole().tokens))

    def _whole(self) -> Manifest:
        if self._shape is None:
            raise RuntimeError(f"hand-off {self.key} is {self.state.value} without a shape")
        return self._shape

    def _on_push(self, push: Push) -> Iterator[ReceiveAction]:
        if push.epoch != self._granted_epoch or push.epoch != self._epoch or push.index < self._index:
            self.dropped += 1
            return
        shape, end = self._whole(), push.first + push.tokens
        follows = push.index == self._index and push.first == self._next and self._layers_follow(push)
        if not (follows and shape.whole(end) and push.nbytes == shape.bytes_of(push.tokens, push.layers)):
            message = (
                f"frame {push.index} of tokens {push.first} to {end}, layers {push.layer} to "
                f"{push.layer + push.layers}, {push.nbytes} bytes, can't follow {self._next}"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        frame = Frame(push.epoch, push.index, push.first, push.tokens, push.nbytes, push.layer, push.layers)
        self._advance(push)
        self._index += 1
        self._quarantine.add(frame)
        yield ReceiveFrame(frame)

    def _layers_follow(self, push: Push) -> bool:
        layers = self._whole().layers
        if self._group is None:
            return push.layer == 0 and push.layers <= layers
        first, layer, group = self._group
        return push.layer == layer and (
            push.layer + push.layers <= layers if push.first == first else push.layers == group
        )

    def _advance(self, push: Push) -> None:
        """To what must come next: after a group of layers the next one, from the token where groups began."""
        shape = self._whole()
        self._next = push.first + push.tokens
        if self._group is None and push.layers < shape.layers:
            self._group = push.first, 0, push.layers
        if self._group is not None:
            first, layer, _ = self._group
            self._group = first, layer, push.layers
            if self._next == shape.tokens and layer + push.layers < shape.layers:
                self._next = first
                self._group = first, layer + push.layers, 0

    def _on_finish(self, finish: Finish, now: float) -> Iterator[ReceiveAction]:
        if finish.epoch != self._granted_epoch or finish.epoch != self._epoch or self._finish is not None:
            self.dropped += 1
            return
        shape = self._whole()
        counts = finish.nbytes == (shape.tokens - self._base) * shape.token_bytes and finish.frames == self._index
        if not counts or self._next != shape.tokens:
            message = (
                f"finish of {finish.nbytes} bytes in {finish.frames} frames; {self._index} were announced, up to "
                f"token {self._next} of {shape.tokens} from {self._base} on"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        self._finish = finish
        self._deadline = min(self._deadline, now + self._limits.transfer)
        yield from self._commit()

    def _on_frame_ended(self, frame: Frame, outcome: Outcome) -> Iterator[ReceiveAction]:
        self._quarantine.discard(frame)
        if outcome is Outcome.CORRUPT:
            message = f"frame {frame.index} of tokens {frame.first} to {frame.first + frame.tokens} failed its checksum"
            yield from self._end(State.FAILED, Code.CORRUPT, message)
            return
        last_layers = frame.layer + frame.layers == self._whole().layers
        follows = frame.epoch == self._granted_epoch and frame.first == self._verified
        if outcome is Outcome.VERIFIED and follows and last_layers:
            self._verified += frame.tokens
        yield from self._grant()
        yield from self._commit()

    def _commit(self) -> Iterator[ReceiveAction]:
        finish = self._finish
        if finish is None or self._quarantine or self._verified != self._whole().tokens:
            return
        self.state = State.COMMITTED
        reservation, self._reservation = self._reservation, None
        yield Commit(reservation, finish.first_token)
        yield Tell(Ack(*self.key, finish.epoch))

    def _end(self, state: State, code: Code, message: str, tell: bool = True) -> Iterator[ReceiveAction]:
        self.state = state
        if tell and self._offer is not None:
            yield Tell(Nack(*self.key, code, clip(message)))
        if state is State.FAILED:
            yield Failed(code, message)
        if self._quarantine:
            yield StopFrames(tuple(self._quarantine))
        yield from self._release()

    def _release(self) -> Iterator[ReceiveAction]:
        if self._reservation is not None and not self._quarantine:
            reservation, self._reservation = self._reservation, None
            yield ReleaseHold(reservation)
