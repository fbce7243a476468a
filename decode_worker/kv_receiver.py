"""The decode worker's end of every hand-off: reserves blocks, takes frames in, commits.

queue                producer                              consumer
expect, cancel       the worker, on the event loop         the attempt's `ReceiveAttempt` machine, at once
messages             control streams' readers              machines, on the event loop
outbox (per stream)  machines                              the stream's writer
jobs (per link)      machines' ReceiveFrame                the link's thread
ended frames         links' threads                        machines, on the event loop
room                 offers that were told to wait         `blocks_freed`, first come first served
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from kvrelay.decode_worker.incoming_stream import IncomingStream, read_hello
from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.internal.v1.handoff_pb2 import ControlRequest, ControlResponse
from kvrelay.internal.v1.handoff_pb2_grpc import HandoffServiceServicer
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.control import LocalWorker, TransferStats, every, post, renewals, tick_seconds, timeouts_of
from kvrelay.transfer.events import (
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
    ReceiveEvent,
    ReceiveFrame,
    ReleaseHold,
    Renewed,
    Reserve,
    Reserved,
    StopFrames,
    Tell,
)
from kvrelay.transfer.frames import (
    CHECKSUM_BYTES,
    BlockClaim,
    ChecksumKind,
    DrainJob,
    FrameBuffer,
    KVBytes,
    PoolFrame,
    ReceiveJob,
    tokens_digest,
)
from kvrelay.transfer.hosts import ImportHost
from kvrelay.transfer.links import LinkEnd, LinkManager, LinkSpec
from kvrelay.transfer.messages import (
    Abort,
    CloseLink,
    Code,
    Dial,
    Finish,
    Key,
    Meet,
    Message,
    Nack,
    Offer,
    Push,
    Refuse,
    Renew,
    encode,
)
from kvrelay.transfer.packing import WireError, clip
from kvrelay.transfer.peers import MEET_SECONDS, PeerTable
from kvrelay.transfer.protocol import ReceiveAttempt
from kvrelay.transfer.relayout import ConvertedFrame
from kvrelay.transfer.transports.base import RECEIVER, Transport

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 8192

now = time.monotonic


@dataclass(slots=True, eq=False)
class _Attempt:
    machine: ReceiveAttempt
    peer: str
    """Incarnation of the sender."""
    stream: IncomingStream | None = None
    announced: tuple[int, bytes] | None = None
    """Tokens that the router announced, and their digest."""
    shape: Manifest | None = None
    """Known as soon as the sender's layout is, too."""
    table: list[int] = field(default_factory=list)
    keep: int = 0
    """Tokens whose KV is here already, perhaps in blocks that others share."""
    have: int = 0
    """Tokens that need not be sent: `keep`, or what of it the sender's blocks allow."""
    guards: dict[Frame, BlockClaim] = field(default_factory=dict)
    ended: tuple[Code, str] = (Code.CANCELLED, "over on the decode worker")
    granted_at: float | None = None
    finish_at: float | None = None


class KVReceiver(HandoffServiceServicer):
    """Takes over the KV of prompts that prefill workers computed. Used on one event loop only."""

    def __init__(
        self,
        local: LocalWorker,
        pool: KVBytes,
        peers: PeerTable,
        config: TransferConfig,
        transports: Mapping[str, Transport],
        host: ImportHost[Any],
    ) -> None:
        """`transports` are those that this worker can do, best first; `host` gets back the reservations it made."""
        self._local = local
        self._pool = pool
        self._peers = peers
        self._config = config
        self._transports = transports
        self._host = host
        self.dropped = 0
        """Messages of other attempts or epochs, so far."""
        self._limits = timeouts_of(config)
        self._attempts: dict[Key, _Attempt] = {}
        self._ended: OrderedDict[Key, tuple[Code, str]] = OrderedDict()
        self._room = ReservationQueue()
        self._streams: dict[str, IncomingStream] = {}
        self._epochs: dict[str, int] = {}
        self._links = LinkManager(config.max_links)
        self._reserving: set[asyncio.Task[None]] = set()
        self._renewed = 0.0

    # The worker's side: all on the event loop.

    def start(self) -> None:
        """Begins to watch deadlines."""
        self._loop = asyncio.get_running_loop()
        self._ticker = asyncio.create_task(every(tick_seconds(self._config), self._tick), name="importer's clock")

    def expect(self, key: Key, peer: tuple[str, str], tokens: Sequence[int]) -> None:
        """The router announced that `peer` (name, incarnation) will hand over the KV of `tokens`.

        From here on exactly one of `imported`, `import_failed` follows, unless `cancel` comes first.
        """
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.announced is not None:
            raise RuntimeError(f"hand-off {key} was announced twice")
        if self._peers.get(*peer) is None:
            reason = Code.UNKNOWN_PEER, f"{peer[0]} {peer[1]} is not a member"
            self._loop.call_soon(self._host.import_failed, key, *reason)
            return
        if attempt is not None and attempt.peer != peer[1]:
            self._feed(attempt, PeerLost(Code.MANIFEST, "another worker was announced as its sender"))
        if key in self._ended:
            self._loop.call_soon(self._host.import_failed, key, *self._ended[key])
            return
        if attempt is None:
            attempt = self._attempts[key] = _Attempt(ReceiveAttempt(key, self._limits, now()), peer[1])
        attempt.announced = len(tokens), tokens_digest(tokens)
        self._shape(attempt)

    def cancel(self, key: Key) -> None:
        """Ends a hand-off and tells the prefill worker; nothing more is reported of it. Unknown keys are fine."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._feed(attempt, Cancel())
        else:
            self._remember(key, (Code.CANCELLED, "cancelled on the decode worker"))

    def blocks_freed(self) -> None:
        """Blocks may be free now: asks again for the offer that has waited for longest."""
        first = self._room.first
        if first is not None:
            self._feed(self._attempts[first], BlocksFreed())

    def peers_changed(self) -> None:
        """The membership changed: ends what is under way with workers that are no longer members."""
        members = {peer.incarnation for peer in self._peers}
        for stream in list(self._streams.values()):
            if stream.peer.incarnation not in members:
                stream.end(Code.UNKNOWN_PEER, f"{stream.peer.name} is no longer a member")
        self._epochs = {peer: epoch for peer, epoch in self._epochs.items() if peer in members or peer in self._streams}
        for attempt in list(self._attempts.values()):
            if attempt.peer not in members:
                self._feed(attempt, PeerLost(Code.UNKNOWN_PEER, "the prefill worker is no longer a member"))

    @property
    def active(self) -> int:
        """Attempts that hold something here, or may yet."""
        return len(self._attempts)

    async def close(self) -> None:
        """Ends all hand-offs, streams and links."""
        self._ticker.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticker
        message = f"{self._local.name} is shutting down"
        for attempt in list(self._attempts.values()):
            self._feed(attempt, PeerLost(Code.CLOSED, message))
        for stream in list(self._streams.values()):
            stream.end(Code.CLOSED, message)
        if self._reserving:
            await asyncio.wait(self._reserving)
        await self._links.shut_down(2 * self._config.frame_timeout_seconds + 1.0)

    # Machines.

    def _feed(self, attempt: _Attempt, event: ReceiveEvent) -> None:
        self._apply(attempt, attempt.machine.on(event, now()))

    def _apply(self, attempt: _Attempt, actions: Sequence[ReceiveAction]) -> None:
        key = attempt.machine.key
        for action in actions:
            match action:
                case Tell(message):
                    if attempt.stream is not None:
                        attempt.stream.outbox.put(message)
                case Reserve():
                    self._reserve(attempt)
                case ReceiveFrame(frame):
                    self._receive(attempt, frame)
                case StopFrames(frames):
                    for frame in frames:
                        if attempt.guards[frame].close():
                            self._feed(attempt, FrameEnded(frame, Outcome.LOST))
                case ReleaseHold(reservation):
                    self._host.release(reservation)
                case Commit(reservation, first_token):
                    self._host.imported(key, reservation, first_token, self._stats(attempt))
                case Failed(code, message):
                    attempt.ended = code, clip(message)
                    if attempt.announced is not None:
                        self._host.import_failed(key, code, message)
        if attempt.machine.state.over:
            self._forget(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        key = attempt.machine.key
        if self._room.leave(key):
            self.blocks_freed()
        if attempt.machine.over and self._attempts.get(key) is attempt:
            del self._attempts[key]
            self.dropped += attempt.machine.dropped
            self._remember(key, attempt.ended)

    def _remember(self, key: Key, reason: tuple[Code, str]) -> None:
        """Keeps in mind that the attempt is over, so that an offer that comes late is refused at once."""
        self._ended[key] = reason
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _shape(self, attempt: _Attempt) -> None:
        """Tells the machine what is expected, once that and the layout in which it will come are known."""
        stream = attempt.stream or self._streams.get(attempt.peer)
        if attempt.announced is not None and attempt.shape is None and stream is not None:
            theirs = stream.layout
            size = theirs.block_size
            attempt.shape = Manifest(*attempt.announced, theirs.token_bytes, size, size, theirs.layers)
            self._feed(attempt, Expected(attempt.shape))

    def _place(self, attempt: _Attempt, frame: Frame) -> FrameBuffer:
        theirs = self._local.layout if attempt.stream is None else attempt.stream.layout
        if self._local.layout.conversion(theirs) is None:
            return PoolFrame(self._pool, attempt.table, frame)
        return ConvertedFrame(self._pool, theirs, attempt.table, frame, attempt.keep)

    def _seal(self, stream: IncomingStream | None) -> ChecksumKind:
        return ChecksumKind.of(self._config.checksum, self._local.gpu and stream is not None and stream.gpu)

    def _receive(self, attempt: _Attempt, frame: Frame) -> None:
        guard = attempt.guards[frame] = BlockClaim()
        job = ReceiveJob(
            attempt.machine.key,
            frame,
            guard,
            self._place(attempt, frame),
            self._seal(attempt.stream),
            partial(post, self._loop, self._on_frame_ended, attempt, frame),
        )
        self._links.submit(attempt.peer, frame.epoch, job)

    def _on_frame_ended(self, attempt: _Attempt, frame: Frame, outcome: Outcome) -> None:
        if outcome is Outcome.CORRUPT and self._links.epoch(attempt.peer) == frame.epoch:
            # The bytes may have been another frame's; then every later frame would be taken for the one before it.
            self._links.close(attempt.peer, "a frame failed its checksum")
        self._feed(attempt, FrameEnded(frame, outcome))

    def _stats(self, attempt: _Attempt) -> TransferStats:
        end = now()
        shape = attempt.shape
        return TransferStats(
            transfer_seconds=end - (attempt.granted_at or end),
            handoff_seconds=end - (attempt.finish_at or end),
            nbytes=0 if shape is None else (shape.tokens - attempt.have) * shape.token_bytes,
        )

    def _tick(self) -> None:
        at = now()
        for attempt in list(self._attempts.values()):
            self._apply(attempt, attempt.machine.poll(at))
        if at - self._renewed >= self._limits.lease / 4:
            self._renewed = at
            for stream in self._streams.values():
                keys = [attempt.machine.key for attempt in self._on(stream) if not attempt.machine.state.over]
                stream.outbox.put(*renewals(keys))

    def _on(self, stream: IncomingStream) -> list[_Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.stream is stream]

    # Room.

    def _reserve(self, attempt: _Attempt) -> None:
        key = attempt.machine.key
        if self._room.must_wait(key):
            self._feed(attempt, Reserved(None))
            return
        task = asyncio.create_task(self._ask_host(attempt), name=f"reserve {key[0]}/{key[1]}")
        self._reserving.add(task)
        task.add_done_callback(self._reserving.discard)

    async def _ask_host(self, attempt: _Attempt) -> None:
        key = attempt.machine.key
        try:
            reservation = await self._host.reserve(key)
        except Exception as error:
            logger.exception("reserving failed", extra={"request": key[0], "attempt": key[1]})
            self._feed(attempt, PeerLost(Code.INTERNAL, f"reserving blocks: {type(error).__name__}"))
            self._feed(attempt, Reserved(None))
            return
        if reservation is None:
            if not attempt.machine.state.over:
                self._room.wait(key)
            self._feed(attempt, Reserved(None))
            return
        attempt.table = list(reservation.hold.blocks)
        attempt.keep = attempt.have = reservation.have_tokens
        if attempt.shape is not None and not attempt.shape.whole(attempt.have):
            attempt.have -= attempt.have % attempt.shape.block_size
        attempt.granted_at = now()
        self._feed(attempt, Reserved(reservation, attempt.have))
        if self._room.leave(key):
            self.blocks_freed()

    # Streams.

    async def Control(
        self,
        request_iterator: AsyncIterator[ControlRequest],
        context: "grpc.aio.ServicerContext[ControlRequest, ControlResponse]",
    ) -> None:
        try:
            hello, messages = await read_hello(request_iterator)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        peer = await self._peers.met(hello.worker, hello.incarnation, MEET_SECONDS)
        refusal = self._local.objection(hello, self._config)
        if peer is None:
            refusal = Code.UNKNOWN_PEER, f"{hello.worker} {hello.incarnation} is not a member"
        if refusal is not None:
            await context.write(ControlResponse(frame=encode([Refuse(refusal[0], clip(refusal[1]))])))
        if peer is None or refusal is not None:
            return
        conversion = self._local.layout.conversion(hello.layout)
        if conversion is not None:
            logger.warning("KV is converted on arrival", extra={"peer": peer.name, "differing": conversion})
        stream = IncomingStream(peer, hello)
        older = self._streams.get(peer.incarnation)
        if older is not None:
            self._on_stream_end(older, Code.CLOSED, f"{peer.name} opened another control stream")
        self._streams[peer.incarnation] = stream
        stream.outbox.put(self._local.hello(peer.incarnation, self._config))
        for message in messages:
            self._on_message(stream, message)
        try:
            await stream.run(request_iterator, context, self._on_message)
        finally:
            self._on_stream_end(stream, *(stream.over or (Code.CLOSED, "")))

    def _on_stream_end(self, stream: IncomingStream, code: Code, message: str) -> None:
        stream.end(code, message)
        peer = stream.peer.incarnation
        if self._streams.get(peer) is not stream:
            return
        del self._streams[peer]
        self._links.close(peer, message)
        for attempt in self._on(stream):
            self._feed(attempt, PeerLost(code, message))

    def _on_message(self, stream: IncomingStream, message: Message) -> None:
        peer = stream.peer.incarnation
        match message:
            case Push():
                self._on_push(stream, message)
            case Finish() | Abort():
                attempt = self._find(stream, message.key)
                if attempt is not None:
                    attempt.finish_at = now()
                    self._feed(attempt, message)
            case Renew(keys):
                for attempt in filter(None, (self._attempts.get(key) for key in keys)):
                    if attempt.stream is stream:
                        self._feed(attempt, Renewed())
            case Offer():
                self._on_offer(stream, message)
            case Dial(epoch, transport):
                self._on_dial(stream, epoch, transport)
            case Meet(epoch, entry, value):
                self._links.meet(peer, epoch, entry, value)
            case CloseLink(epoch, reason):
                if self._links.epoch(peer) == epoch:
                    self._close_link(stream, f"closed by {stream.peer.name}: {reason}")
            case _:
                stream.end(Code.PROTOCOL, f"{type(message).__name__} is not for a sender to say here")

    def _find(self, stream: IncomingStream, key: Key) -> _Attempt | None:
        """The attempt that a message of this stream is about; None, and counted, if it has nothing to do with it."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.stream is not stream:
            self.dropped += 1
            return None
        return attempt

    def _on_offer(self, stream: IncomingStream, offer: Offer) -> None:
        key, peer = offer.key, stream.peer.incarnation
        attempt = self._attempts.get(key)
        if key in self._ended:
            stream.outbox.put(Nack(*key, *self._ended[key]))
        elif attempt is not None and attempt.peer != peer:
            stream.outbox.put(Nack(*key, Code.MANIFEST, "another worker was announced as its sender"))
        else:
            if attempt is None:
                attempt = self._attempts[key] = _Attempt(ReceiveAttempt(key, self._limits, now()), peer)
            attempt.stream = attempt.stream or stream
            self._shape(attempt)
            self._feed(attempt, offer)
            if stream.epoch:
                self._feed(attempt, LinkUp(stream.epoch))

    def _on_push(self, stream: IncomingStream, push: Push) -> None:
        if push.nbytes > stream.frame_bytes:
            stream.end(Code.PROTOCOL, f"frame of {push.nbytes} bytes; announced were up to {stream.frame_bytes}")
        if stream.over is not None or push.epoch != stream.epoch:
            self.dropped += 1
            return
        attempt = self._find(stream, push.key)
        actions = [] if attempt is None else attempt.machine.on(push, now())
        if not any(isinstance(action, ReceiveFrame) for action in actions):
            self._links.submit(stream.peer.incarnation, push.epoch, DrainJob(push.nbytes, self._seal(stream)))
        if attempt is not None:
            self._apply(attempt, actions)

    # Links.

    def _on_dial(self, stream: IncomingStream, epoch: int, name: str) -> None:
        peer = stream.peer
        transport = self._transports.get(name)
        if transport is None or epoch <= self._epochs.get(peer.incarnation, 0):
            stream.end(Code.PROTOCOL, f"dial of epoch {epoch} over {name!r}")
            return
        stream.epoch = self._epochs[peer.incarnation] = epoch

        def tell(entry: str, value: bytes) -> None:
            post(self._loop, stream.outbox.put, Meet(epoch, entry, value))

        spec = LinkSpec(
            peer=peer.incarnation,
            epoch=epoch,
            transport=transport,
            rank=RECEIVER,
            buffer_bytes=stream.frame_bytes + CHECKSUM_BYTES,
            timeout=self._config.frame_timeout_seconds,
            tell=tell,
            on_end=partial(self._on_link_end, stream),
            idle=lambda: not self._on(stream),
        )
        if not self._links.open(spec):
            full = f"all {self._config.max_links} links of {self._local.name} (transfer.max_links) are in use"
            stream.outbox.put(CloseLink(epoch, full))
            return
        for attempt in self._on(stream):
            self._feed(attempt, LinkUp(epoch))

    def _close_link(self, stream: IncomingStream, reason: str) -> None:
        """Ends the link. Frames that it takes into buffers of its own are over now; its thread may yet sit in a receive
        until the time of that is up (gloo notices no reset in the middle of a frame)."""
        epoch = self._links.epoch(stream.peer.incarnation)
        self._links.close(stream.peer.incarnation, reason)
        for attempt in self._on(stream):
            for frame, guard in list(attempt.guards.items()):
                if frame.epoch == epoch and guard.close():
                    self._feed(attempt, FrameEnded(frame, Outcome.LOST))

    def _on_link_end(self, stream: IncomingStream, end: LinkEnd) -> None:
        self._links.ended(stream.peer.incarnation, end.epoch)
        if stream.over is not None:
            return
        if end.up:
            for attempt in self._on(stream):
                if end.gives_up(attempt.machine.key):
                    self._feed(attempt, PeerLost(Code.LINK, clip(end.reason)))
        stream.outbox.put(CloseLink(end.epoch, clip(end.reason)))
