"""The decode side of a hand-off in a process of its own, so that it can be killed or frozen."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc
import torch
import xxhash

from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.internal.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from kvrelay.rpc.options import server_options
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.control import LocalWorker, TransferStats
from kvrelay.transfer.messages import Code, Key
from kvrelay.transfer.peers import Peer, PeerTable
from kvrelay.transfer.transports.gloo import GlooTransport
from support.handoff import LAYOUT, RECEIVER, SENDER, Ends, ImportSide, StandInReservation, content

START_SECONDS = 60.0


class _Host(ImportSide):
    """Tells the parent process the digest of what was committed, and frees it."""

    def __init__(self, pool: KVPool, blocks: int, tell: Connection) -> None:
        super().__init__(Ends(), blocks)
        self._pool = pool
        self._tell = tell
        self.lengths: dict[Key, int] = {}

    def imported(self, key: Key, reservation: StandInReservation, first_token: int, stats: TransferStats) -> None:
        self._tell.send((key, digest(content(self._pool, reservation.hold.blocks, self.lengths[key]))))
        self.release(reservation)

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        self._tell.send((key, code))


def digest(data: torch.Tensor) -> int:
    """Of some bytes."""
    return xxhash.xxh3_64_intdigest(data.numpy().data)


def _main(connection: Connection, layout: KVLayout, blocks: int, config: TransferConfig) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(connection, layout, blocks, config))


async def _serve(connection: Connection, layout: KVLayout, blocks: int, config: TransferConfig) -> None:
    pool = KVPool(layout, blocks)
    host = _Host(pool, blocks, connection)
    local = LocalWorker(*RECEIVER, layout, "fingerprint")
    peers = PeerTable([Peer(*SENDER, address="")])
    importer = KVReceiver(local, pool, peers, config, {"gloo": GlooTransport("127.0.0.1")}, host)
    server = grpc.aio.server(options=server_options())
    add_HandoffServiceServicer_to_server(importer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    importer.start()
    over = asyncio.Event()

    def command() -> None:
        try:
            key, tokens = connection.recv()
        except EOFError:
            over.set()
            return
        host.lengths[key] = len(tokens)
        host.need[key] = layout.blocks_for(len(tokens))
        importer.expect(key, SENDER, tokens)

    asyncio.get_running_loop().add_reader(connection.fileno(), command)
    connection.send(port)
    await over.wait()
    await importer.close()
    await server.stop(0)


@dataclass
class DecodeProcess:
    """A running decode side, seen from the test's process."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    peer: Peer
    news: dict[Key, int | Code] = field(default_factory=dict)
    """Digest of what was committed, or why it was not."""

    def expect(self, key: Key, tokens: Sequence[int]) -> None:
        self.connection.send((key, list(tokens)))

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, number)

    def read(self) -> None:
        """Takes in the news that have come."""
        while self.connection.poll():
            key, news = self.connection.recv()
            self.news[key] = news


@contextlib.contextmanager
def decode_process(config: TransferConfig, layout: KVLayout = LAYOUT, blocks: int = 256) -> Iterator[DecodeProcess]:
    """Starts a decode side, and always ends it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_main, args=(there, layout, blocks, config), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(START_SECONDS):
            raise AssertionError("the decode process did not start")
        peer = Peer(*RECEIVER, address=f"127.0.0.1:{here.recv()}", transports=("gloo",))
        yield DecodeProcess(process, here, peer)
    finally:
        here.close()
        process.kill()
        process.join(START_SECONDS)
