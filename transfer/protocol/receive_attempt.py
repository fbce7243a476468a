"""The decode worker's end of one attempt: the receiver's half of the table in `kvrelay.transfer.protocol.table`."""

from collections import Counter
from collections.abc import Iterator

from kvrelay.engine.kv.layout import LayerPart
from kvrelay.transfer.protocol.events import (
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
from kvrelay.transfer.protocol.messages import Abort, Ack, Code, Finish, Grant, Key, Nack, Offer, Push, ToAttempt, Wait
from kvrelay.transfer.protocol.packing import clip


class ReceiveAttempt:
    """State machine of the receiver of one attempt; performs no I/O."""

    def __init__(self, key: Key, timeouts: Timeouts, now: float) -> None:
        self.key = key
        self.state = State.ADMITTED
        self.dropped = 0
        self._timeouts = timeouts
        self._deadline = now + timeouts.prefill
        self._lease = float("inf")
        self._manifest: Manifest | None = None
        self._offer: Offer | None = None
        self._asked = self._ask_again = self._told_wait = False
        self._reservation: Hold | None = None
        self._quarantine: set[Frame] = set()
        self._epoch = 0
        self._granted_epoch = 0
        self._next: list[int] = []
        """Next token to be announced, of each track."""
        self._announced: Counter[int] = Counter()
        """Number of frames announced in this epoch, by link."""
        self._nbytes = 0
        """Bytes announced in this epoch."""
        self._begun: dict[int, Push] = {}
        """The frame announced last, by link, if it was one part of its tokens' KV and other parts follow."""
        self._verified: list[int] = []
        """Number of tokens whose KV is there, of each track."""
        self._verified_parts: list[int] = []
        """Number of parts that are there of the KV of the tokens that follow them, of each track."""
        # Hidden states are those of the tokens from `_states_from` on: verified up to `_states_verified`, announced up
        # to `_states_next`. Behind a gap they begin anew.
        self._states_from = self._states_verified = self._states_next = 0
        self._states_torn = False
        """Whether some hidden states of this epoch were lost."""
        self._finish: Finish | None = None

    @property
    def over(self) -> bool:
        """Whether the attempt has ended, holds nothing and waits for no reservation."""
        return self.state.over and self._reservation is None and not self._asked

    @property
    def deadline(self) -> float:
        """Monotonic time at which `poll` ends the attempt unless an event comes first; infinite after the end."""
        return float("inf") if self.state.over else min(self._deadline, self._lease)

    def poll(self, now: float) -> list[ReceiveAction]:
        """Ends the attempt if its deadline has passed."""
        if now < self.deadline:
            return []
        if self.state is State.WAITING and self._lease > now:
            return list(self._end(State.FAILED, Code.NO_CAPACITY, f"no free blocks within {self._timeouts.grant} s"))
        what = "no message from the sender" if self._lease <= now else f"still {self.state.value} at its deadline"
        return list(self._end(State.FAILED, Code.TIMEOUT, what))

    def on(self, event: ReceiveEvent, now: float) -> list[ReceiveAction]:
        """Actions for `event`; first those of a deadline that has passed, if any."""
        actions = self.poll(now)
        if isinstance(event, ToAttempt) and event.key != self.key:
            self.dropped += 1
        else:
            actions += self._after_end(event) if self.state.over else self._on(event, now)
        return actions

    def _on(self, event: ReceiveEvent, now: float) -> Iterator[ReceiveAction]:
        if self._offer is not None and isinstance(event, Push | Finish | Renewed):
            self._lease = now + self._timeouts.lease
        match event:
            case Expected(manifest) if self._manifest is None:
                self._manifest = manifest
                yield from self._admit(now)
            case Offer() if self._offer is None:
                self._offer = event
                self._lease = now + self._timeouts.lease
                self._deadline = now + self._timeouts.grant
                yield from self._admit(now)
            case Expected() | Offer():
                self.dropped += 1
            case Reserved():
                yield from self._on_reserved(event, now)
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
            case Cancel(code=code, message=message):
                yield from self._end(State.CANCELLED, code, message)

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
        manifest, offer = self._manifest, self._offer
        if self.state is not State.ADMITTED or manifest is None or offer is None:
            return
        if (offer.tokens, offer.digest) != (manifest.tokens, manifest.digest):
            message = f"tokens: {manifest.tokens} announced here, {offer.tokens} offered"
            if offer.tokens == manifest.tokens:
                message = "digest: the offered tokens are not those announced here"
            yield from self._end(State.FAILED, Code.MANIFEST, message)
            return
        self.state = State.WAITING
        self._deadline = now + self._timeouts.grant
        yield from self._ask()

    def _ask(self) -> Iterator[ReceiveAction]:
        self._ask_again = self._asked
        if not self._asked:
            self._asked = True
            yield Reserve()

    def _on_reserved(self, event: Reserved, now: float) -> Iterator[ReceiveAction]:
        self._asked = False
        if event.reservation is not None:
            self._reservation = event.reservation
            self._verified = list(event.have)
            self._states_from = self._states_verified = event.states
            self.state = State.TRANSFERRING
            self._deadline = now + self._timeouts.prefill
            yield from self._grant()
        elif self._ask_again:
            yield from self._ask()
        elif not self._told_wait:
            self._told_wait = True
            yield Tell(Wait(*self.key))

    def _grant(self) -> Iterator[ReceiveAction]:
        """Grants all that is missing: once per epoch, and not while a frame of an older epoch may be written."""
        if self.state is not State.TRANSFERRING or self._granted_epoch == self._epoch or self._quarantine:
            return
        self._granted_epoch = self._epoch
        self._next, self._states_next = list(self._verified), self._states_verified
        self._verified_parts = [0] * len(self._next)
        self._announced.clear()
        self._nbytes = 0
        self._begun.clear()
        self._states_torn = False
        self._finish = None
        yield Tell(Grant(*self.key, self._epoch, tuple(self._next), self._states_next))

    def _known_manifest(self) -> Manifest:
        if self._manifest is None:
            raise RuntimeError(f"hand-off {self.key} is {self.state.value} without a manifest")
        return self._manifest

    def _on_push(self, push: Push) -> Iterator[ReceiveAction]:
        if push.epoch != self._granted_epoch or push.epoch != self._epoch:
            self.dropped += 1
            return
        manifest, part = self._known_manifest(), LayerPart(push.part, push.parts)
        link = 0 if push.states or push.track >= len(manifest.tracks) else manifest.tracks[push.track].link
        index = self._announced[link]
        if push.index < index:
            self.dropped += 1
            return
        follows = self._states_follow if push.states else self._follows
        if push.index != index or not follows(push, manifest):
            after = self._next[push.track] if push.track < len(self._next) else "nothing"
            what = f"hidden states behind {self._states_next}" if push.states else f"{after}"
            message = (
                f"frame {push.index} of track {push.track}, tokens {push.first} to {push.first + push.tokens}, part"
                f" {part.number} of {part.of}, {push.nbytes} bytes, can't follow {what}"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        frame = Frame(push.epoch, push.index, push.first, push.tokens, push.nbytes, part, push.states, push.track)
        if push.states:
            if push.first > self._states_next:
                self._states_from = push.first
            self._states_next = push.first + push.tokens
        else:
            self._begun.pop(link, None)
            if part.number + 1 < part.of:
                self._begun[link] = push
            else:
                self._next[push.track] += push.tokens
        self._announced[link] += 1
        self._nbytes += push.nbytes
        self._quarantine.add(frame)
        yield ReceiveFrame(frame)

    def _states_follow(self, push: Push, manifest: Manifest) -> bool:
        """Whether the hidden states begin where those before them end, or behind that, and have the right size."""
        in_place = self._states_next <= push.first < push.first + push.tokens <= manifest.tokens
        whole = push.parts == 1 and push.nbytes == push.tokens * manifest.state_bytes
        return manifest.state_bytes > 0 and 0 not in self._begun and in_place and whole

    def _follows(self, push: Push, manifest: Manifest) -> bool:
        """Whether the frame is the next one: in place, whole, and of as many bytes as its tokens have in its layers."""
        if push.track >= len(manifest.tracks):
            return False
        track = manifest.tracks[push.track]
        before, part = self._begun.get(track.link), LayerPart(push.part, push.parts)
        if before is None:
            in_order = push.part == 0 and push.parts <= track.layers
        else:
            known = before.track, before.part + 1, before.parts, before.tokens
            in_order = (push.track, push.part, push.parts, push.tokens) == known
        in_place = push.first == self._next[push.track]
        whole = track.is_border(push.first + push.tokens)
        return in_order and in_place and whole and push.nbytes == track.nbytes(push.tokens, part)

    def _on_finish(self, finish: Finish, now: float) -> Iterator[ReceiveAction]:
        if finish.epoch != self._granted_epoch or finish.epoch != self._epoch or self._finish is not None:
            self.dropped += 1
            return
        manifest = self._known_manifest()
        frames = self._announced.total()
        counts = finish.nbytes == self._nbytes and finish.frames == frames
        ends = [track.tokens for track in manifest.tracks]
        if not counts or self._next != ends:
            message = (
                f"finish of {finish.nbytes} bytes in {finish.frames} frames; {self._nbytes} in {frames} were"
                f" announced, up to token {', '.join(map(str, self._next))} of {', '.join(map(str, ends))}"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        self._finish = finish
        self._deadline = min(self._deadline, now + self._timeouts.transfer)
        yield from self._commit()

    def _on_frame_ended(self, frame: Frame, outcome: Outcome) -> Iterator[ReceiveAction]:
        self._quarantine.discard(frame)
        if outcome is Outcome.CORRUPT:
            message = f"frame {frame.index} of tokens {frame.first} to {frame.first + frame.tokens} failed its checksum"
            yield from self._end(State.FAILED, Code.CORRUPT, message)
            return
        track = frame.track
        if frame.states:
            self._states_torn |= outcome is not Outcome.VERIFIED or frame.epoch != self._granted_epoch
            if not self._states_torn:
                self._states_verified = frame.first + frame.tokens
        elif outcome is Outcome.VERIFIED and (frame.epoch, frame.first, frame.part.number) == (
            self._granted_epoch,
            self._verified[track],
            self._verified_parts[track],
        ):
            self._verified_parts[track] += 1
            if self._verified_parts[track] == frame.part.of:
                self._verified[track], self._verified_parts[track] = self._verified[track] + frame.tokens, 0
        yield from self._grant()
        yield from self._commit()

    def _commit(self) -> Iterator[ReceiveAction]:
        finish, manifest = self._finish, self._known_manifest()
        tokens = manifest.tokens
        complete = self._verified == [track.tokens for track in manifest.tracks]
        if finish is None or self._quarantine or not complete or self._states_verified != self._states_next:
            return
        self.state = State.COMMITTED
        reservation, self._reservation = self._reservation, None
        # Hidden states that don't reach the prompt's end are of no use.
        reach = self._states_from < self._states_next == tokens
        yield Commit(reservation, finish.first_token, self._states_from if reach else None)
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
