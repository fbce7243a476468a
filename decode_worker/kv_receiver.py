"""The decode worker's end of all hand-offs: reserves blocks, receives frames into them, commits.

queue                producer                              consumer
expect, cancel       the worker, on the event loop         the attempt's `ReceiveAttempt` machine, at once
messages             control streams' readers              machines, on the event loop
outbox (per pair)    machines                              the stream's writer
jobs (per link)      machines' ReceiveFrame                the link's thread
ended frames         links' threads                        machines, on the event loop
reservations         offers that found no free blocks      `blocks_freed`, the most urgent first
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.request import Urgency
from kvrelay.engine.states import StatesLayout
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.protocol.endpoint import Endpoint, EndpointContext, Pair, Transfer, TransferStats
from kvrelay.transfer.protocol.events import (
    BlocksFreed,
    Cancel,
    Commit,
    Expected,
    Failed,
    Frame,
    FrameEnded,
    LinkUp,
    Manifest,
    Outcome,
    PeerLost,
    ReceiveAction,
    ReceiveFrame,
    ReleaseHold,
    Reserve,
    Reserved,
    StopFrames,
    Tell,
    tokens_digest,
)
from kvrelay.transfer.protocol.handshake import tracks_of
from kvrelay.transfer.protocol.messages import (
    Abort,
    CloseLink,
    Code,
    Dial,
    Finish,
    Hello,
    Key,
    Message,
    Nack,
    Offer,
    Push,
)
from kvrelay.transfer.protocol.packing import clip
from kvrelay.transfer.protocol.ports import RECEIVER, ControlStream, FrameTask, LinkEnd, NoTransportError
from kvrelay.transfer.protocol.routes import Route
from kvrelay.transfer.protocol.table import ReceiveAttempt

logger = logging.getLogger(__name__)

NO_URGENCY = Urgency()
MAX_REMEMBERED = 8192
"""Ended attempts that are remembered, so that their late offers are refused at once."""


class ReceiverHost(Protocol):
    """The decode worker, as its `KVReceiver` calls it on the event loop."""

    def reserve(self, key: Key, answer: Callable[[Any], None], *, passing: bool) -> None:
        """Tries to reserve blocks for the attempt's tokens.

        Calls `answer` exactly once, later, on the event loop: with the scheduler's `Reservation`; with None if no
        blocks are free now; or with an exception if this worker serves no attempt any more.

        Args:
            passing: whether earlier offers wait for blocks. It gets some only if that delays none of them for long.
        """

    def waits(self, key: Key) -> None:
        """Notes that the attempt waits for free blocks. May be called again."""

    def release(self, reservation: Any) -> None:
        """Releases a reservation that the receiver gives up, on the thread that owns the block pool."""

    def imported(self, key: Key, reservation: Any, first_token: int, stats: TransferStats, states: Any) -> None:
        """Takes over the reservation, whose blocks have the KV of all tokens.

        Args:
            states: [n, layers, hidden] hidden states of the last n tokens, in memory of `ReceiveJobs.make_states`;
                None if none came.
        """

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        """Notes that the hand-off of an expected attempt failed."""


class ReceiveJobs(Protocol):
    """Makes the jobs that receive frames into this worker's KV pool; `PoolFrames` does."""

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> Any: ...

    def make_states(self, layout: StatesLayout, tokens: int) -> Any:
        """Host memory for the hidden states of so many tokens, whose slices are views."""

    def drain(self, nbytes: int, route: Route) -> Any:
        """Receives and discards a frame on the route's link."""


@dataclass(slots=True, eq=False, kw_only=True)
class Receiving(Transfer[ReceiveAttempt]):
    """One attempt of a peer to hand KV over to this worker."""

    sender: str
    """Incarnation of the sender."""
    announced: tuple[int, bytes] | None = None
    """Tokens that the router announced, and their digest."""
    manifest: Manifest | None = None
    """The sender's manifest; None until the sender's layout is known, too."""
    have: tuple[int, ...] = ()
    """The token of each layer group before which no KV has to come (`Reservation.have`)."""
    states: Any = None
    """Memory for the hidden states of the tokens from `states_from` on; None if none are wanted."""
    states_from: int = 0
    states_nbytes: int = 0
    """Size of the memory in `states`, in bytes."""
    urgency: Urgency = field(default_factory=Urgency)
    """Decides its turn among those that wait for blocks; known once it was announced."""
    ended: tuple[Code, str] = (Code.CANCELLED, "over on the decode worker")
    granted_at: float | None = None
    finish_at: float | None = None
    verified_nbytes: int = 0
    """Bytes of the frames that have verified."""
    exposed_nbytes: int = 0
    """Bytes that had yet to come at `finish_at`."""


class KVReceiver(Endpoint[Receiving]):
    """Takes over the KV of prompts that prefill workers computed. Runs on one event loop."""

    rank = RECEIVER

    def __init__(
        self,
        context: EndpointContext,
        frames: ReceiveJobs,
        host: ReceiverHost,
    ) -> None:
        super().__init__(context)
        self._frames = frames
        self._host = host
        self._ended: OrderedDict[Key, tuple[Code, str]] = OrderedDict()
        self._waiting = ReservationQueue()

    # For the worker.

    def expect(self, key: Key, sender: WorkerId, tokens: Sequence[int], urgency: Urgency = NO_URGENCY) -> None:
        """The router announced that `sender` will hand over the KV of `tokens`.

        Exactly one of `imported` and `import_failed` follows, unless `cancel` comes first.
        """
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.announced is not None:
            raise RuntimeError(f"hand-off {key} was announced twice")
        if self.peers.get(sender) is None:
            self.runtime.post(self._host.import_failed, key, Code.UNKNOWN_PEER, f"{sender} is not a member")
            return
        if transfer is not None and transfer.sender != sender.incarnation:
            self._feed(transfer, PeerLost(Code.MANIFEST, "the router announced another worker as the sender"))
        if key in self._ended:
            self.runtime.post(self._host.import_failed, key, *self._ended[key])
            return
        transfer = transfer or self._new(key, sender.incarnation, None)
        transfer.announced, transfer.urgency = (len(tokens), tokens_digest(tokens)), urgency
        if (manifest := self._manifest(transfer, transfer.pair or self._pairs.get(sender.incarnation))) is not None:
            self._feed(transfer, Expected(manifest))

    def cancel(self, key: Key, code: Code = Code.CANCELLED) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            self._remember(key, (code, self._reason(code)))
        elif not transfer.machine.state.over:
            transfer.ended = code, self._reason(code)
            super().cancel(key, code)

    def blocks_freed(self) -> None:
        """Asks again for blocks for the first waiting offer, since some may be free now."""
        first = self._waiting.first
        if first is not None:
            self._feed(self._transfers[first], BlocksFreed())

    def peers_changed(self) -> None:
        super().peers_changed()
        members = {peer.incarnation for peer in self.peers}
        for transfer in list(self._transfers.values()):
            if transfer.sender not in members:
                self._feed(transfer, PeerLost(Code.UNKNOWN_PEER, "the prefill worker is no longer a member"))

    def end_pairs(self, code: Code) -> None:
        for transfer in list(self._transfers.values()):
            self._feed(transfer, PeerLost(code, self._reason(code)))
        super().end_pairs(code)

    # Actions.

    def _new(self, key: Key, sender: str, pair: Pair | None) -> Receiving:
        machine = ReceiveAttempt(key, self.timeouts, self.runtime.now())
        transfer = self._transfers[key] = Receiving(machine=machine, pair=pair, sender=sender)
        return transfer

    def _manifest(self, transfer: Receiving, pair: Pair | None) -> Manifest | None:
        """Makes the attempt's manifest, once the router's announcement and the sender's layout are known."""
        if transfer.announced is None or transfer.manifest is not None or pair is None or pair.hello is None:
            return None
        wanted, (tokens, digest) = self.local.states, transfer.announced
        tracks = tracks_of(pair.hello.cache, pair.routes, tokens)
        state_bytes = 0 if wanted is None else wanted.token_bytes
        transfer.manifest = Manifest(tokens, digest, tracks, state_bytes=state_bytes)
        return transfer.manifest

    def _apply(self, transfer: Receiving, actions: Iterable[ReceiveAction]) -> None:
        key = transfer.key
        for action in actions:
            match action:
                case Tell(message):
                    if transfer.pair is not None:
                        transfer.pair.stream.put(message)
                case Reserve():
                    passing = self._waiting.passing(key, transfer.urgency)
                    self._host.reserve(key, partial(self._on_reserved, transfer, passing), passing=passing)
                case ReceiveFrame(frame):
                    self._receive(transfer, frame)
                case StopFrames(frames):
                    self._stop(transfer, frames)
                case ReleaseHold(reservation):
                    self._host.release(reservation)
                case Commit(reservation, first_token, states_from):
                    states = None if states_from is None else transfer.states[states_from - transfer.states_from :]
                    self._host.imported(key, reservation, first_token, self._stats(transfer, states), states)
                case Failed(code, message):
                    self.failures[code.value] += 1
                    transfer.ended = code, clip(message)
                    if transfer.announced is not None:
                        self._host.import_failed(key, code, message)
        if transfer.machine.state.over:
            if self._waiting.leave(key):
                self.blocks_freed()
            if transfer.machine.over and self._transfers.get(key) is transfer:
                self.states_room.give(transfer.states_nbytes)
                del self._transfers[key]
                self.dropped += transfer.machine.dropped
                self._remember(key, transfer.ended)

    def _remember(self, key: Key, reason: tuple[Code, str]) -> None:
        self._ended[key] = reason
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _receive(self, transfer: Receiving, frame: Frame) -> None:
        pair = self._met(transfer)
        route = pair.routes[frame.track]
        claim, on_end = self._claim(transfer, frame), partial(self.runtime.post, self._on_frame_ended, transfer, frame)
        if frame.states:
            first = frame.first - transfer.states_from
            target = transfer.states[first : first + frame.tokens]
        else:
            target = transfer.tables[route.group]
        # Frames begin at a border of the sender's blocks, which may be before this.
        keep = transfer.have[route.group]
        job = self._frames.receive(FrameTask(transfer.key, frame, claim, target, route), keep, on_end)
        self.links.submit(pair.incarnation, frame.epoch, route.ranks, job)

    def _met(self, transfer: Receiving) -> Pair:
        pair = transfer.pair
        if pair is None or pair.hello is None:
            raise RuntimeError(f"hand-off {transfer.key} receives a frame before its sender has said hello")
        return pair

    def _on_frame_ended(self, transfer: Receiving, frame: Frame, outcome: Outcome) -> None:
        self.corrupt += outcome is Outcome.CORRUPT
        transfer.verified_nbytes += frame.nbytes if outcome is Outcome.VERIFIED else 0
        if outcome is Outcome.CORRUPT and self.links.epoch(transfer.sender) == frame.epoch:
            # The bytes may have been another frame's. Then every later frame of this link would be mistaken, too.
            self.links.close(transfer.sender, "a frame failed its checksum")
        self._feed(transfer, FrameEnded(frame, outcome))

    def _stats(self, transfer: Receiving, states: Any) -> TransferStats:
        now, manifest = self.runtime.now(), transfer.manifest
        return TransferStats(
            transfer_seconds=now - (transfer.granted_at or now),
            handoff_seconds=now - (transfer.finish_at or now),
            nbytes=0 if manifest is None else manifest.nbytes(self._have(transfer, manifest)),
            state_nbytes=0 if states is None else states.nbytes,
            sender="" if transfer.pair is None else transfer.pair.stream.peer.name,
            exposed_nbytes=transfer.exposed_nbytes,
        )

    # Reservations.

    def _on_reserved(self, transfer: Receiving, passing: bool, answer: Any) -> None:
        key = transfer.key
        if isinstance(answer, Exception):
            self._feed(transfer, PeerLost(Code.CLOSED, f"reserving blocks: {answer}"))
            self._feed(transfer, Reserved(None))
        elif answer is None:
            if not transfer.machine.state.over:
                self._waiting.wait(key, transfer.urgency)
                self._host.waits(key)
            self._feed(transfer, Reserved(None))
            if passing and not self._waiting.passing(key, transfer.urgency):
                self.blocks_freed()  # those that it would have passed are gone
        else:
            transfer.tables = answer.hold.tables()
            transfer.have = answer.have
            transfer.granted_at = self.runtime.now()
            self._make_states(transfer)
            have = () if transfer.manifest is None else self._have(transfer, transfer.manifest)
            routes = transfer.pair.routes if have and transfer.pair is not None else ()
            first = {route.group: token for route, token in zip(routes, have, strict=True)}
            answer.comes_from([first.get(group, 0) for group in range(len(transfer.have))])
            self._feed(transfer, Reserved(answer, have, transfer.states_from))
            if self._waiting.leave(key):
                self.blocks_freed()

    def _have(self, transfer: Receiving, manifest: Manifest) -> tuple[int, ...]:
        """The token of each route before which nothing has to be sent: the prefix cache has it, or the window ends
        there."""
        found = []
        for route, track in zip(self._met(transfer).routes, manifest.tracks, strict=True):
            have = max(track.first, transfer.have[route.group])
            found.append(have if track.is_border(have) else have - have % track.block_size)
        return tuple(found)

    def _make_states(self, transfer: Receiving) -> None:
        """Takes memory for the hidden states that are wanted; none are, if it doesn't fit."""
        wanted, manifest = self.local.states, transfer.manifest
        if wanted is None or manifest is None or transfer.machine.state.over:
            return
        first = wanted.first_of(manifest.tokens)
        nbytes = (manifest.tokens - first) * wanted.token_bytes
        transfer.states_from = manifest.tokens
        if self.states_room.take(nbytes):
            transfer.states_from, transfer.states_nbytes = first, nbytes
            transfer.states = self._frames.make_states(wanted, manifest.tokens - first)

    # Control streams and links.

    def objection(self, hello: Hello) -> tuple[Code, str] | None:
        """Why no stream can be accepted from the worker that said `hello`; None if it can."""
        sender = WorkerId(hello.worker, hello.incarnation)
        if self.peers.get(sender) is None:
            return Code.UNKNOWN_PEER, f"{sender} is not a member"
        return self.local.objection(hello, self.config)

    def accept(self, stream: ControlStream, hello: Hello) -> None:
        """Takes a control stream of a peer to which there is no `objection`; an older one of that peer ends."""
        conversion = self.local.cache.conversion(hello.cache.sent_to(self.local.cache))
        if conversion is not None:
            logger.warning("KV is converted on arrival", extra={"peer": stream.peer.name, "differing": conversion})
        older = self._pairs.get(stream.peer.incarnation)
        if older is not None:
            message = f"{stream.peer.name} opened another control stream"
            older.stream.end(Code.CLOSED, message)
            self.stream_ended(older.stream, Code.CLOSED, message)
        routes = self._route(hello.cache.sent_to(self.local.cache), hello.degree, hello)
        self._pairs[stream.peer.incarnation] = Pair(stream, hello, routes=routes)
        stream.put(self.local.hello(stream.peer.id, self.config))

    def on_message(self, stream: ControlStream, message: Message) -> None:
        pair = self._pair_of(stream)
        if pair is None:
            return
        match message:
            case Push():
                self._on_push(pair, message)
            case Finish() | Abort():
                transfer = self._addressed(pair, message.key)
                if transfer is not None:
                    transfer.finish_at = self.runtime.now()
                    if isinstance(message, Finish):
                        transfer.exposed_nbytes = max(0, message.nbytes - transfer.verified_nbytes)
                    self._feed(transfer, message)
            case Offer(key=key):
                transfer = self._transfers.get(key)
                if key in self._ended:
                    stream.put(Nack(*key, *self._ended[key]))
                elif transfer is not None and transfer.sender != pair.incarnation:
                    stream.put(Nack(*key, Code.MANIFEST, "the router announced another worker as the sender"))
                else:
                    transfer = transfer or self._new(key, pair.incarnation, pair)
                    transfer.pair = transfer.pair or pair
                    if (manifest := self._manifest(transfer, transfer.pair)) is not None:
                        self._feed(transfer, Expected(manifest))
                    self._feed(transfer, message)
                    if pair.epoch:
                        self._feed(transfer, LinkUp(pair.epoch))
            case Dial(epoch, transport):
                self._on_dial(pair, epoch, transport)
            case _:
                super().on_message(stream, message)

    def _on_push(self, pair: Pair, push: Push) -> None:
        hello = pair.hello
        if hello is None or push.nbytes > hello.frame_bytes:
            pair.stream.end(Code.PROTOCOL, f"frame of {push.nbytes} bytes; the hello announced smaller ones")
        elif push.epoch != pair.epoch:
            self.dropped += 1
        else:
            transfer = self._addressed(pair, push.key)
            actions = [] if transfer is None else self._feed(transfer, push)
            if not any(isinstance(action, ReceiveFrame) for action in actions):
                # The sender sends what it has announced, so this end must receive it.
                route = pair.routes[push.track if push.track < len(pair.routes) else 0]
                job = self._frames.drain(push.nbytes, route)
                self.links.submit(pair.incarnation, push.epoch, route.ranks, job)

    def _on_dial(self, pair: Pair, epoch: int, transport: str) -> None:
        hello = pair.hello
        if hello is None or epoch <= self._epochs.get(pair.incarnation, 0):
            pair.stream.end(Code.PROTOCOL, f"dial of epoch {epoch} over {transport!r}")
            return
        try:
            refusal = self._open_link(pair, epoch, transport, hello.frame_bytes)
        except NoTransportError as error:
            pair.stream.end(Code.PROTOCOL, f"dial of epoch {epoch}: {error}")
            return
        if refusal is not None:
            pair.stream.put(CloseLink(epoch, refusal))
            return
        for transfer in self._of(pair):
            self._feed(transfer, LinkUp(epoch))

    def _close_link(self, pair: Pair, reason: str) -> None:
        """Ends the link, and with it the frames that it receives into its own buffers.

        The link's thread may stay in a receive until its timeout: gloo does not notice a reset inside a frame.
        """
        epoch = self.links.epoch(pair.incarnation)
        super()._close_link(pair, reason)
        for transfer in self._of(pair):
            self._stop(transfer, [frame for frame in transfer.claims if frame.epoch == epoch])

    def _on_link_end(self, pair: Pair, end: LinkEnd) -> None:
        self.links_ended += 1
        if self._pairs.get(pair.incarnation) is not pair:
            return
        reason = clip(end.reason)
        for transfer in self._of(pair):
            if end.worker_lost:
                self._feed(transfer, Cancel(Code.CLOSED, reason))  # the worker itself tells the router
            elif end.up and end.gives_up(transfer.key):
                self._feed(transfer, PeerLost(Code.LINK, reason))
        pair.stream.put(CloseLink(end.epoch, reason))
