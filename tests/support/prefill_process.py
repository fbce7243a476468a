"""A prefill side in a process of its own that stops half-way, so that it can be killed or frozen there."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.control import LocalWorker
from kvrelay.transfer.messages import Key
from kvrelay.transfer.peers import Peer, PeerTable
from kvrelay.transfer.transports.gloo import GlooTransport
from support.handoff import LAYOUT, RECEIVER, SENDER, Ends, ExportSide, raw

LIFETIME_SECONDS = 60.0


def _main(connection: Connection, config: TransferConfig, address: str, key: Key, tokens: Sequence[int]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_half_a_prompt(connection, config, Peer(*RECEIVER, address, ("gloo",)), key, tokens))


async def _half_a_prompt(
    connection: Connection, config: TransferConfig, peer: Peer, key: Key, tokens: Sequence[int]
) -> None:
    blocks = list(range(LAYOUT.blocks_for(len(tokens))))
    pool = KVPool(LAYOUT, len(blocks))
    raw(pool).fill_(1)
    side = ExportSide(Ends())
    transports = {"gloo": GlooTransport("127.0.0.1")}
    exporter = KVSender(LocalWorker(*SENDER, LAYOUT, "fingerprint"), pool, PeerTable([peer]), config, transports, side)
    exporter.start()
    exporter.begin(key, RECEIVER, tokens)
    exporter.progress(key, side.hold(blocks[: len(blocks) // 2]))
    over = asyncio.Event()

    def command() -> None:
        try:
            connection.recv()
        except EOFError:
            over.set()
            return
        exporter.finished(key, 7, side.hold(blocks))

    asyncio.get_running_loop().add_reader(connection.fileno(), command)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), LIFETIME_SECONDS)
    await exporter.close()


@dataclass
class PrefillProcess:
    """A running prefill side, seen from the test's process."""

    process: multiprocessing.process.BaseProcess
    connection: Connection

    def finish(self) -> None:
        """Lets it compute the rest of the prompt."""
        self.connection.send(True)

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, number)


@contextlib.contextmanager
def prefill_process(config: TransferConfig, port: int, key: Key, tokens: Sequence[int]) -> Iterator[PrefillProcess]:
    """Starts a prefill side that offers `tokens` to 127.0.0.1:`port` and ships half; always ends it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (there, config, f"127.0.0.1:{port}", key, list(tokens))
    process = context.Process(target=_main, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        yield PrefillProcess(process, here)
    finally:
        here.close()
        process.kill()
        process.join(LIFETIME_SECONDS)
