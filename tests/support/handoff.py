"""The hand-off's two halves over real gRPC and real links in this process, with hosts in the place of their workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from kvrelay.decode_worker.handoff_service import HandoffService
from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.states import StatesLayout, StatesShape
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.endpoint_loop import HandoffSetup
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.registry import available_transports, entries
from support.damage import DamagedFrames, parse
from support.fake_transport import FakeTransport, Fault
from support.ranks import Ranks, pools_of
from support.secrets import credentials

HOST = "127.0.0.1"
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="float32")
SENDER, RECEIVER = WorkerId("prefill-0", "p-incarnation"), WorkerId("decode-0", "d-incarnation")
FIRST_TOKEN = 7


def prompt(count: int) -> list[int]:
    """Token ids."""
    return [token * 7 % 1000 for token in range(count)]


def blocks_of(tokens: int, start: int = 0) -> list[int]:
    """Block table of a prompt whose blocks follow each other in the source pool."""
    return list(range(start, start + LAYOUT.blocks_for(tokens)))


Script = Callable[[int], Fault | None]


def links_of(kind: str, script: Script | None = None) -> tuple[Mapping[str, Transport], Mapping[str, Transport]]:
    """The transports of the two ends, if both offer only `kind`; a fake one may have a script of faults."""
    if kind == "fake":
        fake = {kind: FakeTransport(script)}
        return fake, fake
    return available_transports(HOST, kind), available_transports(HOST, kind)


def raw(pool: KVPool) -> torch.Tensor:
    """View of the pool's bytes, [blocks, block_bytes]."""
    return pool.bytes.flatten(1)


def content(pool: KVPool, blocks: Sequence[int], tokens: int, first: int = 0) -> torch.Tensor:
    """Copy of the KV bytes of a sequence's tokens from `first` on."""
    out = torch.empty((tokens - first) * pool.layout.token_bytes, dtype=torch.uint8)
    if tokens > first:
        pool.read(blocks, first, tokens - first, out)
    return out


@dataclass(eq=False)
class StandInHold:
    """A hold that counts its releases; a reservation is its own hold."""

    blocks: list[int]
    have: tuple[int, ...] = (0,)
    releases: int = 0

    @property
    def hold(self) -> "StandInHold":
        return self

    def tables(self) -> list[list[int]]:
        return [list(self.blocks)]

    def comes_from(self, first: Sequence[int]) -> None:
        """Does nothing: no block is cached."""


@dataclass
class Ends:
    """Reports to the two hosts, by key."""

    exported: dict[Key, TransferStats] = field(default_factory=dict)
    export_failed: dict[Key, tuple[Code, str]] = field(default_factory=dict)
    imported: dict[Key, tuple[StandInHold, int, TransferStats]] = field(default_factory=dict)
    import_failed: dict[Key, tuple[Code, str]] = field(default_factory=dict)
    states: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    """Hidden states that came with an import."""

    async def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Polls until `condition()` holds; TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # the condition may be about anything
                await asyncio.sleep(0.001)


class SendingHost:
    """Stands in for a prefill worker."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.holds: list[StandInHold] = []

    def hold(self, blocks: Sequence[int]) -> StandInHold:
        """A new hold on `blocks`."""
        hold = StandInHold(list(blocks))
        self.holds.append(hold)
        return hold

    def release(self, hold: StandInHold) -> None:
        hold.releases += 1

    def exported(self, key: Key, stats: TransferStats) -> None:
        self.ends.exported[key] = stats

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        self.ends.export_failed[key] = (code, message)

    @property
    def leaked(self) -> int:
        """Holds not released exactly once."""
        return sum(hold.releases != 1 for hold in self.holds)


class ReceivingHost:
    """Stands in for a decode worker with `free` blocks, handed out in a scrambled order."""

    def __init__(self, ends: Ends, blocks: int) -> None:
        self.ends = ends
        self.free = [(block * 7 + 3) % blocks for block in range(blocks)]
        self.blocks = blocks
        self.need: dict[Key, int] = {}
        self.have: dict[Key, int] = {}
        self.reservations: dict[Key, StandInHold] = {}
        self.on_free: Callable[[], None] | None = None
        """Function that is called when blocks are free again."""
        self.waited: set[Key] = set()
        """Attempts that have waited for blocks."""

    def reserve(self, key: Key, answer: Callable[[StandInHold | None], None], *, passing: bool) -> None:
        asyncio.get_running_loop().call_soon(self._answer, key, answer, passing)

    def waits(self, key: Key) -> None:
        self.waited.add(key)

    def _answer(self, key: Key, answer: Callable[[StandInHold | None], None], passing: bool) -> None:
        reservation = None
        if not passing and len(self.free) >= self.need[key]:
            taken, self.free = self.free[: self.need[key]], self.free[self.need[key] :]
            reservation = self.reservations[key] = StandInHold(taken, (self.have.get(key, 0),))
        answer(reservation)

    def release(self, reservation: StandInHold) -> None:
        reservation.hold.releases += 1
        self.free += reservation.hold.blocks
        if self.on_free is not None:
            self.on_free()

    def imported(self, key: Key, reservation: StandInHold, first_token: int, stats: TransferStats, states: Any) -> None:
        self.ends.imported[key] = (reservation, first_token, stats)
        self.ends.states[key] = states

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        self.ends.import_failed[key] = (code, message)

    @property
    def leaked(self) -> int:
        """Reservations neither released nor committed, or both."""
        committed = {id(reservation) for reservation, _, _ in self.ends.imported.values()}
        return sum(
            reservation.hold.releases + (id(reservation) in committed) != 1
            for reservation in self.reservations.values()
        )


@dataclass
class Pair:
    """A prefill side and a decode side."""

    client: HandoffClient
    service: HandoffService
    source: KVPool
    target: KVPool
    ends: Ends
    sending: SendingHost
    receiving: ReceivingHost
    server: grpc.aio.Server
    port: int
    sources: list[KVPool]
    targets: list[KVPool]
    """Pools of each rank, `source` and `target` are those of rank 0."""
    ranks: tuple[Ranks, Ranks]
    """The other ranks of both workers."""

    @property
    def sender(self) -> KVSender:
        return self.client.sender

    @property
    def receiver(self) -> KVReceiver:
        return self.service.receiver

    def compute(self, key: Key, blocks: Sequence[int], chunk_blocks: int = 4) -> None:
        """The prompt is computed, chunk by chunk, and then the first token is sampled."""
        for start in range(0, len(blocks) - 1, chunk_blocks):
            self.sender.progress(key, self.sending.hold(blocks[start : min(start + chunk_blocks, len(blocks) - 1)]))
        self.sender.finished(key, FIRST_TOKEN, self.sending.hold(blocks))

    async def sent(self, key: Key) -> bool:
        """Waits until the sender has reported how the hand-off ended, and holds nothing; whether it arrived."""
        ends = self.ends
        await ends.until(lambda: (key in ends.exported or key in ends.export_failed) and not self.sending.leaked)
        return key in ends.exported

    def announce(self, key: Key, tokens: Sequence[int], have: int = 0) -> None:
        """Does the work of the router's two Submits: the receiver expects the hand-off, the sender offers it."""
        self.expect(key, tokens, have)
        self.sender.begin(key, RECEIVER, tokens)

    def expect(self, key: Key, tokens: Sequence[int], have: int = 0) -> None:
        self.receiving.need[key] = self.target.layout.blocks_for(len(tokens))
        self.receiving.have[key] = have
        self.receiver.expect(key, SENDER, tokens)

    async def settled(self, *keys: Key) -> None:
        """Waits until both ends have reported how these hand-offs ended, and nothing is held any more."""
        ends = self.ends
        for key in keys:
            await ends.until(lambda key=key: key in ends.exported or key in ends.export_failed)
            await ends.until(lambda key=key: key in ends.imported or key in ends.import_failed)
        await self.released()

    async def released(self) -> None:
        """Waits until nothing is held any more."""
        await self.ends.until(lambda: not self.sending.leaked and not self.receiving.leaked)

    async def fails(self, key: Key, tokens: Sequence[int]) -> tuple[Code, str]:
        """Hands a prompt over; returns why that failed at the sender, before anything was reserved."""
        self.announce(key, tokens)
        self.compute(key, blocks_of(len(tokens)))
        assert not await self.sent(key)
        assert not self.receiving.reservations
        return self.ends.export_failed[key]

    async def arrives(
        self, key: Key, count: int, blocks: Sequence[int] | None = None, have: int = 0, chunk_blocks: int = 4
    ) -> None:
        """Hands the KV of `count` tokens over, checks that it arrived, and frees it."""
        blocks = blocks_of(count) if blocks is None else blocks
        self.announce(key, prompt(count), have)
        self.compute(key, blocks, chunk_blocks)
        await self.settled(key)
        self.check_equal(key, blocks, count, have)
        self.reuse(key)

    def check_equal(self, key: Key, blocks: Sequence[int], count: int, have: int = 0) -> None:
        """The committed KV of the tokens from `have` on is that of `blocks` in the source pool, and was sent; that of
        the tokens before was not."""
        assert key in self.ends.imported, self.ends.import_failed.get(key)
        reservation, first_token, stats = self.ends.imported[key]
        there = reservation.hold.blocks
        assert first_token == FIRST_TOKEN
        assert torch.equal(content(self.source, blocks, count, have), content(self.target, there, count, have))
        assert stats.nbytes == self.ends.exported[key].nbytes == (count - have) * self.source.layout.token_bytes

    def reuse(self, key: Key) -> None:
        """Frees the blocks of a committed hand-off."""
        self.receiving.free += self.ends.imported[key][0].hold.blocks
        self.receiver.blocks_freed()


SHAPE = StatesShape(layers=3, hidden_size=16)
STATES = StatesLayout((0, 2, 3), hidden_size=16, dtype="float32")


def setup(
    worker: WorkerId,
    pool: KVPool,
    peers: PeerTable,
    config: TransferConfig,
    transports: Mapping[str, Transport],
    states: StatesLayout | None = None,
    shape: StatesShape | None = SHAPE,
    damage: str = "",
    whole: tuple[KVLayout, Degree] | None = None,
) -> HandoffSetup:
    """The hand-off setup of a worker of the model "fingerprint", which wants `states` and can keep those of `shape`;
    `damage` are rules of `support.damage`, `whole` the model's layout and the worker's ranks."""
    layout, degree = whole or (pool.layout, ONE)
    local = LocalWorker(worker, CacheLayout.of(layout), "fingerprint", states=states, states_shape=shape, degree=degree)
    frames = PoolFrames([pool], config.checksum)
    if damage:
        frames = DamagedFrames(frames, parse(damage))
    return HandoffSetup(local, frames, peers, config, transports, credentials("worker"))


@asynccontextmanager
async def pair(
    config: TransferConfig | None = None,
    *,
    blocks: int = 256,
    receiver_config: TransferConfig | None = None,
    layout: KVLayout = LAYOUT,
    receiver_layout: KVLayout | None = None,
    transports: tuple[Mapping[str, Transport], Mapping[str, Transport]] | None = None,
    script: Script | None = None,
    source: KVPool | None = None,
    target: KVPool | None = None,
    states: StatesLayout | None = None,
    shape: StatesShape | None = SHAPE,
    damage: str = "",
    degrees: tuple[Degree, Degree] = (ONE, ONE),
) -> AsyncIterator[Pair]:
    """Starts both sides on loopback, and stops them. By default each offers every transport of this machine.

    With a `script` of faults, as for `FakeTransport`, both offer a fake one. `damage` are rules for the sender's
    frames, see `support.damage`; `degrees` are the numbers of ranks of both.
    """
    config, there_layout = config or TransferConfig(), receiver_layout or layout
    sources = [source] if source is not None else pools_of(layout, degrees[0], blocks)
    targets = [target] if target is not None else pools_of(there_layout, degrees[1], blocks)
    if script is not None:
        transports = links_of("fake", script)
    here, there = transports or (available_transports(HOST), available_transports(HOST))
    ends = Ends()
    sending, receiving = SendingHost(ends), ReceivingHost(ends, blocks)
    async with AsyncExitStack() as stack:
        senders = PeerTable([Peer(SENDER, address="", degree=degrees[0])])
        model = target.layout if target is not None else there_layout, degrees[1]
        receiver_setup = setup(RECEIVER, targets[0], senders, receiver_config or config, there, states, whole=model)
        receivers = Ranks(receiver_setup, targets)
        stack.push_async_callback(receivers.close)
        service = HandoffService(receivers.setup, receiving)
        receiving.on_free = service.receiver.blocks_freed
        server = credentials("worker").server()
        service.add_to(server)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        stack.push_async_callback(service.close)
        peers = PeerTable([Peer(RECEIVER, f"{HOST}:{port}", tuple(entries(there)), states, degrees[1])])
        model = source.layout if source is not None else layout, degrees[0]
        sender_setup = setup(SENDER, sources[0], peers, config, here, shape=shape, damage=damage, whole=model)
        others = Ranks(sender_setup, sources)
        stack.push_async_callback(others.close)
        client = HandoffClient(others.setup, sending)
        stack.push_async_callback(client.close)
        pools, ranks = (sources[0], targets[0]), (others, receivers)
        yield Pair(client, service, *pools, ends, sending, receiving, server, port, sources, targets, ranks)
