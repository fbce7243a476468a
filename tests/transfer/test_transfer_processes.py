"""Hand-offs between processes, one of which is killed or frozen: the survivor is soon free, and nobody is fooled."""

import asyncio
import signal
from dataclasses import replace

import torch

from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.control import LocalWorker
from kvrelay.transfer.messages import Key
from kvrelay.transfer.peers import PeerTable
from kvrelay.transfer.transports.gloo import GlooTransport
from support.decode_process import DecodeProcess, decode_process, digest
from support.handoff import LAYOUT, RECEIVER, SENDER, Ends, ExportSide, content, pair, raw
from support.prefill_process import prefill_process

CONFIG = TransferConfig(frame_timeout_seconds=1.0, lease_seconds=2.0, frame_bytes=65536)
COUNT = 600
TOKENS = [token % 100 for token in range(COUNT)]
BLOCKS = list(range(LAYOUT.blocks_for(COUNT)))
KEY: Key = ("r", 1)
GONE_SECONDS = 3.0


class Prefill:
    """A prefill side in this process."""

    def __init__(self, decode: DecodeProcess) -> None:
        self.decode = decode
        self.ends = Ends()
        self.side = ExportSide(self.ends)
        self.pool = KVPool(LAYOUT, len(BLOCKS))
        raw(self.pool).random_(0, 256)
        local = LocalWorker(*SENDER, LAYOUT, "fingerprint")
        transports = {"gloo": GlooTransport("127.0.0.1")}
        self.exporter = KVSender(local, self.pool, PeerTable([decode.peer]), CONFIG, transports, self.side)
        self.exporter.start()

    def begin(self, key: Key) -> None:
        self.decode.expect(key, TOKENS)
        self.exporter.begin(key, RECEIVER, TOKENS)

    def news(self) -> dict[Key, object]:
        self.decode.read()
        return dict(self.decode.news)

    async def free(self, key: Key) -> float:
        """Waits until the hand-off has failed here and everything is released; how long it took, in seconds."""
        started = asyncio.get_running_loop().time()
        await self.ends.until(lambda: key in self.ends.export_failed and not self.side.leaked)
        return asyncio.get_running_loop().time() - started


def test_kv_crosses_to_another_process_and_a_kill_of_that_frees_what_was_held_for_it() -> None:
    async def test(decode: DecodeProcess) -> None:
        prefill = Prefill(decode)
        prefill.begin(KEY)
        prefill.exporter.finished(KEY, 7, prefill.side.hold(BLOCKS))
        await prefill.ends.until(lambda: KEY in prefill.ends.exported and KEY in prefill.news())
        assert decode.news[KEY] == digest(content(prefill.pool, BLOCKS, COUNT))
        assert not prefill.side.leaked

        later: Key = ("r", 2)
        prefill.begin(later)
        prefill.exporter.progress(later, prefill.side.hold(BLOCKS[:20]))
        decode.signal(signal.SIGKILL)
        assert await prefill.free(later) < GONE_SECONDS
        assert prefill.ends.export_failed[later][0].retryable
        await prefill.exporter.close()

    with decode_process(CONFIG) as decode:
        asyncio.run(test(decode))


def test_a_frozen_decode_worker_is_given_up_and_after_it_wakes_commits_nothing_of_it() -> None:
    async def test(decode: DecodeProcess) -> None:
        prefill = Prefill(decode)
        prefill.begin(("warm", 1))
        prefill.exporter.finished(("warm", 1), 7, prefill.side.hold(BLOCKS))
        await prefill.ends.until(lambda: ("warm", 1) in prefill.ends.exported)
        decode.signal(signal.SIGSTOP)
        prefill.begin(KEY)
        prefill.exporter.finished(KEY, 7, prefill.side.hold(BLOCKS))
        assert await prefill.free(KEY) < GONE_SECONDS
        decode.signal(signal.SIGCONT)
        # It takes part again, under another attempt, and the old one never shows up.
        await prefill.ends.until(lambda: ("warm", 1) in prefill.news())
        second: Key = ("r", 2)
        prefill.begin(second)
        prefill.exporter.finished(second, 7, prefill.side.hold(BLOCKS))
        await prefill.ends.until(lambda: second in prefill.ends.exported or second in prefill.ends.export_failed)
        if second in prefill.ends.export_failed:  # its old stream may not have been given up yet
            third: Key = ("r", 3)
            prefill.begin(third)
            prefill.exporter.finished(third, 7, prefill.side.hold(BLOCKS))
            await prefill.ends.until(lambda: third in prefill.ends.exported)
        await prefill.ends.until(lambda: KEY in prefill.news())
        assert not isinstance(decode.news[KEY], int), "the woken worker committed what was given up"
        await prefill.exporter.close()

    with decode_process(CONFIG) as decode:
        asyncio.run(test(decode))


def test_a_killed_prefill_worker_frees_the_reservation() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.expect(KEY, TOKENS)
            with prefill_process(CONFIG, world.port, KEY, TOKENS) as prefill:
                await world.ends.until(lambda: raw(world.target).any(), 30)
                prefill.signal(signal.SIGKILL)
                started = asyncio.get_running_loop().time()
                await world.ends.until(lambda: KEY in world.ends.import_failed and not world.receiving.leaked)
                assert asyncio.get_running_loop().time() - started < GONE_SECONDS

    asyncio.run(test())


def test_a_frozen_prefill_worker_is_given_up_and_its_late_frames_touch_nothing() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, lease_seconds=1.0)) as world:
            world.expect(KEY, TOKENS)
            with prefill_process(CONFIG, world.port, KEY, TOKENS) as prefill:
                await world.ends.until(lambda: raw(world.target).any(), 30)
                prefill.signal(signal.SIGSTOP)
                started = asyncio.get_running_loop().time()
                await world.ends.until(lambda: KEY in world.ends.import_failed and not world.receiving.leaked)
                assert asyncio.get_running_loop().time() - started < GONE_SECONDS
                raw(world.target).fill_(5)
                prefill.finish()
                prefill.signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                assert torch.all(raw(world.target) == 5), "a zombie wrote to the pool"
                assert not world.ends.imported

    asyncio.run(test())
