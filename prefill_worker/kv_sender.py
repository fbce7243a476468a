"""The prefill worker's end of every hand-off: offers KV, and ships it while the rest of the prompt computes.

    queue                producer                              consumer
    begin, progress...   the worker, on the event loop         the attempt's `SendAttempt` machine, at once
    outbox (per stream)  machines, and links' threads          the stream's writer
    jobs (per link)      machines' SendFrame                   the link's thread
    ended frames         links' threads                        machines, on the event loop

One control stream and one link per receiving worker, made when they are first needed. A stream that ends fails what was
under way on it, and the next hand-off makes another; a link that ends is dialled again, under the next epoch, for as
long as something under way needs it.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvrelay.prefill_worker.outgoing_stream import OutgoingStream
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.control import LocalWorker, TransferStats, every, post, renewals, tick_seconds, timeouts_of
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
    StopFrames,
    Tell,
)
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.frames import (
    CHECKSUM_BYTES,
    BlockClaim,
    ChecksumKind,
    KVBytes,
    PoolFrame,
    SayJob,
    SendJob,
    tokens_digest,
)
from kvrelay.transfer.hosts import ExportHost
from kvrelay.transfer.links import LinkEnd, LinkManager, LinkSpec
from kvrelay.transfer.messages import (
    MAX_FRAME_BYTES,
    Ack,
    CloseLink,
    Code,
    Dial,
    Grant,
    Hello,
    Key,
    Meet,
    Message,
    Nack,
    Refuse,
    Renew,
    Wait,
    check_key,
)
from kvrelay.transfer.overlap import LinkCost
from kvrelay.transfer.packing import WireError, clip
from kvrelay.transfer.peers import PeerTable
from kvrelay.transfer.protocol import SendAttempt
from kvrelay.transfer.transports.base import SENDER, LinkError, Transport
from kvrelay.transfer.transports.registry import choose, entries

logger = logging.getLogger(__name__)

now = time.monotonic


@dataclass(slots=True, eq=False)
class _Attempt:
    machine: SendAttempt
    stream: OutgoingStream
    shape: Manifest
    table: list[int] = field(default_factory=list)
    """Blocks from the first token on, as far as holds on them were given."""
    guards: dict[Frame, BlockClaim] = field(default_factory=dict)
    late: tuple[int, SendJob] | None = None
    """Epoch and job of a frame that a failpoint has put behind the next one."""
    pushing_since: float | None = None
    finished_at: float | None = None


@dataclass(slots=True, eq=False)
class _PairCost:
    """What the frames to one worker take, however often its link is made anew."""

    frames: LinkCost = field(default_factory=LinkCost)
    ended_at: float = 0.0
    """When the last frame had left: the next one waited for that."""
    fit: tuple[float, float] | None = None


class KVSender:
    """Hands the KV of computed prompts over to decode workers. Used on one event loop only."""

    def __init__(
        self,
        local: LocalWorker,
        pool: KVBytes,
        peers: PeerTable,
        config: TransferConfig,
        transports: Mapping[str, Transport],
        host: ExportHost,
    ) -> None:
        """`transports` are those that this worker can do, best first.

        Raises:
            ValueError: one KV block is larger than a frame can be.
        """
        layout = local.layout
        if layout.block_bytes > MAX_FRAME_BYTES:
            raise ValueError(f"a KV block takes {layout.block_bytes} bytes; a frame takes up to {MAX_FRAME_BYTES}")
        self._local = local
        self._pool = pool
        self._peers = peers
        self._config = config
        self._transports = transports
        self._host = host
        self.dropped = 0
        """Messages of other attempts or epochs, so far."""
        self._limits = timeouts_of(config)
        self._frame_tokens = max(1, config.frame_bytes // layout.block_bytes) * layout.block_size
        self._attempts: dict[Key, _Attempt] = {}
        self._streams: dict[str, OutgoingStream] = {}
        self._epochs: dict[str, int] = {}
        self._links = LinkManager(config.max_links)
        self._renewed = 0.0
        self._costs: dict[str, _PairCost] = {}

    # The worker's side: all on the event loop.

    def start(self) -> None:
        """Begins to watch deadlines."""
        self._loop = asyncio.get_running_loop()
        self._ticker = asyncio.create_task(every(tick_seconds(self._config), self._tick), name="exporter's clock")

    def begin(self, key: Key, peer: tuple[str, str], tokens: Sequence[int]) -> None:
        """Offers the KV of `tokens`, yet to be computed, to `peer` (name, incarnation).

        From here on exactly one of `exported`, `export_failed` follows, unless `cancel` comes first.
        """
        if key in self._attempts:
            raise RuntimeError(f"hand-off {key} was begun twice")
        member = self._peers.get(*peer)
        try:
            check_key(key)
        except WireError as error:
            self._fail_soon(key, Code.PROTOCOL, str(error))
            return
        if member is None:
            self._fail_soon(key, Code.UNKNOWN_PEER, f"{peer[0]} {peer[1]} is not a member")
            return
        stream = self._streams.get(member.incarnation)
        if stream is None:
            stream = OutgoingStream(member, self._on_message, self._on_stream_end)
            stream.outbox.put(self._local.hello(member.incarnation, self._config))
            self._streams[member.incarnation] = stream
        if not self._links.epoch(member.incarnation):
            refusal = self._dial(stream)
            if refusal is not None:
                self._fail_soon(key, *refusal)
                return
        layout = self._local.layout
        shape = Manifest(
            len(tokens),
            tokens_digest(tokens),
            layout.token_bytes,
            layout.block_size,
            self._frame_tokens,
            layout.layers,
        )
        machine = SendAttempt(key, shape, self._limits, now())
        self._attempts[key] = _Attempt(machine, stream, shape)
        stream.outbox.put(machine.offer)

    def progress(self, key: Key, hold: Hold) -> None:
        """More of the prompt is computed: `hold` keeps the whole blocks that follow those given before.

        The hold is the exporter's from here on, whatever becomes of the hand-off.
        """
        attempt = self._attempts.get(key)
        if attempt is None:
            self._host.release(hold)
            return
        attempt.table.extend(hold.blocks)
        self._feed(attempt, Computed(len(attempt.table) * attempt.shape.block_size, hold))

    def layers_computed(self, key: Key, layers: int, hold: Hold | None) -> None:
        """The last chunk is under way, and computed in its first `layers` layers.

        `hold` comes with the first of these calls, and keeps the blocks that follow those given before, up to the
        prompt's end. It is the exporter's from here on, whatever becomes of the hand-off.
        """
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.table.extend(hold.blocks if hold is not None else ())
            self._feed(attempt, LayersComputed(layers, hold))
        elif hold is not None:
            self._host.release(hold)

    def frame_cost(self, key: Key) -> tuple[float, float] | None:
        """Seconds that a frame of this hand-off takes, and seconds a byte; None while they aren't known. Any thread."""
        attempt = self._attempts.get(key)
        cost = None if attempt is None else self._costs.get(attempt.stream.peer.incarnation)
        return None if cost is None else cost.fit

    def finished(self, key: Key, first_token: int, hold: Hold) -> None:
        """All of the prompt is computed, and `first_token` was sampled: `hold` keeps the whole block table.

        The hold is the exporter's from here on, whatever becomes of the hand-off.
        """
        attempt = self._attempts.get(key)
        if attempt is None:
            self._host.release(hold)
            return
        attempt.table = list(hold.blocks)
        attempt.finished_at = now()
        self._feed(attempt, Finished(first_token, hold))

    def cancel(self, key: Key) -> None:
        """Ends a hand-off and tells the decode worker; nothing more is reported of it. Unknown keys are fine."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._feed(attempt, Cancel())

    def peers_changed(self) -> None:
        """The membership changed: ends what is under way with workers that are no longer members."""
        for stream in list(self._streams.values()):
            if stream.peer not in self._peers:
                stream.end(Code.UNKNOWN_PEER, f"{stream.peer.name} is no longer a member")
        members = {peer.incarnation for peer in self._peers}
        self._epochs = {peer: epoch for peer, epoch in self._epochs.items() if peer in members or peer in self._streams}

    def epoch(self, incarnation: str) -> int:
        """Of the link to a worker; 0 where there is none now."""
        return self._links.epoch(incarnation)

    @property
    def active(self) -> int:
        """Attempts that hold something here, or may yet."""
        return len(self._attempts)

    async def close(self) -> None:
        """Ends all hand-offs, streams and links."""
        self._ticker.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticker
        streams = list(self._streams.values())
        for stream in streams:
            stream.end(Code.CLOSED, f"{self._local.name} is shutting down")
        for stream in streams:
            await stream.closed()
        await self._links.shut_down(2 * self._config.frame_timeout_seconds + 1.0)

    # Machines.

    def _fail_soon(self, key: Key, code: Code, message: str) -> None:
        self._loop.call_soon(self._host.export_failed, key, code, message)

    def _feed(self, attempt: _Attempt, event: SendEvent) -> None:
        self._apply(attempt, attempt.machine.on(event, now()))

    def _apply(self, attempt: _Attempt, actions: Sequence[SendAction]) -> None:
        key = attempt.machine.key
        for action in actions:
            match action:
                case Tell(message):
                    attempt.stream.outbox.put(message)
                case SendFrame(frame):
                    self._send(attempt, frame)
                case SendFinish(message):
                    late, attempt.late = attempt.late, None
                    self._queue(attempt, late)
                    say = partial(post, self._loop, attempt.stream.outbox.put, message)
                    self._links.submit(attempt.stream.peer.incarnation, message.epoch, SayJob(say))
                case StopFrames(frames):
                    for frame in frames:
                        if attempt.guards[frame].close():
                            self._feed(attempt, FrameEnded(frame))
                case ReleaseHold(hold):
                    self._host.release(hold)
                case Committed():
                    self._host.exported(key, self._stats(attempt))
                case Failed(code, message):
                    self._host.export_failed(key, code, message)
        if attempt.machine.over and self._attempts.get(key) is attempt:
            del self._attempts[key]
            self.dropped += attempt.machine.dropped

    def _send(self, attempt: _Attempt, frame: Frame) -> None:
        attempt.pushing_since = attempt.pushing_since or now()
        guard = attempt.guards[frame] = BlockClaim()
        job = SendJob(
            attempt.machine.key,
            frame,
            guard,
            PoolFrame(self._pool, attempt.table, frame),
            ChecksumKind.of(self._config.checksum, self._local.gpu and attempt.stream.gpu),
            partial(post, self._loop, attempt.stream.outbox.put),
            partial(post, self._loop, self._on_frame_read, attempt, frame),
        )
        job.on_sent = partial(post, self._loop, self._on_frame_sent, attempt.stream.peer.incarnation, frame.nbytes)
        late, attempt.late = attempt.late, None
        if failpoint("transfer.queued", job.key, index=frame.index) is None:
            self._queue(attempt, (frame.epoch, job), late)
        else:
            self._queue(attempt, late)
            attempt.late = frame.epoch, job

    def _queue(self, attempt: _Attempt, *jobs: tuple[int, SendJob] | None) -> None:
        for epoch, job in filter(None, jobs):
            self._links.submit(attempt.stream.peer.incarnation, epoch, job)

    def _on_frame_sent(self, peer: str, nbytes: int, began: float, ended: float) -> None:
        cost = self._costs.setdefault(peer, _PairCost())
        cost.frames.observe(nbytes, ended - max(began, cost.ended_at))
        cost.ended_at = ended
        cost.fit = cost.frames.fit()

    def _on_frame_read(self, attempt: _Attempt, frame: Frame) -> None:
        self._feed(attempt, FrameEnded(frame))

    def _stats(self, attempt: _Attempt) -> TransferStats:
        end = now()
        tokens = attempt.shape.tokens - (attempt.machine.have or 0)
        return TransferStats(
            transfer_seconds=end - (attempt.pushing_since or end),
            handoff_seconds=end - (attempt.finished_at or end),
            nbytes=tokens * attempt.shape.token_bytes,
        )

    def _on(self, stream: OutgoingStream) -> list[_Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.stream is stream]

    def _tick(self) -> None:
        at = now()
        for attempt in list(self._attempts.values()):
            self._apply(attempt, attempt.machine.poll(at))
        if at - self._renewed >= self._limits.lease / 4:
            self._renewed = at
            for stream in self._streams.values():
                keys = [attempt.machine.key for attempt in self._on(stream) if not attempt.machine.state.over]
                stream.outbox.put(*renewals(keys))

    # Streams.

    def _on_message(self, stream: OutgoingStream, message: Message) -> None:
        match message:
            case Grant() | Ack() | Nack() | Wait():
                attempt = self._attempts.get(message.key)
                if attempt is not None and attempt.stream is stream:
                    self._feed(attempt, message)
                else:
                    self.dropped += 1
            case Renew(keys):
                for attempt in filter(None, (self._attempts.get(key) for key in keys)):
                    if attempt.stream is stream:
                        self._feed(attempt, Renewed())
            case Meet(epoch, entry, value):
                self._links.meet(stream.peer.incarnation, epoch, entry, value)
            case CloseLink(epoch, reason):
                if self._links.epoch(stream.peer.incarnation) == epoch:
                    self._links.close(stream.peer.incarnation, f"closed by {stream.peer.name}: {reason}")
            case Hello():
                stream.gpu = message.gpu
                objection = self._local.objection(message, self._config)
                if message.incarnation != stream.peer.incarnation:
                    objection = Code.UNKNOWN_PEER, f"{stream.peer.address} is {message.worker} {message.incarnation}"
                if objection is not None:
                    stream.end(*objection)
            case Refuse(code, reason):
                stream.end(code, f"{stream.peer.name} refused: {reason}")
            case _:
                stream.end(Code.PROTOCOL, f"{stream.peer.name} sent {type(message).__name__}, which only a sender may")

    def _on_stream_end(self, stream: OutgoingStream, code: Code, message: str) -> None:
        if self._streams.get(stream.peer.incarnation) is stream:
            del self._streams[stream.peer.incarnation]
            self._costs.pop(stream.peer.incarnation, None)
            self._links.close(stream.peer.incarnation, message)
        for attempt in self._on(stream):
            self._feed(attempt, PeerLost(code, message))

    # Links.

    def _dial(self, stream: OutgoingStream) -> tuple[Code, str] | None:
        """Begins to make a link of the next epoch; the reason where that can't be."""
        peer = stream.peer
        try:
            name = choose(self._config.transport, entries(self._transports), peer.transports)
        except LinkError as error:
            return Code.INCOMPATIBLE, f"{peer.name}: {error}"
        epoch = self._epochs[peer.incarnation] = self._epochs.get(peer.incarnation, 0) + 1

        def tell(entry: str, value: bytes) -> None:
            post(self._loop, stream.outbox.put, Meet(epoch, entry, value))

        spec = LinkSpec(
            peer=peer.incarnation,
            epoch=epoch,
            transport=self._transports[name],
            rank=SENDER,
            buffer_bytes=self._frame_tokens * self._local.layout.token_bytes + CHECKSUM_BYTES,
            timeout=self._config.frame_timeout_seconds,
            tell=tell,
            on_end=partial(self._on_link_end, stream),
            idle=lambda: not self._on(stream),
        )
        if not self._links.open(spec):
            return (
                Code.NO_ROOM,
                f"all {self._config.max_links} links of {self._local.name} (transfer.max_links) are in use",
            )
        stream.outbox.put(Dial(epoch, name))
        return None

    def _on_link_end(self, stream: OutgoingStream, end: LinkEnd) -> None:
        epoch, reason = end.epoch, end.reason
        self._links.ended(stream.peer.incarnation, epoch)
        if self._streams.get(stream.peer.incarnation) is not stream:
            return
        stream.outbox.put(CloseLink(epoch, clip(reason)))
        attempts = self._on(stream)
        if attempts:
            logger.warning("link lost", extra={"peer": stream.peer.name, "epoch": epoch, "reason": reason})
        for attempt in attempts:
            if end.gives_up(attempt.machine.key):
                self._feed(attempt, PeerLost(Code.LINK, clip(reason)))
            else:
                self._feed(attempt, LinkLost(epoch))
        if any(not attempt.machine.state.over for attempt in attempts) and not self._links.epoch(
            stream.peer.incarnation
        ):
            refusal = self._dial(stream)
            if refusal is not None:
                for attempt in self._on(stream):
                    self._feed(attempt, PeerLost(*refusal))
