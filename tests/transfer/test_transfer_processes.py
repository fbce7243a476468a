"""Hand-offs between processes, one of which is killed or frozen: the other soon frees its blocks, without a commit."""

import asyncio
import signal
from dataclasses import replace

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from kvrelay.transfer.transports.registry import available_transports, entries
from support.handoff import (
    FIRST_TOKEN,
    HOST,
    LAYOUT,
    RECEIVER,
    SENDER,
    Ends,
    Pair,
    SendingHost,
    blocks_of,
    content,
    pair,
    prompt,
    raw,
    setup,
)
from support.handoff_process import ReceivingProcess, digest, receiving_process, sending_process

CONFIG = TransferConfig(frame_timeout_seconds=1.0, lease_seconds=2.0, frame_bytes=65536)
COUNT = 600
TOKENS = prompt(COUNT)
BLOCKS = blocks_of(COUNT)
KEY: Key = ("r", 1)
GONE_SECONDS = 3.0


class SendingSide:
    """The sending side in this process, for a receiving side in another one."""

    def __init__(self, decode: ReceivingProcess) -> None:
        self.decode = decode
        self.ends = Ends()
        self.host = SendingHost(self.ends)
        pool = KVPool(LAYOUT, len(BLOCKS))
        raw(pool).random_(0, 256)
        self.digest = digest(content(pool, BLOCKS, COUNT))
        transports = available_transports(HOST)
        self.client = HandoffClient(setup(SENDER, pool, PeerTable([decode.peer]), CONFIG, transports), self.host)

    def begin(self, key: Key) -> None:
        self.decode.expect(key, TOKENS)
        self.client.sender.begin(key, RECEIVER, TOKENS)

    def compute(self, key: Key) -> None:
        self.begin(key)
        self.client.sender.finished(key, FIRST_TOKEN, self.host.hold(BLOCKS))

    async def hand_over(self, key: Key) -> None:
        """Hands the prompt over, and waits until both ends have reported it."""
        self.compute(key)
        await self.ends.until(lambda: key in self.ends.exported and key in self.decode.reported(), 30)

    async def freed(self, key: Key) -> float:
        """Waits until the hand-off has failed here and every hold is released; seconds that it took."""
        started = asyncio.get_running_loop().time()
        await self.ends.until(lambda: key in self.ends.export_failed and not self.host.leaked)
        return asyncio.get_running_loop().time() - started


def test_a_killed_decode_worker_frees_the_blocks_held_for_it() -> None:
    async def test(decode: ReceivingProcess) -> None:
        prefill = SendingSide(decode)
        await prefill.hand_over(KEY)
        assert decode.reported()[KEY] == prefill.digest
        assert not prefill.host.leaked

        later: Key = ("r", 2)
        prefill.begin(later)
        prefill.client.sender.progress(later, prefill.host.hold(BLOCKS[:20]))
        decode.signal(signal.SIGKILL)
        assert await prefill.freed(later) < GONE_SECONDS
        assert prefill.ends.export_failed[later][0].retryable
        await prefill.client.close()

    with receiving_process(CONFIG) as decode:
        asyncio.run(test(decode))


def test_a_decode_worker_that_was_frozen_commits_nothing_of_a_hand_off_given_up_meanwhile() -> None:
    async def test(decode: ReceivingProcess) -> None:
        prefill = SendingSide(decode)
        await prefill.hand_over(("warm", 1))
        decode.signal(signal.SIGSTOP)
        prefill.compute(KEY)
        assert await prefill.freed(KEY) < GONE_SECONDS
        decode.signal(signal.SIGCONT)
        # A later attempt arrives. It may take two, while the woken process still has its old stream.
        for attempt in (2, 3):
            key = "r", attempt
            prefill.compute(key)
            await prefill.ends.until(lambda key=key: key in prefill.ends.exported or key in prefill.ends.export_failed)
            if key in prefill.ends.exported:
                break
        assert key in prefill.ends.exported
        await prefill.ends.until(lambda: KEY in decode.reported())
        assert not isinstance(decode.reported()[KEY], int), "the woken process committed an attempt that was given up"
        await prefill.client.close()

    with receiving_process(CONFIG) as decode:
        asyncio.run(test(decode))


def receiver_of(world: Pair) -> Peer:
    """The membership entry of the receiving side in this process."""
    return Peer(RECEIVER, f"{HOST}:{world.port}", tuple(entries(available_transports(HOST))))


async def freed(world: Pair) -> float:
    """Waits until the hand-off has failed here and its reservation is released; seconds that it took."""
    started = asyncio.get_running_loop().time()
    await world.ends.until(lambda: KEY in world.ends.import_failed and not world.receiving.leaked)
    return asyncio.get_running_loop().time() - started


def test_a_killed_prefill_worker_frees_the_reservation() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.expect(KEY, TOKENS)
            with sending_process(CONFIG, receiver_of(world), KEY, TOKENS) as prefill:
                await world.ends.until(lambda: raw(world.target).any(), 60)
                prefill.signal(signal.SIGKILL)
                assert await freed(world) < GONE_SECONDS

    asyncio.run(test())


def test_a_frozen_prefill_worker_is_given_up_and_its_late_frames_are_not_written() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, lease_seconds=1.0)) as world:
            world.expect(KEY, TOKENS)
            with sending_process(CONFIG, receiver_of(world), KEY, TOKENS) as prefill:
                await world.ends.until(lambda: raw(world.target).any(), 60)
                prefill.signal(signal.SIGSTOP)
                assert await freed(world) < GONE_SECONDS
                raw(world.target).fill_(5)
                prefill.connection.send("finish")
                prefill.signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                assert torch.all(raw(world.target) == 5), "a worker that was given up wrote to the pool"
                assert not world.ends.imported

    asyncio.run(test())
