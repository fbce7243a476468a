"""The prefill worker's end of one attempt: half of the table in `kvrelay.transfer.protocol`."""

from collections.abc import Iterator

from kvrelay.transfer.events import (
    Cancel,
    Committed,
    Computed,
    Failed,
    Finished,
    Frame,
    FrameEnded,
    Hold,
    LayersComputed,
    LinkLost,
    Manifest,
    PeerLost,
    ReleaseHold,
    Renewed,
    SendAction,
    SendEvent,
    SendFinish,
    SendFrame,
    State,
    StopFrames,
    Tell,
    Timeouts,
)
from kvrelay.transfer.messages import Abort, Ack, Code, Finish, Grant, Key, Nack, Offer, ToAttempt, Wait
from kvrelay.transfer.packing import clip

MAX_LINK_LOSSES = 3
"""Links that one attempt may lose before it is given up."""


class SendAttempt:
    """The prefill worker's end of one attempt."""

    def __init__(self, key: Key, shape: Manifest, limits: Timeouts, now: float) -> None:
        self.key = key
        self.state = State.ADMITTED
        self.dropped = 0
        self.have: int | None = None
        """Tokens that the receiver had before the first frame; None before its first grant."""
        self._shape = shape
        self._limits = limits
        self._deadline = now + limits.grant + limits.lease
        self._lease = now + limits.lease
        self._holds: list[Hold] = []
        self._quarantine: set[Frame] = set()
        self._computed = self._layers = 0
        self._first_token: int | None = None
        self._epoch = 0
        self._granted = False
        self._limit = 0
        self._base = self._next = self._index = self._layer = 0
        self._finish_epoch = 0
        self._losses = 0

    @property
    def offer(self) -> Offer:
        """What the receiver is told first."""
        return Offer(*self.key, self._shape.tokens, self._shape.digest)

    @property
    def over(self) -> bool:
        """Ended, and no hold is left here."""
        return self.state.over and not self._holds

    @property
    def deadline(self) -> float:
        """When `poll` will have something to say unless an event comes first; infinite once it ended."""
        return float("inf") if self.state.over else min(self._deadline, self._lease)

    def poll(self, now: float) -> list[SendAction]:
        """Ends the attempt if a deadline has passed."""
        if now < self.deadline:
            return []
        what = (
            "no sign of life from the receiver" if self._lease <= now else f"still {self.state.value} at its deadline"
        )
        return list(self._end(State.FAILED, Code.TIMEOUT, what, tell=True))

    def on(self, event: SendEvent, now: float) -> list[SendAction]:
        """The actions that `event` asks for, after those of a deadline that has passed."""
        actions = self.poll(now)
        if isinstance(event, ToAttempt) and event.key != self.key:
            self.dropped += 1
        else:
            actions += self._after_end(event) if self.state.over else self._on(event, now)
        return actions

    def _on(self, event: SendEvent, now: float) -> Iterator[SendAction]:
        match event:
            case Computed(tokens, hold):
                self._holds.append(hold)
                self._computed = max(self._computed, tokens)
                yield from self._send()
            case LayersComputed(layers, hold):
                if hold is not None:
                    self._holds.append(hold)
                self._layers = max(self._layers, layers)
                yield from self._send()
            case Finished(first_token, hold):
                self._holds.append(hold)
                self._computed, self._layers = self._shape.tokens, self._shape.layers
                self._first_token = first_token
                self._enter(now)
                yield from self._send()
            case Grant():
                self._lease = now + self._limits.lease
                yield from self._on_grant(event, now)
            case Wait() | Renewed():
                self._lease = now + self._limits.lease
            case Ack(epoch=epoch) if epoch == self._finish_epoch:
                self.state = State.COMMITTED
                yield Committed()
                yield from self._let_go()
            case Ack():
                self.dropped += 1
            case Nack(code=code, message=message):
                yield from self._end(State.FAILED, code, message)
            case PeerLost(code=code, message=message):
                yield from self._end(State.FAILED, code, message, tell=True)
            case Cancel():
                yield from self._end(State.CANCELLED, Code.CANCELLED, "cancelled by the sender", tell=True)
            case LinkLost(epoch):
                yield from self._on_link_lost(epoch, now)
            case FrameEnded(frame):
                self._quarantine.discard(frame)

    def _after_end(self, event: SendEvent) -> Iterator[SendAction]:
        match event:
            case Computed(hold=hold) | LayersComputed(hold=hold) | Finished(hold=hold):
                if hold is not None:
                    yield ReleaseHold(hold)
            case FrameEnded(frame):
                self._quarantine.discard(frame)
                yield from self._release()
            case _:
                self.dropped += 1

    @property
    def _all_sent(self) -> bool:
        return self._first_token is not None and self._next == self._shape.tokens

    def _enter(self, now: float) -> None:
        """Takes the state that credit and computation make, and its bound."""
        limits, finished = self._limits, self._first_token is not None
        if self._granted:
            self.state = State.TRANSFERRING if finished else State.PREFILLING
            self._deadline = now + (limits.transfer if finished else limits.prefill)
        else:
            self.state = State.EXPORTED if finished else State.ADMITTED
            self._deadline = now + limits.grant + limits.lease

    def _on_grant(self, grant: Grant, now: float) -> Iterator[SendAction]:
        fresh = grant.epoch > self._epoch
        more = self._granted and grant.epoch == self._epoch and grant.limit > self._limit
        whole = self._shape.whole
        if not (fresh or more):
            self.dropped += 1
        elif not (whole(grant.have) and whole(grant.limit) and grant.have <= grant.limit):
            message = f"grant of tokens {grant.have} to {grant.limit}, of {self._shape.tokens}"
            yield from self._end(State.FAILED, Code.PROTOCOL, message, tell=True)
        else:
            self._limit = grant.limit
            if fresh:
                self.have = grant.have if self.have is None else self.have
                self._epoch, self._granted = grant.epoch, True
                self._next = self._base = grant.have
                self._index = self._layer = 0
                self._enter(now)
            yield from self._send()

    def _on_link_lost(self, epoch: int, now: float) -> Iterator[SendAction]:
        if epoch < self._epoch or (epoch == self._epoch and not self._granted):
            self.dropped += 1
            return
        self._epoch, self._granted = epoch, False
        self._losses += 1
        if self._losses > MAX_LINK_LOSSES:
            yield from self._end(State.FAILED, Code.LINK, f"{self._losses} links lost", tell=True)
        else:
            self._enter(now)

    def _send(self) -> Iterator[SendAction]:
        """Frames for what is computed and granted; Finish after the last one."""
        shape = self._shape
        if not self._granted:
            return
        computed = self._computed
        if computed < shape.tokens:
            computed -= computed % shape.block_size
        end = min(computed, self._limit)
        if not self._layer and self._next < end:
            yield from self._frames(end, 0, shape.layers)
            self._next = end
        if self._layer < self._layers and self._next < shape.tokens == self._limit:
            yield from self._frames(shape.tokens, self._layer, self._layers)
            self._layer = self._layers
            if self._layer == shape.layers:
                self._next = shape.tokens
        if self._all_sent and self._first_token is not None and self._finish_epoch < self._epoch:
            self._finish_epoch = self._epoch
            nbytes = (shape.tokens - self._base) * shape.token_bytes
            yield SendFinish(Finish(*self.key, self._epoch, self._first_token, self._index, nbytes))

    def _frames(self, end: int, layer: int, end_layer: int) -> Iterator[SendAction]:
        """From the next token up to `end`, in layers [layer, end_layer)."""
        shape, layers = self._shape, end_layer - layer
        most = shape.frame_tokens * shape.layers // layers
        most -= most % shape.block_size
        for first in range(self._next, end, most):
            tokens = min(most, end - first)
            nbytes = shape.bytes_of(tokens, layers)
            frame = Frame(self._epoch, self._index, first, tokens, nbytes, layer, layers)
            self._index += 1
            self._quarantine.add(frame)
            yield SendFrame(frame)

    def _end(self, state: State, code: Code, message: str, tell: bool = False) -> Iterator[SendAction]:
        self.state = state
        if tell:
            yield Tell(Abort(*self.key, code, clip(message)))
        if state is State.FAILED:
            yield Failed(code, message)
        yield from self._let_go()

    def _let_go(self) -> Iterator[SendAction]:
        if self._quarantine:
            yield StopFrames(tuple(self._quarantine))
        yield from self._release()

    def _release(self) -> Iterator[SendAction]:
        if not self._quarantine:
            holds, self._holds = self._holds, []
            yield from map(ReleaseHold, holds)
