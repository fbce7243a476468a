"""The processes of a simulated hand-off: the product's coordinators, with simulated engines, clocks and streams."""

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.writes import RankWrites, StepWrites
from kvrelay.engine.states import StatesShape
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.links.rank_links import COMMITTED, Command, RankFrames, RankLinks
from kvrelay.transfer.links.rank_transfers import RankTransfers
from kvrelay.transfer.protocol.endpoint import Endpoint, EndpointContext, TransferStats
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.peers import NEWS_SECONDS, Peer, PeerTable
from support.late_writes import LateWrites
from support.simulation.blocks import BLOCK, FLOATS, LAYERS, STATES, Blocks, Hold, Violation, states_of
from support.simulation.links import SimulatedFrames, Stream

FIRST_TOKEN = 77
SHAPE = StatesShape(LAYERS, STATES.hidden_size)
TICK_LATE = 0.1
"""Seconds by which a process may look at its deadlines too late."""


def config_of(frame_layers: int, max_links: int, state_tokens: int, checksum: bool) -> TransferConfig:
    """Frames of so many layers of one block, or of several blocks; room for the hidden states of so many tokens."""
    return TransferConfig(
        states_bytes=state_tokens * STATES.token_bytes,
        frame_bytes=frame_layers * FLOATS.block_bytes // LAYERS,
        lease_seconds=2.0,
        grant_timeout_seconds=4.0,
        prefill_timeout_seconds=8.0,
        transfer_timeout_seconds=4.0,
        frame_timeout_seconds=0.5,
        max_links=max_links,
        checksum=checksum,
    )


class SimulatedChannel:
    """One end of the channel between rank 0 and another rank of a process; implements `RankChannel`."""

    committed_step = COMMITTED

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._at = 0.0
        self.other: SimulatedChannel
        self._on_message: Callable[[Command], None]

    @classmethod
    def pair(cls, process: "Process") -> tuple["SimulatedChannel", "SimulatedChannel"]:
        one, other = cls(process), cls(process)
        one.other, other.other = other, one
        return one, other

    def listen(self, on_message: Callable[[Command], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message

    def send(self, message: Command) -> None:
        world = self._process.world
        # A process may post 0.3 s late as well; in a calm world, both together are less than a link's timeout.
        late = (0.1 if world.calm else 0.3) if world.random() < 0.02 else 0.005
        self._at = max(self._at, world.now + world.random() * late)
        world.post_at(self._at, self._process, self.other.take, message)

    def take(self, message: Command) -> None:
        self._on_message(message)


class Process:
    """One incarnation of a worker; it is the `Runtime` and the host of its endpoint."""

    endpoint: Endpoint[Any]

    def __init__(self, world: Any, name: str, incarnation: int, blocks: int) -> None:
        self.world = world
        self.number = incarnation
        self.id = WorkerId(name, f"{name}#{incarnation}")
        states = world.states if isinstance(self, DecodeProcess) else None
        degree: Degree = world.degrees[isinstance(self, DecodeProcess)]
        self.peer = Peer(self.id, f"{name}:1", ("simulated",), states, degree)
        self.blocks = Blocks(self.id.incarnation, world.cache, blocks, degree)
        frames = SimulatedFrames(self.blocks, world.config.checksum)
        self.frames: Any = frames if degree == ONE else RankFrames(frames)
        self.dead = self.engine_ended = False
        self.frozen = self.skew = 0.0
        self.begun: set[Key] = set()
        self.cancelled: set[Key] = set()
        self.reported: set[Key] = set()
        self._posted = 0.0
        self._ticking = False
        transports, limits = {"simulated": SimpleNamespace(scope="")}, LinkLimits(world.config.max_links, 0)
        managers = [
            LinkManager(transports, limits, LinkTimeouts(0.5, 0.5), "auto", self, rank)  # type: ignore[arg-type]
            for rank in range(degree.ranks)
        ]
        channels = {}
        self.rank_writes = [RankWrites() for _ in managers[1:]]
        self.steps = itertools.count()
        for rank, manager in list(enumerate(managers))[1:]:
            channels[rank], far = SimulatedChannel.pair(self)
            frames = SimulatedFrames(self.blocks, world.config.checksum, rank)
            RankTransfers(far, manager, frames, self, self.rank_writes[rank - 1])
        self.links: Any = managers[0] if degree == ONE else RankLinks(managers[0], channels, self)
        self.peers = PeerTable()
        self.context = EndpointContext(
            LocalWorker(self.id, world.cache, "model", states=states, states_shape=SHAPE, degree=degree),
            self.peers,
            world.config,
            self,
            self.links,
        )

    def __repr__(self) -> str:
        return self.id.incarnation

    # Runtime.

    def now(self) -> float:
        return float(self.world.now + self.skew)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Posts a call; calls happen in order, and perhaps late."""
        world = self.world
        late = 0.3 if world.random() < 0.05 else 0.0
        at = self._posted = max(self._posted, world.now + late)
        world.post_at(at, self, call, *arguments)

    def watch(self) -> None:
        """Ticks as long as there is anything to look at."""
        if not self._ticking and self.endpoint.active:
            self._ticking = True
            self.world.post(self.endpoint.tick_seconds + self.world.random() * TICK_LATE, self, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.endpoint.tick()
        self.watch()

    # The worker.

    def members(self, peers: Iterable[Peer]) -> None:
        """News of the membership."""
        self.peers.update(peers)
        self.endpoint.peers_changed()

    def cancel(self, key: Key) -> None:
        self.cancelled.add(key)
        self.endpoint.cancel(key)

    def report(self, key: Key, what: str) -> None:
        if key in self.cancelled and what == "failed":
            return
        if key in self.reported or key in self.cancelled:
            raise Violation("report", f"{self}: {key} is reported {what} after its end")
        self.reported.add(key)
        self.world.router.report(key, what)

    def failed(self, key: Key, code: Code, message: str) -> None:
        if code is Code.PROTOCOL and self.world.orderly:
            raise Violation("protocol", f"{self}: {key} failed with {code.value}: {message}")
        self.report(key, "failed")

    def when_met(self, other: "Process", call: Callable[[], None], waited: float = 0.0) -> None:
        """Calls at once, or once the news of the other worker has come, or after NEWS_SECONDS."""
        if waited < NEWS_SECONDS and self.peers.is_news(other.id):
            self.world.post(0.25, self, self.when_met, other, call, waited + 0.25)
        else:
            call()

    def check_end(self) -> None:
        """Checks, when all is quiet, that nothing is left."""
        if self.endpoint.active:
            raise Violation("leak", f"{self}: {self.endpoint.active} attempts are left")
        if silent := self.begun - self.reported - self.cancelled:
            raise Violation("report", f"{self}: nothing was reported of {sorted(silent)}")
        if not self.engine_ended:
            self.blocks.check_all_free()
        if self.endpoint.states_room.used:
            raise Violation("leak", f"{self}: room is still taken by hidden states")


class PrefillProcess(Process):
    """A prefill worker: the real `KVSender`, and an engine that computes chunks at random."""

    def __init__(self, world: Any, name: str, incarnation: int, blocks: int) -> None:
        super().__init__(world, name, incarnation, blocks)
        self.kept: dict[Key, list[int]] = {}
        """Tokens whose hidden states are known, by attempt: the first one and the end."""
        self.endpoint = self.sender = KVSender(self.context, self.frames, self, self._connect)

    def begin(self, key: Key, right: "DecodeProcess", tokens: int) -> None:
        """The prompt's first step starts as soon as it has blocks."""
        self.when_met(right, lambda: self._start(key, right, tokens, 0))

    def _start(self, key: Key, right: "DecodeProcess", tokens: int, tries: int) -> None:
        world = self.world
        if key in self.cancelled:
            return
        hold = None if self.engine_ended else self.blocks.take(key, -(-tokens // BLOCK))
        if hold is not None:
            self.begun.add(key)
            self.sender.begin(key, right.id, range(tokens))
            world.post(world.random() * 0.2, self, self._compute, key, hold, tokens, 0)
        elif tries < 6:
            world.post(0.3, self, self._start, key, right, tokens, tries + 1)
        else:
            self.report(key, "failed")

    def _compute(self, key: Key, hold: Hold, tokens: int, done: int) -> None:
        world, random = self.world, self.world.random
        if self.engine_ended:
            return
        if key in self.cancelled | self.reported and random() < 0.7:
            self.blocks.release(hold)
            return
        end = done + 1 + int(random() * (len(hold.blocks) - done))
        self._keep(key, tokens, done * BLOCK, min(tokens, end * BLOCK))
        if random() < 0.4:
            # As a step on a GPU: its blocks are given to the sender before they are written.
            written = LateWrites()
            of_all = StepWrites(next(self.steps), written)
            for writes in self.rank_writes:
                writes.launched(of_all.step, written)
            of_all.become(written)
            self.sender.progress(key, self.blocks.hold(key, hold.blocks[done:end], done), of_all)
            world.post(random() * 0.2, self, self._computed, key, hold, tokens, done, end, written)
        else:
            self._computed(key, hold, tokens, done, end, None)

    def _computed(self, key: Key, hold: Hold, tokens: int, done: int, end: int, written: LateWrites | None) -> None:
        world = self.world
        if self.engine_ended:
            return
        self._fill(key, hold, done, end)
        if written is not None:
            written.end()
        if end < len(hold.blocks):
            if written is None:
                self.sender.progress(key, self.blocks.hold(key, hold.blocks[done:end], done))
            world.post(world.random() * 0.2, self, self._compute, key, hold, tokens, end)
        else:
            self.sender.finished(key, FIRST_TOKEN, self.blocks.hold(key, hold.blocks))
            self.blocks.release(hold)

    def _keep(self, key: Key, tokens: int, first: int, end: int) -> None:
        """The hidden states of these tokens. Now and then some are in the prefix cache, or computed again."""
        states, random = self.world.states, self.world.random
        if states is None:
            return
        if states.last:
            first = tokens - 1
        elif random() < 0.1:
            first = max(0, first - 1 - int(random() * 4))
        elif random() < 0.1:
            first += 1 + int(random() * 3)
        if first < end:
            known = self.kept.setdefault(key, [0, 0])
            if first > known[1]:
                known[0] = first
            known[1] = end
            self.sender.keep(key, first, states_of(key, first, end))

    def _fill(self, key: Key, hold: Hold, first: int, end: int) -> None:
        for number in range(first, end):
            self.blocks.fill(hold.blocks[number], key, number)
        if end == len(hold.blocks):
            self.blocks.fill_slot(hold.blocks[0], key)

    def _connect(self, peer: Peer, sender: KVSender) -> Any:
        world = self.world
        right = world.process(peer)
        stream = Stream(world, self, right)
        world.streams.append(stream)
        stream.left.greet()
        if right.dead:
            world.post(0.05, self, stream.left.finish, Code.CLOSED, "connection refused")
        else:
            hello = self.context.local.hello(right.id, world.config)
            world.post(0.02, right, right.when_met, self, lambda: right.accept(stream, hello))
        return stream.left

    # SenderHost.

    def release(self, hold: Hold) -> None:
        self.blocks.release(hold)

    def exported(self, key: Key, stats: TransferStats) -> None:
        if key not in self.world.commits:
            raise Violation("commit", f"{key}: the sender believes in a commit that never happened")
        self.report(key, "exported")

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        self.failed(key, code, message)


class DecodeProcess(Process):
    """A decode worker: the real `KVReceiver`, and an engine that decodes for a moment."""

    def __init__(self, world: Any, name: str, incarnation: int, blocks: int) -> None:
        super().__init__(world, name, incarnation, blocks)
        self.endpoint = self.receiver = KVReceiver(self.context, self.frames, self)

    def expect(self, key: Key, left: PrefillProcess, tokens: int) -> None:
        def expected() -> None:
            if key not in self.cancelled:
                self.begun.add(key)
                self.receiver.expect(key, left.id, range(tokens))

        self.when_met(left, expected)

    def accept(self, stream: Stream, hello: Any) -> None:
        """Takes or refuses a stream that says hello, as `HandoffService` does."""
        refusal = self.receiver.objection(hello)
        if refusal is not None:
            stream.right.end(*refusal)
        elif not stream.right.over:
            self.receiver.accept(stream.right, hello)
            stream.right.greet()

    # ReceiverHost.

    def reserve(self, key: Key, answer: Callable[[Any], None], *, passing: bool) -> None:
        self.world.post(self.world.random() * 0.05, self, self._answer, key, answer, passing)

    def waits(self, key: Key) -> None:
        """Does nothing: nobody has to be told here."""

    def _answer(self, key: Key, answer: Callable[[Any], None], passing: bool) -> None:
        world = self.world
        if self.engine_ended:
            answer(RuntimeError("the engine has ended"))
            return
        tokens = world.tokens[key[0]]
        # Half of those who ask out of turn may pass.
        passes = not passing or world.random() < 0.5
        hold = self.blocks.take(key, -(-tokens // BLOCK), tokens) if passes else None
        if hold is not None:
            cached = int(world.random() * (tokens // BLOCK + 1)) if world.random() < 0.2 else 0
            # A window's own pool may have kept fewer of them.
            known = [cached, *[int(world.random() * (cached + 1)) for _ in hold.have[1:]]]
            pairs = zip(self.blocks.cache.groups, hold.have, known, strict=True)
            hold.have = tuple(
                [first if group.kind == "state" else max(first, BLOCK * most) for group, first, most in pairs]
            )
            for number, block in enumerate(hold.blocks[:cached]):
                self.blocks.fill(block, key, number)
        answer(hold)

    def release(self, reservation: Hold) -> None:
        self.blocks.release(reservation)
        self.world.post(0.0, self, self.receiver.blocks_freed)

    def imported(
        self, key: Key, reservation: Hold, first_token: int, stats: TransferStats, states: Tensor | None
    ) -> None:
        world = self.world
        if key in world.commits:
            raise Violation("commit", f"{key} is committed twice")
        if first_token != FIRST_TOKEN:
            raise Violation("commit", f"{key} is committed with token {first_token}")
        world.commits.add(key)
        self.blocks.check_tokens(reservation, self.world.tokens[reservation.owner[0]])
        self._check_states(key, states)
        self.report(key, "imported")
        world.post(world.random() * 1.5, self, self._decoded, reservation)

    def _check_states(self, key: Key, states: Tensor | None) -> None:
        """The hidden states that came are those of this very attempt; all of them, unless there was too little room."""
        world, tokens = self.world, self.world.tokens[key[0]]
        left, _ = world.router.placed[key]
        kept = left.kept.get(key, [0, 0])
        first = tokens if states is None else tokens - len(states)
        if states is not None and not states.equal(states_of(key, first, tokens)):
            raise Violation("token", f"{key}: hidden states from {first} on are others")
        expected = kept[0] if world.states is not None and kept[1] == tokens else tokens
        if first != expected and world.roomy:
            raise Violation("lost", f"{key}: hidden states from {first} on, computed from {expected} on")

    def _decoded(self, reservation: Hold) -> None:
        self.blocks.check_tokens(reservation, self.world.tokens[reservation.owner[0]])
        self.release(reservation)

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        self.failed(key, code, message)
