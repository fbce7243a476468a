"""Two ends of a hand-off in one process: a prefill side and a decode side over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import torch

from kvrelay.decode_worker.handoff_service import HandoffService
from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.internal.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.options import server_options
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.endpoint import TransferStats
from kvrelay.transfer.endpoint_loop import HandoffSetup
from kvrelay.transfer.frames import PoolFrames
from kvrelay.transfer.handshake import LocalWorker
from kvrelay.transfer.messages import Code, Key
from kvrelay.transfer.peers import Peer, PeerTable
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.gloo import GlooTransport
from kvrelay.transfer.transports.registry import entries

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="float32")
SENDER, RECEIVER = WorkerId("prefill-0", "p-incarnation"), WorkerId("decode-0", "d-incarnation")


def raw(pool: KVPool) -> torch.Tensor:
    """The pool's bytes, [blocks, block_bytes], to fill and to look at."""
    return pool.tensor.view(torch.uint8).reshape(pool.num_blocks, -1)


def content(pool: KVPool, blocks: Sequence[int], tokens: int, first: int = 0) -> torch.Tensor:
    """The KV bytes of a sequence's tokens from `first` on."""
    out = torch.empty((tokens - first) * pool.layout.token_bytes, dtype=torch.uint8)
    if tokens > first:
        pool.read(blocks, first, tokens - first, out)
    return out


@dataclass(eq=False)
class StandInHold:
    """A hold that counts its releases."""

    blocks: list[int]
    releases: int = 0


@dataclass(eq=False)
class StandInReservation:
    hold: StandInHold
    have_tokens: int = 0


@dataclass
class Ends:
    """What the two hosts were told, by key."""

    exported: dict[Key, TransferStats] = field(default_factory=dict)
    export_failed: dict[Key, tuple[Code, str]] = field(default_factory=dict)
    imported: dict[Key, tuple[StandInReservation, int, TransferStats]] = field(default_factory=dict)
    import_failed: dict[Key, tuple[Code, str]] = field(default_factory=dict)

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Polls until `condition()` holds; TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # the condition may be about anything
                await asyncio.sleep(0.001)


class ExportSide:
    """Stands in for a prefill worker."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.holds: list[StandInHold] = []

    def hold(self, blocks: Sequence[int]) -> StandInHold:
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
        return sum(hold.releases != 1 for hold in self.holds)


class ImportSide:
    """Stands in for a decode worker with `free` blocks, handed out in a scrambled order."""

    def __init__(self, ends: Ends, blocks: int) -> None:
        self.ends = ends
        self.free = [(block * 7 + 3) % blocks for block in range(blocks)]
        self.blocks = blocks
        self.need: dict[Key, int] = {}
        self.have: dict[Key, int] = {}
        self.reservations: dict[Key, StandInReservation] = {}
        self.gate: asyncio.Event | None = None
        self.on_free: Callable[[], None] | None = None
        """Called when blocks are free again."""
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, key: Key, answer: Callable[[StandInReservation | None], None]) -> None:
        task = asyncio.create_task(self._reserve(key, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve(self, key: Key, answer: Callable[[StandInReservation | None], None]) -> None:
        if self.gate is not None:
            await self.gate.wait()
        reservation = None
        if len(self.free) >= self.need[key]:
            taken, self.free = self.free[: self.need[key]], self.free[self.need[key] :]
            reservation = StandInReservation(StandInHold(taken), self.have.get(key, 0))
            self.reservations[key] = reservation
        answer(reservation)

    def release(self, reservation: StandInReservation) -> None:
        reservation.hold.releases += 1
        self.free += reservation.hold.blocks
        if self.on_free is not None:
            self.on_free()

    def imported(self, key: Key, reservation: StandInReservation, first_token: int, stats: TransferStats) -> None:
        self.ends.imported[key] = (reservation, first_token, stats)

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
    sending: ExportSide
    receiving: ImportSide
    server: grpc.aio.Server
    port: int
    peers: PeerTable
    """The sender's."""

    @property
    def sender(self) -> KVSender:
        return self.client.sender

    @property
    def receiver(self) -> KVReceiver:
        return self.service.receiver

    def announce(self, key: Key, tokens: Sequence[int], have: int = 0) -> None:
        """What the router's two Submits do: the decode side expects, the prefill side offers."""
        self.expect(key, tokens, have)
        self.sender.begin(key, RECEIVER, tokens)

    def expect(self, key: Key, tokens: Sequence[int], have: int = 0) -> None:
        self.receiving.need[key] = self.target.layout.blocks_for(len(tokens))
        self.receiving.have[key] = have
        self.receiver.expect(key, SENDER, tokens)

    def compute(self, key: Key, blocks: Sequence[int], first_token: int = 7, chunk_blocks: int = 4) -> None:
        """The prompt's blocks become ready, chunk by chunk, and then the first token."""
        for start in range(0, len(blocks) - 1, chunk_blocks):
            self.sender.progress(key, self.sending.hold(blocks[start : min(start + chunk_blocks, len(blocks) - 1)]))
        self.sender.finished(key, first_token, self.sending.hold(blocks))


@asynccontextmanager
async def pair(
    config: TransferConfig | None = None,
    *,
    blocks: int = 256,
    receiver_config: TransferConfig | None = None,
    layout: KVLayout = LAYOUT,
    receiver_layout: KVLayout | None = None,
    transports: tuple[Mapping[str, Transport], Mapping[str, Transport]] | None = None,
    source: KVPool | None = None,
    target: KVPool | None = None,
) -> AsyncIterator[Pair]:
    """Starts both sides on loopback, and stops them."""
    config = config or TransferConfig()
    ends = Ends()
    sending, receiving = ExportSide(ends), ImportSide(ends, blocks)
    receiver_layout = receiver_layout or layout
    source, target = source or KVPool(layout, blocks), target or KVPool(receiver_layout, blocks)
    here, there = transports or ({"gloo": GlooTransport("127.0.0.1")}, {"gloo": GlooTransport("127.0.0.1")})
    service = HandoffService(
        setup(RECEIVER, target, PeerTable([Peer(SENDER, address="")]), receiver_config or config, there), receiving
    )
    receiving.on_free = service.receiver.blocks_freed
    server = grpc.aio.server(options=server_options())
    add_HandoffServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    peers = PeerTable([Peer(RECEIVER, f"127.0.0.1:{port}", tuple(entries(there)))])
    client = HandoffClient(setup(SENDER, source, peers, config, here), sending)
    await server.start()
    try:
        yield Pair(client, service, source, target, ends, sending, receiving, server, port, peers)
    finally:
        await client.close()
        await service.close()
        await server.stop(0.5)


def setup(
    worker: WorkerId, pool: KVPool, peers: PeerTable, config: TransferConfig, transports: Mapping[str, Transport]
) -> HandoffSetup:
    """What a worker of the model "fingerprint" hands KV over with."""
    local = LocalWorker(worker, pool.layout, "fingerprint")
    return HandoffSetup(local, PoolFrames(pool, config.checksum), peers, config, transports)
