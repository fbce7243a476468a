"""Who owns the KV of one request attempt, at every moment of its hand-off: two state machines without I/O.

    ADMITTED -> PREFILLING -> EXPORTED(lease) -> TRANSFERRING -> COMMITTED -> (DECODING -> DONE) | FAILED | CANCELLED

The road above is walked together: `Sender` on the prefill worker owns the holds on the computed blocks, `Receiver` on
the decode worker owns the reservation, until COMMITTED. From then on the receiver's engine owns the KV (DECODING and
DONE are its `Sequence`'s) and the sender's blocks are released. A machine is told events and answers actions; it never
waits, reads no clock and starts nothing, so any interleaving can be replayed.

Sender                        | event                     -> state          actions
------------------------------|----------------------------------------------------------------------------------------
ADMITTED      offered,        | Computed(hold)            -> same           (keeps the hold)
              no credit       | Grant                     -> PREFILLING     SendFrame for what is computed
                              | Finished(hold)            -> EXPORTED
PREFILLING    has credit,     | Computed(hold)            -> same           SendFrame
              prompt computes | Finished(hold)            -> TRANSFERRING   SendFrame..., Tell(Finish) after the last
                              | Grant, same epoch         -> same           more credit: SendFrame
                              | Grant, later epoch        -> same           frames start anew at what the receiver has
                              | LinkLost(epoch)           -> ADMITTED       (waits for a grant of the next epoch)
EXPORTED      computed,       | Grant                     -> TRANSFERRING   SendFrame..., Tell(Finish)
              no credit,      | Ack(the lost link's)      -> COMMITTED      as below: it was lost after the last frame
              under its lease |
TRANSFERRING  computed, has   | Ack(this epoch)           -> COMMITTED      Committed, StopFrames, ReleaseHold of all
              credit          | Grant, later epoch        -> same           frames start anew
                              | LinkLost(epoch)           -> EXPORTED
any of these                  | Wait, Renewed             -> same           (the lease is renewed)
                              | Nack, PeerLost            -> FAILED         Failed, StopFrames, ReleaseHold
                              | Cancel                    -> CANCELLED      Tell(Abort), StopFrames, ReleaseHold
                              | a deadline, lease end,    -> FAILED         Tell(Abort), Failed, StopFrames, ReleaseHold
                              |   the 4th LinkLost        |
COMMITTED, FAILED, CANCELLED  | Computed, Finished        -> same           ReleaseHold(that hold)

Receiver                      | event                     -> state          actions
------------------------------|----------------------------------------------------------------------------------------
ADMITTED      one of Expected | Expected, Offer: the      -> WAITING        Reserve
              and Offer came  |   second of the two
                              | ... and they differ       -> FAILED         Tell(Nack(MANIFEST)), Failed
WAITING       room is asked   | Reserved(None)            -> same           Tell(Wait), once
              for             | RoomChanged               -> same           Reserve
                              | Reserved(r)               -> TRANSFERRING   Tell(Grant)
TRANSFERRING  blocks reserved | Push, the next one        -> same           ReceiveFrame
                              | Push, seen before         -> same           (dropped)
                              | FrameEnded(VERIFIED)      -> same
                              | Finish                    -> same
                              | ... all verified, Finish  -> COMMITTED      Commit(r), Tell(Ack)
                              | FrameEnded(CORRUPT)       -> FAILED         Tell(Nack), Failed, StopFrames, Release(r)
                              | FrameEnded(LOST)          -> same           (waits for LinkUp of the next epoch)
                              | LinkUp(epoch)             -> same           Tell(Grant(epoch, have=verified)), after the
                              |                                             older epoch's last frame has ended
                              | Push or Finish that can't -> FAILED         Tell(Nack(PROTOCOL)), ...
                              |   be: a gap, odd lengths
any of these                  | Renewed                   -> same           (the lease is renewed)
                              | Abort, PeerLost           -> FAILED         Failed, StopFrames, Release(r)
                              | Cancel                    -> CANCELLED      Tell(Nack), StopFrames, Release(r)
                              | a deadline, lease end     -> FAILED         Tell(Nack), Failed, StopFrames, Release(r)
FAILED, CANCELLED             | Reserved(r)               -> same           Release(r)

Rules that hold everywhere:

* A message of another attempt or epoch changes nothing; it is counted in `dropped`. (Another incarnation's never gets
  here: a stream belongs to one incarnation of either end, and dies with it.)
* Every event is preceded by a look at the clock, so a process that was frozen past a deadline finds that out before it
  acts on what had queued up meanwhile.
* Blocks of a frame that the link may still be reading (sender) or writing (receiver) are in quarantine: after the end
  they are released only when FrameEnded has come for the last of those. The transport guarantees that it comes: every
  wait of a link has a timeout.
* Each hold is released exactly once, by ReleaseHold or Release, or given away exactly once, by Commit.

Bounds (`Limits`, in seconds): without a sign of life from the other end, `lease`; ADMITTED (offered) and WAITING,
`grant`, to which the sender adds one lease, so that the receiver's own answer comes first; PREFILLING, and a receiver
that expects an offer or receives an unfinished prompt, `prefill`; EXPORTED, `grant` plus one lease; TRANSFERRING after
Finish, `transfer`.
"""

from collections.abc import Iterator

from kvrelay.transfer.events import (
    Cancel,
    Commit,
    Committed,
    Computed,
    Expected,
    Failed,
    Finished,
    Frame,
    FrameEnded,
    Hold,
    Limits,
    LinkLost,
    LinkUp,
    Outcome,
    PeerLost,
    ReceiveFrame,
    ReceiverAction,
    ReceiverEvent,
    ReleaseHold,
    Renewed,
    Reserve,
    Reserved,
    RoomChanged,
    SenderAction,
    SenderEvent,
    SendFrame,
    Shape,
    State,
    StopFrames,
    Tell,
)
from kvrelay.transfer.packing import clip
from kvrelay.transfer.wire import Abort, Ack, Code, Finish, Grant, Key, Nack, Offer, Push, ToAttempt, Wait

MAX_LINK_LOSSES = 3
"""Links that one attempt may lose before it is given up."""


class Sender:
    """The prefill worker's end of one attempt."""

    def __init__(self, key: Key, shape: Shape, limits: Limits, now: float) -> None:
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
        self._computed = 0
        self._first_token: int | None = None
        self._epoch = 0
        self._granted = False
        self._limit = 0
        self._base = self._next = self._index = 0
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

    def poll(self, now: float) -> list[SenderAction]:
        """Ends the attempt if a deadline has passed."""
        if now < self.deadline:
            return []
        what = (
            "no sign of life from the receiver" if self._lease <= now else f"still {self.state.value} at its deadline"
        )
        return list(self._end(State.FAILED, Code.TIMEOUT, what, tell=True))

    def on(self, event: SenderEvent, now: float) -> list[SenderAction]:
        """The actions that `event` asks for, after those of a deadline that has passed."""
        actions = self.poll(now)
        if isinstance(event, ToAttempt) and event.key != self.key:
            self.dropped += 1
        else:
            actions += self._after_end(event) if self.state.over else self._on(event, now)
        return actions

    def _on(self, event: SenderEvent, now: float) -> Iterator[SenderAction]:
        match event:
            case Computed(tokens, hold):
                self._holds.append(hold)
                self._computed = max(self._computed, tokens)
                yield from self._send()
            case Finished(first_token, hold):
                self._holds.append(hold)
                self._computed = self._shape.tokens
                self._first_token = first_token
                self._enter(now)
                yield from self._send()
            case Grant():
                self._lease = now + self._limits.lease
                yield from self._on_grant(event, now)
            case Wait() | Renewed():
                self._lease = now + self._limits.lease
            case Ack(epoch=epoch) if epoch == self._epoch == self._finish_epoch:
                self.state = State.COMMITTED
                yield Committed()
                yield from self._let_go()
            case Ack():
                self.dropped += 1
            case Nack(code=code, message=message) | PeerLost(code=code, message=message):
                yield from self._end(State.FAILED, code, message)
            case Cancel():
                yield from self._end(State.CANCELLED, Code.CANCELLED, "cancelled by the sender", tell=True)
            case LinkLost(epoch):
                yield from self._on_link_lost(epoch, now)
            case FrameEnded(frame):
                self._quarantine.discard(frame)

    def _after_end(self, event: SenderEvent) -> Iterator[SenderAction]:
        match event:
            case Computed(hold=hold) | Finished(hold=hold):
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

    def _on_grant(self, grant: Grant, now: float) -> Iterator[SenderAction]:
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
                self._index = 0
                self._enter(now)
            yield from self._send()

    def _on_link_lost(self, epoch: int, now: float) -> Iterator[SenderAction]:
        if epoch < self._epoch or (epoch == self._epoch and not self._granted):
            self.dropped += 1
            return
        self._epoch, self._granted = epoch, False
        self._losses += 1
        if self._losses > MAX_LINK_LOSSES:
            yield from self._end(State.FAILED, Code.LINK, f"{self._losses} links lost", tell=True)
        else:
            self._enter(now)

    def _send(self) -> Iterator[SenderAction]:
        """Frames for what is computed and granted; Finish after the last one."""
        shape = self._shape
        if not self._granted:
            return
        computed = self._computed
        if computed < shape.tokens:
            computed -= computed % shape.block_size
        end = min(computed, self._limit)
        while self._next < end:
            tokens = min(shape.frame_tokens, end - self._next)
            frame = Frame(self._epoch, self._index, self._next, tokens, tokens * shape.token_bytes)
            self._next += tokens
            self._index += 1
            self._quarantine.add(frame)
            yield SendFrame(frame)
        if self._all_sent and self._first_token is not None and self._finish_epoch < self._epoch:
            self._finish_epoch = self._epoch
            nbytes = (shape.tokens - self._base) * shape.token_bytes
            yield Tell(Finish(*self.key, self._epoch, self._first_token, self._index, nbytes))

    def _end(self, state: State, code: Code, message: str, tell: bool = False) -> Iterator[SenderAction]:
        self.state = state
        if tell:
            yield Tell(Abort(*self.key, code, clip(message)))
        if state is State.FAILED:
            yield Failed(code, message)
        yield from self._let_go()

    def _let_go(self) -> Iterator[SenderAction]:
        if self._quarantine:
            yield StopFrames(tuple(self._quarantine))
        yield from self._release()

    def _release(self) -> Iterator[SenderAction]:
        if not self._quarantine:
            holds, self._holds = self._holds, []
            yield from map(ReleaseHold, holds)


class Receiver:
    """The decode worker's end of one attempt."""

    def __init__(self, key: Key, limits: Limits, now: float) -> None:
        self.key = key
        self.state = State.ADMITTED
        self.dropped = 0
        self._limits = limits
        self._deadline = now + limits.prefill
        self._lease = float("inf")
        self._shape: Shape | None = None
        self._offer: Offer | None = None
        self._asked = self._ask_again = self._told_wait = False
        self._reservation: Hold | None = None
        self._quarantine: set[Frame] = set()
        self._epoch = 0
        self._granted_epoch = 0
        self._base = self._next = self._index = 0
        self._verified = self._frames = 0
        self._finish: Finish | None = None

    @property
    def over(self) -> bool:
        """Ended, with no reservation left here and none under way."""
        return self.state.over and self._reservation is None and not self._asked

    @property
    def deadline(self) -> float:
        """When `poll` will have something to say unless an event comes first; infinite once it ended."""
        return float("inf") if self.state.over else min(self._deadline, self._lease)

    def poll(self, now: float) -> list[ReceiverAction]:
        """Ends the attempt if a deadline has passed."""
        if now < self.deadline:
            return []
        if self.state is State.WAITING and self._lease > now:
            return list(self._end(State.FAILED, Code.NO_ROOM, f"no room within {self._limits.grant} s"))
        what = "no sign of life from the sender" if self._lease <= now else f"still {self.state.value} at its deadline"
        return list(self._end(State.FAILED, Code.TIMEOUT, what))

    def on(self, event: ReceiverEvent, now: float) -> list[ReceiverAction]:
        """The actions that `event` asks for, after those of a deadline that has passed."""
        actions = self.poll(now)
        if isinstance(event, ToAttempt) and event.key != self.key:
            self.dropped += 1
        else:
            actions += self._after_end(event) if self.state.over else self._on(event, now)
        return actions

    def _on(self, event: ReceiverEvent, now: float) -> Iterator[ReceiverAction]:
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
            case RoomChanged() if self.state is State.WAITING:
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
            case Abort(code=code, message=message) | PeerLost(code=code, message=message):
                yield from self._end(State.FAILED, code, message, tell=False)
            case Cancel():
                yield from self._end(State.CANCELLED, Code.CANCELLED, "cancelled by the receiver")

    def _after_end(self, event: ReceiverEvent) -> Iterator[ReceiverAction]:
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

    def _admit(self, now: float) -> Iterator[ReceiverAction]:
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

    def _ask(self) -> Iterator[ReceiverAction]:
        self._ask_again = self._asked
        if not self._asked:
            self._asked = True
            yield Reserve()

    def _on_reserved(self, reservation: Hold | None, have: int, now: float) -> Iterator[ReceiverAction]:
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

    def _grant(self) -> Iterator[ReceiverAction]:
        """Credit for all that is missing, once per epoch, and not while an older epoch's frame may still be written."""
        if self.state is not State.TRANSFERRING or self._granted_epoch == self._epoch or self._quarantine:
            return
        self._granted_epoch = self._epoch
        self._base = self._next = self._verified
        self._index = self._frames = 0
        self._finish = None
        yield Tell(Grant(*self.key, self._epoch, self._base, self._whole().tokens))

    def _whole(self) -> Shape:
        if self._shape is None:
            raise RuntimeError(f"hand-off {self.key} is {self.state.value} without a shape")
        return self._shape

    def _on_push(self, push: Push) -> Iterator[ReceiverAction]:
        if push.epoch != self._granted_epoch or push.epoch != self._epoch or push.index < self._index:
            self.dropped += 1
            return
        shape, end = self._whole(), push.first + push.tokens
        follows = push.index == self._index and push.first == self._next
        if not (follows and shape.whole(end) and push.nbytes == push.tokens * shape.token_bytes):
            message = (
                f"frame {push.index} of tokens {push.first} to {end}, {push.nbytes} bytes, can't follow {self._next}"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        frame = Frame(push.epoch, push.index, push.first, push.tokens, push.nbytes)
        self._next = end
        self._index += 1
        self._quarantine.add(frame)
        yield ReceiveFrame(frame, push.checksum)

    def _on_finish(self, finish: Finish, now: float) -> Iterator[ReceiverAction]:
        if finish.epoch != self._granted_epoch or finish.epoch != self._epoch or self._finish is not None:
            self.dropped += 1
            return
        shape = self._whole()
        if finish.nbytes != (shape.tokens - self._base) * shape.token_bytes or finish.frames < self._index:
            message = (
                f"finish of {finish.nbytes} bytes in {finish.frames} frames, for tokens {self._base} to {shape.tokens}"
            )
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        self._finish = finish
        self._deadline = min(self._deadline, now + self._limits.transfer)
        yield from self._commit()

    def _on_frame_ended(self, frame: Frame, outcome: Outcome) -> Iterator[ReceiverAction]:
        self._quarantine.discard(frame)
        if outcome is Outcome.CORRUPT:
            message = f"frame {frame.index} of tokens {frame.first} to {frame.first + frame.tokens} failed its checksum"
            yield from self._end(State.FAILED, Code.CORRUPT, message)
            return
        if outcome is Outcome.VERIFIED and frame.epoch == self._granted_epoch and frame.first == self._verified:
            self._verified += frame.tokens
            self._frames += 1
        yield from self._grant()
        yield from self._commit()

    def _commit(self) -> Iterator[ReceiverAction]:
        finish = self._finish
        if finish is None or self._quarantine or self._verified != self._whole().tokens:
            return
        if finish.frames != self._frames:
            message = f"finish of {finish.frames} frames; {self._frames} verified"
            yield from self._end(State.FAILED, Code.PROTOCOL, message)
            return
        self.state = State.COMMITTED
        reservation, self._reservation = self._reservation, None
        yield Commit(reservation, finish.first_token)
        yield Tell(Ack(*self.key, finish.epoch))

    def _end(self, state: State, code: Code, message: str, tell: bool = True) -> Iterator[ReceiverAction]:
        self.state = state
        if tell and self._offer is not None:
            yield Tell(Nack(*self.key, code, clip(message)))
        if state is State.FAILED:
            yield Failed(code, message)
        if self._quarantine:
            yield StopFrames(tuple(self._quarantine))
        yield from self._release()

    def _release(self) -> Iterator[ReceiverAction]:
        if self._reservation is not None and not self._quarantine:
            reservation, self._reservation = self._reservation, None
            yield ReleaseHold(reservation)
