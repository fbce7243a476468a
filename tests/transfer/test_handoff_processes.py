"""Hand-offs between processes, one of which is killed or frozen: the other soon frees its blocks, without a commit."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import psutil
import pytest
import torch
from test_handoff_messages import mutated

from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import Key
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.transports.registry import available_transports, entries
from support.handoff import (
    HOST,
    LAYOUT,
    RECEIVER,
    Pair,
    SendingSide,
    blocks_of,
    content,
    digest,
    pair,
    prompt,
    raw,
    sending,
)
from support.handoff_process import ReceivingProcess, SideProcess, receiving_process, sending_process
from support.raw_peer import HELLO, control

pytestmark = pytest.mark.anyio
CONFIG = TransferConfig(frame_timeout_seconds=1.0, lease_seconds=2.0, frame_bytes=65536)
COUNT = 600
TOKENS, BLOCKS = prompt(COUNT), blocks_of(COUNT)
KEY: Key = ("r", 1)
GONE_SECONDS = 3.0
MUTATIONS = 300


def begin(prefill: SendingSide, decode: ReceivingProcess, key: Key) -> None:
    decode.expect(key, TOKENS)
    prefill.sender.begin(key, RECEIVER, TOKENS)


@asynccontextmanager
async def a_prefill_side(decode: ReceivingProcess) -> AsyncIterator[SendingSide]:
    """The sending side in this process; one hand-off has arrived."""
    source, first = KVPool(LAYOUT, len(BLOCKS)), ("first", 1)
    raw(source).random_(0, 256)
    async with sending(decode.peer, source, CONFIG) as prefill:
        begin(prefill, decode, first)
        prefill.compute(first, BLOCKS)
        assert await prefill.sent(first)
        await prefill.ends.until(lambda: first in decode.reported())
        assert decode.reported()[first] == digest(content(source, BLOCKS, COUNT))
        yield prefill


async def test_a_killed_decode_worker_frees_the_blocks_held_for_it() -> None:
    with receiving_process(CONFIG) as decode:
        async with a_prefill_side(decode) as prefill:
            begin(prefill, decode, KEY)
            prefill.sender.progress(KEY, prefill.sending.hold(BLOCKS[:20]))
            decode.signal(signal.SIGKILL)
            async with asyncio.timeout(GONE_SECONDS):
                assert not await prefill.sent(KEY)
            assert prefill.ends.export_failed[KEY][0].retryable


async def test_a_decode_worker_that_was_frozen_commits_nothing_of_a_hand_off_given_up_meanwhile() -> None:
    with receiving_process(CONFIG) as decode:
        async with a_prefill_side(decode) as prefill:
            decode.signal(signal.SIGSTOP)
            begin(prefill, decode, KEY)
            prefill.compute(KEY, BLOCKS)
            async with asyncio.timeout(GONE_SECONDS):
                assert not await prefill.sent(KEY)
            decode.signal(signal.SIGCONT)
            # A later attempt arrives. It may take two, while the woken process still has its old stream.
            for attempt in (2, 3):
                begin(prefill, decode, ("r", attempt))
                prefill.compute(("r", attempt), BLOCKS)
                if arrived := await prefill.sent(("r", attempt)):
                    break
            assert arrived
            await prefill.ends.until(lambda: KEY in decode.reported())
            outcome = decode.reported()[KEY]
            assert not isinstance(outcome, int), "the woken process committed an attempt that was given up"


async def test_mutated_batches_end_no_decode_process() -> None:
    """The decode process survives every batch, and afterwards takes a valid hand-off."""
    with receiving_process(CONFIG) as decode:
        memory = psutil.Process(decode.process.pid).memory_info
        before, refused = memory().rss, set[grpc.StatusCode]()
        async with grpc.aio.insecure_channel(decode.peer.address) as channel:
            for number in range(MUTATIONS):
                peer = control(channel)
                await peer.send(HELLO)
                await peer.call.write(mutated(number))
                await peer.call.done_writing()
                async with asyncio.timeout(20):
                    try:
                        while await peer.call.read() is not grpc.aio.EOF:
                            pass
                    except grpc.aio.AioRpcError as error:
                        refused.add(error.code())
        assert refused <= {grpc.StatusCode.INVALID_ARGUMENT}
        assert memory().rss - before < 64 * 2**20
        async with a_prefill_side(decode):
            pass


@asynccontextmanager
async def half_received(world: Pair) -> AsyncIterator[SideProcess]:
    """A sending process of which some KV has arrived."""
    peer = Peer(RECEIVER, f"{HOST}:{world.port}", tuple(entries(available_transports(HOST))))
    world.expect(KEY, TOKENS)
    with sending_process(CONFIG, peer, KEY, TOKENS) as prefill:
        await world.ends.until(lambda: raw(world.target).any(), 60)
        yield prefill


async def given_up(world: Pair) -> None:
    """Waits until the hand-off has failed here and its reservation is released, as soon as it must."""
    await world.ends.until(lambda: KEY in world.ends.import_failed and not world.receiving.leaked, GONE_SECONDS)


async def test_a_killed_prefill_worker_frees_the_reservation() -> None:
    async with pair(CONFIG) as world, half_received(world) as prefill:
        prefill.signal(signal.SIGKILL)
        await given_up(world)


async def test_a_frozen_prefill_worker_is_given_up_and_its_late_frames_are_not_written() -> None:
    async with pair(replace(CONFIG, lease_seconds=1.0)) as world, half_received(world) as prefill:
        prefill.signal(signal.SIGSTOP)
        await given_up(world)
        raw(world.target).fill_(5)
        prefill.connection.send("finish")
        prefill.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert torch.all(raw(world.target) == 5), "a worker that was given up wrote to the pool"
        assert not world.ends.imported
