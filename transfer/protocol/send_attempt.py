"""The prefill worker's end of one attempt: the sender's half of the table in `kvrelay.transfer.protocol.table`."""

from collections import Counter
from collections.abc import Iterator

from kvrelay.engine.kv.layout import ALL_LAYERS, LayerPart
from kvrelay.transfer.protocol.events import (
    Cancel,
    Committed,
    Computed,
    Failed,
    Finished,
    Frame,
    FrameEnded,
    Hold,
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
from kvrelay.transfer.protocol.messages import Abort, Ack, Code, Finish, Grant, Key, Nack, Offer, ToAttempt, Wait
from kvrelay.transfer.protocol.packing import clip

MAX_LINK_LOSSES = 3
"""Number of links that one attempt may lose before it fails."""


class SendAttempt:
    """State machine of the sender of one attempt; performs no I/O."""

    def __init__(self, key: Key, manifest: Manifest, timeouts: Timeouts, now: float) -> None:
        self.key = key
        self.state = State.ADMITTED
        self.dropped = 0
        self.have: tuple[int, ...] | None = None
        """Tokens of each track that the receiver had before the first frame; None before its first grant."""
        self.manifest = manifest
        """Manifest of the attempt, whose tracks may be replaced until the first grant: they depend on the receiver's
        layout."""
        self.states = 0, 0
        """Bounds of the tokens whose hidden states the owner has: the first one, and the one behind the last. May be
        replaced."""
        self._timeouts = timeouts
        self._deadline = now + timeouts.grant + timeouts.lease
        self._lease = now + timeouts.lease
        self._holds: list[Hold] = []
        self._quarantine: set[Frame] = set()
        self._computed = 0
        self._first_token: int | None = None
        self._epoch = 0
        self._granted = False
        # Tokens: the next ones to send, of each track's KV and of hidden states.
        self._next: list[int] = []
        self._next_states = 0
        self._sent: Counter[int] = Counter()
        """Number of frames that were sent in this epoch, by link."""
        self._nbytes = 0
        """Bytes announced in this epoch."""
        self._finish_epoch = 0
        self._losses = 0

    @property
    def offer(self) -> Offer:
        """The first message to the receiver."""
        return Offer(*self.key, self.manifest.tokens, self.manifest.digest)

    @property
    def over(self) -> bool:
        """Whether the attempt has ended and holds nothing."""
        return self.state.over and not self._holds

    @property
    def deadline(self) -> float:
        """Monotonic time at which `poll` ends the attempt unless an event comes first; infinite after the end."""
        return float("inf") if self.state.over else min(self._deadline, self._lease)

    def poll(self, now: float) -> list[SendAction]:
        """Ends the attempt if its deadline has passed."""
        if now < self.deadline:
            return []
        what = "no message from the receiver" if self._lease <= now else f"still {self.state.value} at its deadline"
        return list(self._end(State.FAILED, Code.TIMEOUT, what, tell=True))

    def on(self, event: SendEvent, now: float) -> list[SendAction]:
        """Actions for `event`; first those of a deadline that has passed, if any."""
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
            case Finished(first_token, hold):
                self._holds.append(hold)
                self._computed = self.manifest.tokens
                self._first_token = first_token
                self._enter(now)
                yield from self._send()
            case Grant():
                self._lease = now + self._timeouts.lease
                yield from self._on_grant(event, now)
            case Wait() | Renewed():
                self._lease = now + self._timeouts.lease
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
            case Cancel(code=code, message=message):
                yield from self._end(State.CANCELLED, code, message, tell=True)
            case LinkLost(epoch):
                yield from self._on_link_lost(epoch, now)
            case FrameEnded(frame):
                self._quarantine.discard(frame)

    def _after_end(self, event: SendEvent) -> Iterator[SendAction]:
        match event:
            case Computed(hold=hold) | Finished(hold=hold):
                yield ReleaseHold(hold)
            case FrameEnded(frame):
                self._quarantine.discard(frame)
                yield from self._release()
            case _:
                self.dropped += 1

    def _enter(self, now: float) -> None:
        """Enters the state that follows from credit and computation, with its deadline."""
        timeouts, finished = self._timeouts, self._first_token is not None
        if self._granted:
            self.state = State.TRANSFERRING if finished else State.PREFILLING
            self._deadline = now + (timeouts.transfer if finished else timeouts.prefill)
        else:
            self.state = State.EXPORTED if finished else State.ADMITTED
            self._deadline = now + timeouts.grant + timeouts.lease

    def _on_grant(self, grant: Grant, now: float) -> Iterator[SendAction]:
        if grant.epoch <= self._epoch:
            self.dropped += 1
        elif not self._is_border(grant.have) or grant.states > self.manifest.tokens:
            have = ", ".join(map(str, grant.have))
            message = f"grant from tokens {have}, and {grant.states}, of {self.manifest.tokens}"
            yield from self._end(State.FAILED, Code.PROTOCOL, message, tell=True)
        else:
            self.have = grant.have if self.have is None else self.have
            self._epoch, self._granted = grant.epoch, True
            self._next = [
                max(first, track.first) for first, track in zip(grant.have, self.manifest.tracks, strict=True)
            ]
            self._next_states = grant.states if self.manifest.state_bytes else self.manifest.tokens
            self._sent.clear()
            self._nbytes = 0
            self._enter(now)
            yield from self._send()

    def _is_border(self, have: tuple[int, ...]) -> bool:
        """Whether frames of each track can begin at these tokens."""
        tracks = self.manifest.tracks
        pairs = zip(tracks, have, strict=False)
        return len(have) == len(tracks) and all(track.is_border(max(first, track.first)) for track, first in pairs)

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
        """Frames for what is computed and granted, and Finish after the last one."""
        manifest = self.manifest
        if not self._granted:
            return
        for number, track in enumerate(manifest.tracks):
            end = min(self._computed, track.tokens)
            if track.late:
                end = 0 if self._first_token is None else track.tokens
            if end < track.tokens:
                end -= end % track.block_size
            for first in range(self._next[number], end, track.frame_tokens):
                tokens = min(track.frame_tokens, end - first)
                for part in (LayerPart(index, track.parts) for index in range(track.parts)):
                    yield self._frame(first, tokens, track.nbytes(tokens, part), part, track=number)
            self._next[number] = max(self._next[number], end)
        known, end = self.states[0], min(self.states[1], self._computed)
        for first in range(max(self._next_states, known), end, manifest.state_tokens or 1):
            tokens = min(manifest.state_tokens, end - first)
            yield self._frame(first, tokens, tokens * manifest.state_bytes, states=True)
        self._next_states = max(self._next_states, end)
        if self._first_token is not None and self._finish_epoch < self._epoch:
            self._finish_epoch = self._epoch
            yield SendFinish(Finish(*self.key, self._epoch, self._first_token, self._sent.total(), self._nbytes))

    def _frame(
        self,
        first: int,
        tokens: int,
        nbytes: int,
        part: LayerPart = ALL_LAYERS,
        *,
        states: bool = False,
        track: int = 0,
    ) -> SendFrame:
        link = 0 if states else self.manifest.tracks[track].link
        frame = Frame(self._epoch, self._sent[link], first, tokens, nbytes, part, states, track)
        self._sent[link] += 1
        self._nbytes += nbytes
        self._quarantine.add(frame)
        return SendFrame(frame)

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
