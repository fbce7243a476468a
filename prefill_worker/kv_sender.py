"""The prefill worker's end of all hand-offs: offers KV, and ships it while the rest of the prompt computes.

    queue                producer                              consumer
    begin, progress...   the worker, on the event loop         the attempt's `SendAttempt` machine, at once
    outbox (per pair)    machines, and links                   the stream's writer
    jobs (per link)      machines' SendFrame                   the link's thread
    ended frames         links' threads                        machines, on the event loop

The first hand-off to a worker opens a control stream and a link to it. A stream that ends fails the hand-offs on it,
and the next hand-off opens another. A link that ends is opened again under the next epoch, while a hand-off needs it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import BETWEEN_GPUS
from kvrelay.transfer.protocol.endpoint import Endpoint, EndpointContext, Pair, Transfer, TransferStats
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
    SendAction,
    SendFinish,
    SendFrame,
    StopFrames,
    Tell,
    Track,
    tokens_digest,
)
from kvrelay.transfer.protocol.handshake import cuts_of, largest, tracks_of
from kvrelay.transfer.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_PARTS,
    Ack,
    CloseLink,
    Code,
    Dial,
    Grant,
    Hello,
    Key,
    Message,
    Nack,
    Push,
    Refuse,
    Wait,
    check_key,
)
from kvrelay.transfer.protocol.packing import WireError, clip
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import SENDER, ControlStream, FrameTask, LinkEnd, NoTransportError
from kvrelay.transfer.protocol.routes import routes_of, unroutable
from kvrelay.transfer.protocol.states import SentStates
from kvrelay.transfer.protocol.table import SendAttempt

logger = logging.getLogger(__name__)


class SenderHost(Protocol):
    """The prefill worker, as its `KVSender` calls it on the event loop."""

    def release(self, hold: Hold) -> None:
        """Releases a hold that the sender gives up, on the thread that owns the block pool."""

    def exported(self, key: Key, stats: TransferStats) -> None:
        """Notes that the decode worker has the KV."""

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        """Notes that the hand-off failed, or that its outcome is unknown here; then the decode worker's report
        counts."""


class SendJobs(Protocol):
    """Makes the jobs that read frames from this worker's KV pool and send them; `PoolFrames` does."""

    def send(self, task: FrameTask, announce: Callable[[Push], None], on_read: Callable[[], None]) -> Any: ...


Connect = Callable[[Peer, "KVSender"], ControlStream]
"""Opens a control stream to a peer; it passes messages and its end on to the sender."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sending(Transfer[SendAttempt]):
    """One attempt of this worker to hand KV over."""

    pair: Pair
    states: SentStates
    state_nbytes: int = 0
    """Bytes of hidden states that were sent."""
    started_at: float | None = None
    """Time when the first frame was queued and its KV was there."""
    finished_at: float | None = None
    """Time when prefill ended."""
    offered_at: float
    granted_at: float | None = None
    """Time when the receiver's first grant came."""
    steps: deque[tuple[int, KVWrites]] = field(default_factory=deque)
    """Steps whose end isn't known, oldest first: the tokens before those whose KV each computes, and its writes."""

    def written(self, tokens: int) -> KVWrites:
        """The writes whose end means that the KV of the first `tokens` tokens is computed."""
        while self.steps and self.steps[0][1].ended:
            self.steps.popleft()
        return next((writes for before, writes in reversed(self.steps) if before < tokens), WRITTEN)


class KVSender(Endpoint[Sending]):
    """Hands the KV of computed prompts over to decode workers. Runs on one event loop."""

    rank = SENDER

    def __init__(
        self,
        context: EndpointContext,
        frames: SendJobs,
        host: SenderHost,
        connect: Connect,
    ) -> None:
        """
        Raises:
            ValueError: one layer of a KV block is larger than a frame can be, or too many frames make a block.
        """
        super().__init__(context)
        # A pair's routes carry these slices, or parts of them.
        routes = routes_of(self.local.cache, self.local.degree, self.local.degree)
        for frame_bytes in (self.config.frame_bytes, self.config.gpu_frame_bytes):
            for route, cut in zip(routes, cuts_of(routes, frame_bytes), strict=True):
                if cut.nbytes > MAX_FRAME_BYTES or cut.parts > MAX_PARTS:
                    raise ValueError(
                        f"a KV block takes {route.layout.block_bytes} bytes and would be sent in {cut.parts} frames of"
                        f" {cut.nbytes}; allowed: up to {MAX_PARTS} frames of up to {MAX_FRAME_BYTES} bytes"
                    )
        self._frames = frames
        self._host = host
        self._connect = connect

    # For the worker.

    def begin(self, key: Key, to: WorkerId, tokens: Sequence[int]) -> None:
        """Offers the KV of `tokens`, which is computed from now on, to a decode worker.

        Exactly one of `exported` and `export_failed` follows, unless `cancel` comes first.
        """
        if key in self._transfers:
            raise RuntimeError(f"hand-off {key} was begun twice")
        try:
            check_key(key)
        except WireError as error:
            self._refuse(key, Code.PROTOCOL, str(error))
            return
        peer = self.peers.get(to)
        if peer is None:
            self._refuse(key, Code.UNKNOWN_PEER, f"{to} is not a member")
            return
        if (reason := unroutable(self.local.cache, self.local.degree, peer.degree)) is not None:
            self._refuse(key, Code.INCOMPATIBLE, f"layout.{reason}")
            return
        pair = self._pairs.get(peer.incarnation)
        if pair is None:
            pair = self._pairs[peer.incarnation] = Pair(self._connect(peer, self))
            pair.routes, nbytes = self._route(self.local.cache, peer.degree, None), self.config.frame_bytes
            with suppress(NoTransportError):  # `_dial` refuses
                if self.links.transport_for(peer) in BETWEEN_GPUS:
                    nbytes = self.config.gpu_frame_bytes
            pair.cuts = cuts_of(pair.routes, nbytes)
            pair.stream.put(self.local.hello(peer.id, self.config, pair.cuts))
        if not self.links.epoch(peer.incarnation):
            refusal = self._dial(pair)
            if refusal is not None:
                self._refuse(key, *refusal)
                return
        nbytes, wanted = largest(pair.cuts), peer.states
        state_bytes = 0 if wanted is None else wanted.token_bytes
        if state_bytes > nbytes:
            message = f"states: those of a token take {state_bytes} bytes; frames (transfer.frame_bytes) have {nbytes}"
            self._refuse(key, Code.INCOMPATIBLE, message)
            return
        manifest = Manifest(
            len(tokens),
            tokens_digest(tokens),
            self._tracks(pair, len(tokens)),
            state_bytes=state_bytes,
            state_tokens=nbytes // state_bytes if state_bytes else 0,
        )
        now = self.runtime.now()
        machine = SendAttempt(key, manifest, self.timeouts, now)
        self._transfers[key] = Sending(machine=machine, pair=pair, states=SentStates(self.states_room), offered_at=now)
        pair.stream.put(machine.offer)

    def keep(self, key: Key, first: int, states: Any) -> None:
        """Takes hidden states of a prompt, [n, layers, hidden] of the tokens from `first` on, as `Peer.states` of the
        receiver says. To be called before `finished`; they leave with the next `progress`, or with that.
        """
        transfer = self._transfers.get(key)
        if transfer is not None and not transfer.machine.state.over:
            transfer.states.add(first, states)
            transfer.machine.states = transfer.states.first, transfer.states.end

    def progress(self, key: Key, hold: Hold, written: KVWrites = WRITTEN) -> None:
        """More of the prompt is computed, or is being computed: `hold` keeps the blocks that follow those given before.

        The sender owns the hold from here on, whatever becomes of the hand-off. Nothing more is written to the blocks
        but what `written` is of, so the last one may be partial at the prompt's end only.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            self._host.release(hold)
            return
        manifest, size, given = transfer.machine.manifest, self.local.cache.block_size, hold.tables()
        known = len(transfer.tables[0])
        if not written.ended:
            transfer.steps.append((known * size, written))
        transfer.tables[0] += given[0]
        transfer.tables += [[] for _ in given[len(transfer.tables) :]]
        for table, blocks in zip(transfer.tables[1:], given[1:], strict=True):
            # Their tables begin with the first token; of a window, `hold` has what it has of the new blocks.
            table += [-1] * (known - len(table))
            table[known:] = blocks[known:]
        tokens = min(len(transfer.tables[0]) * size, manifest.tokens)
        self._feed(transfer, Computed(tokens, hold))

    def finished(self, key: Key, first_token: int, hold: Hold) -> None:
        """All of the prompt is computed, and `first_token` was sampled: `hold` keeps the whole block table.

        The sender owns the hold from here on, whatever becomes of the hand-off.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            self._host.release(hold)
            return
        transfer.tables = hold.tables()
        transfer.steps.clear()
        transfer.finished_at = now = self.runtime.now()
        if transfer.claims:
            transfer.started_at = transfer.started_at or now
        self._feed(transfer, Finished(first_token, hold))

    # Actions.

    def _refuse(self, key: Key, code: Code, message: str) -> None:
        """Reports a hand-off that can't begin; later, because `begin` must have returned first."""
        self.failures[code.value] += 1
        self.runtime.post(self._host.export_failed, key, code, message)

    def _apply(self, transfer: Sending, actions: Iterable[SendAction]) -> None:
        key, pair = transfer.key, transfer.pair
        for action in actions:
            match action:
                case Tell(message):
                    pair.stream.put(message)
                case SendFrame(frame):
                    self._send(transfer, frame)
                case SendFinish(message):
                    self.links.after_frames(pair.incarnation, message.epoch, key, partial(pair.stream.put, message))
                case StopFrames(frames):
                    self._stop(transfer, frames)
                case ReleaseHold(hold):
                    self._host.release(hold)
                case Committed():
                    self._host.exported(key, self._stats(transfer))
                case Failed(code, message):
                    self.failures[code.value] += 1
                    self._host.export_failed(key, code, message)
        if transfer.machine.over and self._transfers.get(key) is transfer:
            transfer.states.clear()
            del self._transfers[key]
            self.dropped += transfer.machine.dropped

    def _send(self, transfer: Sending, frame: Frame) -> None:
        pair, post = transfer.pair, self.runtime.post
        route = pair.routes[frame.track]
        announce, on_read = partial(post, self._announce, transfer), partial(post, self._sent, transfer, frame)
        source: Sequence[Any]
        if frame.states:
            claim, source = self._claim(transfer, frame), transfer.states.slices(frame.first, frame.tokens)
        else:
            claim = self._claim(transfer, frame, transfer.written(frame.first + frame.tokens))
            source = transfer.tables[route.group]
        job = self._frames.send(FrameTask(transfer.key, frame, claim, source, route), announce, on_read)
        if claim.written.ended:
            transfer.started_at = transfer.started_at or self.runtime.now()
        self.links.submit(pair.incarnation, frame.epoch, route.ranks, job)

    def _announce(self, transfer: Sending, push: Push) -> None:
        """Tells the receiver that the link begins to send a frame."""
        transfer.started_at = transfer.started_at or self.runtime.now()
        transfer.state_nbytes += push.nbytes if push.states else 0
        transfer.pair.stream.put(push)

    def _sent(self, transfer: Sending, frame: Frame) -> None:
        """Notes that the frame's blocks are no longer needed for it."""
        if transfer.claims[frame].in_place:
            self.in_place_bytes += frame.nbytes
        self._feed(transfer, FrameEnded(frame))

    def _stats(self, transfer: Sending) -> TransferStats:
        now = self.runtime.now()
        manifest = transfer.machine.manifest
        have = transfer.machine.have or tuple([track.first for track in manifest.tracks])
        return TransferStats(
            transfer_seconds=now - (transfer.started_at or now),
            handoff_seconds=now - (transfer.finished_at or now),
            nbytes=manifest.nbytes(have),
            state_nbytes=transfer.state_nbytes,
            grant_seconds=(transfer.granted_at or now) - transfer.offered_at,
        )

    # Control streams and links.

    def on_message(self, stream: ControlStream, message: Message) -> None:
        pair = self._pair_of(stream)
        if pair is None:
            return
        match message:
            case Grant() | Ack() | Nack() | Wait():
                transfer = self._addressed(pair, message.key)
                if transfer is not None:
                    if isinstance(message, Grant):
                        transfer.granted_at = transfer.granted_at or self.runtime.now()
                    self._feed(transfer, message)
            case Hello():
                self._on_hello(pair, message)
            case Refuse(code, reason):
                stream.end(code, f"{pair.peer.name} refused: {reason}")
            case _:
                super().on_message(stream, message)

    def _on_hello(self, pair: Pair, hello: Hello) -> None:
        pair.hello = hello
        objection = self.local.objection(hello, self.config)
        if objection is None:
            pair.routes = self._route(self.local.cache.sent_to(hello.cache), pair.peer.degree, hello)
        for transfer in self._of(pair):
            manifest = transfer.machine.manifest
            transfer.machine.manifest = replace(manifest, tracks=self._tracks(pair, manifest.tokens))
        for name in ("states", "degree"):
            told, said = getattr(pair.peer, name), getattr(hello, name)
            if told != said:
                objection = Code.INCOMPATIBLE, f"{name}: {told} in the membership, {said} in the hello"
        if hello.incarnation != pair.incarnation:
            objection = Code.UNKNOWN_PEER, f"{pair.peer.address} is {hello.worker} {hello.incarnation}"
        if objection is not None:
            pair.stream.end(*objection)

    def _tracks(self, pair: Pair, tokens: int) -> tuple[Track, ...]:
        """The tracks of an attempt on the link, as far as the receiver's layout is known."""
        return tracks_of(self.local.cache, pair.routes, tokens, pair.cuts)

    def _dial(self, pair: Pair) -> tuple[Code, str] | None:
        """Starts to open a link of the next epoch; why it can't be, or None."""
        try:
            transport = self.links.transport_for(pair.peer)
        except NoTransportError as error:
            return Code.INCOMPATIBLE, f"{pair.peer.name}: {error}"
        epoch = self._epochs.get(pair.incarnation, 0) + 1
        refusal = self._open_link(pair, epoch, transport, largest(pair.cuts))
        if refusal is not None:
            return Code.NO_CAPACITY, refusal
        pair.stream.put(Dial(epoch, transport))
        return None

    def _on_link_end(self, pair: Pair, end: LinkEnd) -> None:
        self.links_ended += 1
        if self._pairs.get(pair.incarnation) is not pair:
            return
        reason = clip(end.reason)
        pair.stream.put(CloseLink(end.epoch, reason))
        transfers = self._of(pair)
        if transfers:
            logger.warning("link lost", extra={"peer": pair.peer.name, "epoch": end.epoch, "reason": reason})
        for transfer in transfers:
            if end.worker_lost:
                self._feed(transfer, Cancel(Code.CLOSED, reason))  # the worker itself tells the router
            elif end.gives_up(transfer.key):
                self._feed(transfer, PeerLost(Code.LINK, reason))
            else:
                self._feed(transfer, LinkLost(end.epoch))
        needed = any(not transfer.machine.state.over for transfer in transfers)
        if needed and not self.links.epoch(pair.incarnation):
            refusal = self._dial(pair)
            if refusal is not None:
                for transfer in self._of(pair):
                    self._feed(transfer, PeerLost(*refusal))
