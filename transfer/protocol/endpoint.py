"""The common part of the two coordinators of the hand-off, without I/O.

    KVSender     `kvrelay.prefill_worker.kv_sender`    one per prefill worker process
    KVReceiver   `kvrelay.decode_worker.kv_receiver`   one per decode worker process

Scopes: a worker has one endpoint, at its rank 0; a pair of workers has a control stream and, per epoch, a link for each
pair of ranks that share a route (`Pair`); an attempt has a state machine at either end (`Transfer`); a frame has a
claim on its blocks (`BlockClaim`). An endpoint runs on one event loop. Clock, loop, streams and links are injected
(`kvrelay.transfer.protocol.ports`), so tests simulate this very code.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.events import Cancel, Frame, FrameEnded, Outcome, PeerLost, Renewed, Timeouts
from kvrelay.transfer.protocol.handshake import FrameCut, LocalWorker
from kvrelay.transfer.protocol.messages import MAX_KEYS, CloseLink, Code, Hello, Key, Meet, Message, Renew
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from kvrelay.transfer.protocol.ports import SENDER, BlockClaim, ControlStream, LinkEnd, Links, LinkSpec, Runtime
from kvrelay.transfer.protocol.routes import RankPair, Route, links_of, routes_of
from kvrelay.transfer.protocol.states import StatesRoom
from kvrelay.transfer.protocol.table import ReceiveAttempt, SendAttempt

MachineT = TypeVar("MachineT", SendAttempt, ReceiveAttempt)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Times and sizes of one hand-off, as seen at one end."""

    transfer_seconds: float
    """Seconds of the transfer. Sender: from the start of the first frame to acknowledgement. Receiver: from grant to
    commit."""
    handoff_seconds: float
    """Seconds that no computation hid. Sender: from the end of prefill to acknowledgement. Receiver: from the news of
    that end to commit."""
    nbytes: int
    """KV bytes that crossed the link and verified."""
    grant_seconds: float = 0.0
    """Seconds from the offer to the first grant, at the sender."""
    state_nbytes: int = 0
    """Bytes of the prompt's hidden states. Sender: those sent again over another link count twice."""
    sender: str = ""
    """Name of the worker that sent; at the receiver."""
    exposed_nbytes: int = 0
    """Bytes, among `nbytes`, that came after the prompt was computed, within `handoff_seconds`; at the receiver."""


@dataclass(slots=True, eq=False)
class Pair:
    """A peer, for as long as one control stream to it lives."""

    stream: ControlStream
    hello: Hello | None = None
    """Hello of the peer, once it has come."""
    epoch: int = 0
    """Epoch of the latest links that were opened over this stream."""
    routes: tuple[Route, ...] = ()
    """The ways of KV between the two workers' ranks."""
    cuts: tuple[FrameCut, ...] = ()
    """The sender's cuts of the routes, before any dtype is converted."""

    @property
    def peer(self) -> Peer:
        return self.stream.peer

    @property
    def incarnation(self) -> str:
        return self.stream.peer.incarnation


@dataclass(slots=True, eq=False)
class Transfer(Generic[MachineT]):
    """One attempt at this end: the state machine, and what its actions work on."""

    machine: MachineT
    pair: Pair | None
    """Pair of the attempt; None at a receiver that has had no offer yet."""
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    """Blocks of each layer group from the first token on, as far as they are known; -1 where there is none."""
    claims: dict[Frame, BlockClaim] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.machine.key


TransferT = TypeVar("TransferT", bound=Transfer[Any])


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """Everything that an endpoint of either kind works with."""

    local: LocalWorker
    peers: PeerTable
    config: TransferConfig
    runtime: Runtime
    links: Links


class Endpoint(ABC, Generic[TransferT]):
    """Base of both coordinators: pairs, links, leases and the way from events to actions."""

    rank: int
    """Rank of this end: SENDER or RECEIVER."""

    def __init__(self, context: EndpointContext) -> None:
        self.local = context.local
        self.peers = context.peers
        self.config = config = context.config
        self.runtime = context.runtime
        self.links = context.links
        self.timeouts = Timeouts(
            lease=config.lease_seconds,
            grant=config.grant_timeout_seconds,
            prefill=config.prefill_timeout_seconds,
            transfer=config.transfer_timeout_seconds,
        )
        self.states_room = StatesRoom(config.states_bytes)
        self.dropped = 0
        """Number of messages of other attempts or epochs, so far."""
        self.corrupt = 0
        """Number of frames that failed their checksum, so far."""
        self.expired = 0
        """Number of attempts that ended at one of their deadlines, so far."""
        self.in_place_bytes = 0
        """KV bytes that this end sent from where they lay in its pool, without a copy to a link's buffer."""
        self.links_ended = 0
        """Number of links that broke, could not be made, or were closed, so far."""
        self.failures: Counter[str] = Counter()
        """Number of attempts that failed at this end so far, by the value of their code."""
        self._transfers: dict[Key, TransferT] = {}
        self._pairs: dict[str, Pair] = {}
        # By incarnation, and never forgotten: an incarnation that comes back after a partial membership must not see
        # an epoch twice. About 100 bytes for each worker that this one ever met.
        self._epochs: dict[str, int] = {}
        self._renewed = 0.0

    # For the worker.

    @property
    def active(self) -> int:
        """Attempts that hold something here, or may yet."""
        return len(self._transfers)

    def epoch(self, incarnation: str) -> int:
        """Epoch of the link to a worker; 0 if there is none now."""
        return self.links.epoch(incarnation)

    def cancel(self, key: Key, code: Code = Code.CANCELLED) -> None:
        """Ends a hand-off and tells the peer why; the host gets no further report of it. Unknown keys are allowed."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            self._feed(transfer, Cancel(code, self._reason(code)))

    def peers_changed(self) -> None:
        """Ends the pairs with workers that are no longer members, after a change of the membership."""
        for pair in list(self._pairs.values()):
            if pair.peer not in self.peers:
                pair.stream.end(Code.UNKNOWN_PEER, f"{pair.peer.name} is no longer a member")

    @property
    def tick_seconds(self) -> float:
        """Seconds between two calls of `tick`: a quarter of the shortest timeout, between 5 ms and 0.25 s."""
        timeouts = self.timeouts
        return min(0.25, max(0.005, min(timeouts.lease, timeouts.grant, timeouts.transfer) / 4))

    def tick(self) -> None:
        """Ends attempts whose deadline has passed, and renews the leases of the others at their peers."""
        now = self.runtime.now()
        for transfer in list(self._transfers.values()):
            self._note_expiry(transfer, now)
            self._apply(transfer, transfer.machine.poll(now))
        if now - self._renewed >= self.timeouts.lease / 4:
            self._renewed = now
            for pair in self._pairs.values():
                keys = [transfer.key for transfer in self._of(pair) if not transfer.machine.state.over]
                pair.stream.put(*(Renew(tuple(keys[at : at + MAX_KEYS])) for at in range(0, len(keys), MAX_KEYS)))

    def end_pairs(self, code: Code) -> None:
        """Ends every control stream, because this worker shuts down (CLOSED or DRAINING); `stream_ended` follows for
        each."""
        for pair in list(self._pairs.values()):
            pair.stream.end(code, self._reason(code))

    # For control streams.

    def on_message(self, stream: ControlStream, message: Message) -> None:
        """Takes the next message of a stream: here, those that both ends send."""
        pair = self._pair_of(stream)
        if pair is None:
            return
        match message:
            case Renew(keys):
                for key in keys:
                    transfer = self._transfers.get(key)
                    if transfer is not None and transfer.pair is pair:
                        self._feed(transfer, Renewed())
            case Meet(epoch, entry, value):
                self.links.meet(pair.incarnation, epoch, RankPair(message.sender, message.receiver), entry, value)
            case CloseLink(epoch, reason):
                if self.links.epoch(pair.incarnation) == epoch:
                    self._close_link(pair, f"closed by {pair.peer.name}: {reason}")
            case _:
                stream.end(Code.PROTOCOL, f"{type(message).__name__} is not a message for this end")

    def stream_ended(self, stream: ControlStream, code: Code, message: str) -> None:
        """Ends the link of an ended stream, and fails the attempts that were in progress on it."""
        pair = self._pair_of(stream)
        if pair is None:
            return
        del self._pairs[pair.incarnation]
        self.links.close(pair.incarnation, message)
        for transfer in self._of(pair):
            self._feed(transfer, PeerLost(code, message))

    # For both coordinators.

    @abstractmethod
    def _apply(self, transfer: TransferT, actions: Iterable[Any]) -> None:
        """Performs what the machine of `transfer` asks for."""

    @abstractmethod
    def _on_link_end(self, pair: Pair, end: LinkEnd) -> None:
        """Handles the end of a pair's link, which may never have been made."""

    def _reason(self, code: Code) -> str:
        """The reason why this end gives a hand-off up, for the peer."""
        return f"{code.value} on {self.local.id.name}"

    def _feed(self, transfer: TransferT, event: Any) -> list[Any]:
        """Gives the machine of `transfer` an event; performs and returns the actions that it asks for."""
        now = self.runtime.now()
        self._note_expiry(transfer, now)
        actions: list[Any] = transfer.machine.on(event, now)
        self._apply(transfer, actions)
        return actions

    def _note_expiry(self, transfer: TransferT, now: float) -> None:
        self.expired += now >= transfer.machine.deadline  # of an attempt that is over there is none

    def _pair_of(self, stream: ControlStream) -> Pair | None:
        """The pair whose current stream this is; None if another stream has taken its place."""
        pair = self._pairs.get(stream.peer.incarnation)
        return pair if pair is not None and pair.stream is stream else None

    def _of(self, pair: Pair) -> list[TransferT]:
        return [transfer for transfer in self._transfers.values() if transfer.pair is pair]

    def _route(self, sender: CacheLayout, degree: Degree, hello: Hello | None) -> tuple[Route, ...]:
        """The routes between this worker and a peer of this `degree`, whose hello may not have come yet.

        Args:
            sender: cache layout of that end.
        """
        mine, on_gpus = self.local.degree, self.local.gpu and hello is not None and hello.gpu
        degrees = (mine, degree) if self.rank == SENDER else (degree, mine)
        return routes_of(sender, *degrees, on_gpus)

    def _claim(self, transfer: TransferT, frame: Frame, written: KVWrites = WRITTEN) -> BlockClaim:
        claim = transfer.claims[frame] = BlockClaim(written)
        return claim

    def _stop(self, transfer: TransferT, frames: Iterable[Frame]) -> None:
        """Ends the frames whose blocks no thread has touched yet; the others end by themselves."""
        for frame in frames:
            if transfer.claims[frame].close():
                self._feed(transfer, FrameEnded(frame, Outcome.LOST))

    def _addressed(self, pair: Pair, key: Key) -> TransferT | None:
        """The attempt that a message of the pair names; counts a message that no attempt of this pair expects."""
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.pair is pair:
            return transfer
        self.dropped += 1
        return None

    def _close_link(self, pair: Pair, reason: str) -> None:
        self.links.close(pair.incarnation, reason)

    def _open_link(self, pair: Pair, epoch: int, transport: str, frame_bytes: int) -> str | None:
        """Starts to open this end of the pair's links. Returns why they can't be opened now, or None.

        Raises:
            NoTransportError: this worker doesn't have the transport.
        """

        def tell(ranks: RankPair, entry: str, value: bytes) -> None:
            pair.stream.put(Meet(epoch, entry, value, *ranks))

        opened = self.links.open(
            LinkSpec(
                local=self.local.id.incarnation,
                peer=pair.incarnation,
                epoch=epoch,
                transport=transport,
                rank=self.rank,
                frame_bytes=frame_bytes,
                tell=tell,
                on_end=partial(self._on_link_end, pair),
                idle=lambda: not self._of(pair),
                links=links_of(pair.routes),
            )
        )
        pair.epoch = self._epochs[pair.incarnation] = epoch
        if opened:
            return None
        return f"the links of {self.local.id.name} are in use (transfer.max_links, transfer.gpu_buffer_bytes)"
