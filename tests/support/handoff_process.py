"""One side of a hand-off in a process of its own, so that it can be killed or frozen."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.transports.registry import available_transports, entries
from support.forks import spawned
from support.handoff import (
    FIRST_TOKEN,
    HOST,
    LAYOUT,
    RECEIVER,
    SENDER,
    Ends,
    ReceivingHost,
    StandInHold,
    blocks_of,
    content,
    digest,
    raw,
    sending,
    serving,
)

START_SECONDS = 60.0
BLOCKS = 256


@dataclass
class SideProcess:
    """A running side, seen from the test's process."""

    process: BaseProcess
    connection: Connection

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, number)


def _run(connection: Connection, side: Callable[..., Any], *arguments: Any) -> None:
    """Runs the coroutine `side(connection, *arguments)`."""
    torch.set_num_threads(1)
    asyncio.run(side(connection, *arguments))


async def _commands(connection: Connection, handle: Callable[[Any], None]) -> None:
    """Handles what the test's process sends, until that closes its end."""
    over = asyncio.Event()

    def receive() -> None:
        try:
            handle(connection.recv())
        except EOFError:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            over.set()

    asyncio.get_running_loop().add_reader(connection.fileno(), receive)
    await over.wait()


# The receiving side.


class _ReportingHost(ReceivingHost):
    """Sends the digest of what was committed to the test's process, and frees it."""

    def __init__(self, pool: KVPool, connection: Connection) -> None:
        super().__init__(Ends(), pool.num_blocks)
        self._pool = pool
        self._connection = connection
        self.lengths: dict[Key, int] = {}

    def imported(self, key: Key, reservation: StandInHold, first_token: int, stats: TransferStats, states: Any) -> None:
        self._connection.send((key, digest(content(self._pool, reservation.hold.blocks, self.lengths[key]))))
        self.release(reservation)

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        self._connection.send((key, code))


async def _receiving_side(connection: Connection, config: TransferConfig) -> None:
    pool = KVPool(LAYOUT, BLOCKS)
    host = _ReportingHost(pool, connection)
    transports = available_transports(HOST, config.transport)
    async with serving(host, pool, config, transports) as side:

        def expect(command: tuple[Key, list[int]]) -> None:
            key, tokens = command
            host.lengths[key] = len(tokens)
            host.need[key] = LAYOUT.blocks_for(len(tokens))
            side.service.receiver.expect(key, SENDER, tokens)

        connection.send(Peer(RECEIVER, f"{HOST}:{side.port}", tuple(entries(transports))))
        await _commands(connection, expect)


@dataclass
class ReceivingProcess(SideProcess):
    peer: Peer
    _reported: dict[Key, int | Code] = field(default_factory=dict)

    def expect(self, key: Key, tokens: Sequence[int]) -> None:
        self.connection.send((key, list(tokens)))

    def reported(self) -> dict[Key, int | Code]:
        """Outcomes by hand-off: the digest of what was committed, or why it was not."""
        while self.connection.poll():
            key, outcome = self.connection.recv()
            self._reported[key] = outcome
        return self._reported


@contextlib.contextmanager
def receiving_process(config: TransferConfig) -> Iterator[ReceivingProcess]:
    """Starts a receiving side, and always ends it."""
    with spawned(_run, _receiving_side, config) as (process, connection):
        if not connection.poll(START_SECONDS):
            raise AssertionError("the receiving process did not start")
        yield ReceivingProcess(process, connection, connection.recv())


# The sending side.


async def _sending_side(
    connection: Connection, config: TransferConfig, peer: Peer, key: Key, tokens: Sequence[int]
) -> None:
    blocks = blocks_of(len(tokens))
    pool = KVPool(LAYOUT, len(blocks))
    raw(pool).fill_(1)
    async with sending(peer, pool, config) as side:
        side.sender.begin(key, RECEIVER, tokens)
        side.sender.progress(key, side.sending.hold(blocks[: len(blocks) // 2]))
        await _commands(connection, lambda _: side.sender.finished(key, FIRST_TOKEN, side.sending.hold(blocks)))


@contextlib.contextmanager
def sending_process(config: TransferConfig, peer: Peer, key: Key, tokens: Sequence[int]) -> Iterator[SideProcess]:
    """Starts a side that offers `tokens` and sends half of them; any object sent to it lets it finish."""
    with spawned(_run, _sending_side, config, peer, key, list(tokens)) as (process, connection):
        yield SideProcess(process, connection)
