"""Frames of KV between the GPU pools of two processes, one way and both ways, with and without prefill beside them.

    frames   what a hand-off sends: read from scattered blocks or from neighbours, checked, sent, verified, written
    bare     the link alone: buffers of the same size, neither read nor checked; its rate one way is the link's

Real links, link threads and frame jobs; announcements go through a pipe. On one GPU the link is cuda_ipc; with two,
cuda_ipc and nccl between them. In a dry run it is shm, and nothing is timed. See `gpu.py`.
"""

import asyncio
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from gpu_engine import Bench
from gpu_measure import Machine

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.kv.writes import WRITTEN
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Push
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, BlockClaim, LinkEnd, LinkSpec, LoopRuntime
from kvrelay.transfer.transports.base import Link, Pending
from kvrelay.transfer.transports.registry import available_transports

LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", order="HND")
"""Of an 8B Llama: 2 MiB per block."""
TINY = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, dtype="float16", order="HND")
FRAMES = 64
"""Of each round and direction."""
ROUNDS = 5
LOAD_POOL_BYTES = 8 * 2**30
WAIT_SECONDS = 120.0
ENDS = WorkerId("left", "left"), WorkerId("right", "right")
KEY = ("benchmark", 1)


@dataclass(frozen=True)
class Plan:
    """What both ends agree on."""

    transport: str
    devices: tuple[str, str]
    """Of the left end, which also computes, and of the right one."""
    layout: KVLayout
    frame_blocks: int
    frames: int

    @property
    def gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def blocks(self) -> int:
        return self.frame_blocks * self.frames

    @property
    def nbytes(self) -> int:
        """Of one round in one direction."""
        return self.blocks * self.layout.block_bytes

    def frame(self, index: int) -> Frame:
        tokens = self.frame_blocks * self.layout.block_size
        return Frame(1, index, index * tokens, tokens, self.layout.nbytes(tokens))

    def table(self, scattered: bool, seed: int) -> list[int]:
        """The blocks of a round, in order; the receiver's are scattered always."""
        blocks = list(range(self.blocks))
        if scattered:
            random.Random(seed).shuffle(blocks)
        return blocks


class Bare:
    """Sends, or receives, a buffer as it is."""

    key = None
    written = WRITTEN

    def __init__(self, nbytes: int, send: Callable[[], None] | None, end: Callable[[Outcome], None]) -> None:
        """`send` announces; None receives."""
        self._nbytes = nbytes
        self._send = send
        self._end = end

    def prepare(self, link: Link, buffer: torch.Tensor) -> None:
        """Never called."""

    def begin(self, link: Link, buffer: torch.Tensor) -> Pending:
        if self._send is None:
            return link.recv(buffer[: self._nbytes])
        self._send()
        return link.send(buffer[: self._nbytes])

    def done(self, buffer: torch.Tensor) -> None:
        self._end(Outcome.VERIFIED)

    def fail(self, message: str) -> None:
        self._end(Outcome.LOST)


class End:
    """One process's end of two links: it sends on one and receives on the other."""

    def __init__(self, plan: Plan, side: int, pipe: Connection) -> None:
        self.plan = plan
        self._side = side
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._runtime = LoopRuntime()
        device = plan.devices[side]
        if plan.gpu:
            torch.cuda.set_device(device)
        self.source, self.target = (KVPool(plan.layout, plan.blocks, device) for _ in range(2))
        self.source.bytes.random_(0, 256)
        if plan.gpu:
            for pool in (self.source, self.target):
                pool.warm_up()
            self.source.bytes.random_(0, 256)
            torch.cuda.synchronize()
        self._senders, self._receivers = (PoolFrames(pool, True) for pool in (self.source, self.target))
        here, there = (LocalWorker(ENDS[end], plan.layout, "", plan.gpu) for end in (side, 1 - side))
        self._hello = there.hello(here.id, TransferConfig())
        timeouts = LinkTimeouts(frame=20.0, dial=30.0)
        # A link manager has one link for each peer.
        self._managers = [
            LinkManager(
                available_transports("127.0.0.1", plan.transport, plan.gpu),
                LinkLimits(2, 2**36),
                timeouts,
                plan.transport,
                self._runtime,
            )
            for _ in range(2)
        ]
        self._round: dict[str, Any] = {}
        self._expected = self._arrived = 0
        self._over: asyncio.Future[None] | None = None
        self._heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        for link, manager in enumerate(self._managers):
            spec = LinkSpec(
                ENDS[side].incarnation,
                ENDS[1 - side].incarnation,
                1,
                plan.transport,
                SENDER if link == side else RECEIVER,
                plan.frame(0).nbytes,
                partial(self._tell, "meet", link),
                self._link_ended,
                lambda: False,
            )
            manager.open(spec)
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def _peer(self) -> str:
        return ENDS[1 - self._side].incarnation

    def _tell(self, *message: Any) -> None:
        self._pipe.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._runtime.post(self._hear, self._pipe.recv())
        except (EOFError, OSError):
            self._runtime.post(self._heard.put_nowait, ("closed",))

    def _link_ended(self, end: LinkEnd) -> None:
        self._heard.put_nowait(("failed", end.reason))

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("meet", link, entry, value):
                self._managers[link].meet(self._peer, 1, entry, value)
            case ("push", index):
                self._receive(index)
            case _:
                self._heard.put_nowait(message)

    async def next(self, *names: str) -> tuple[Any, ...]:
        """The next message of one of these names.

        Raises:
            RuntimeError: a link has ended, or the other process has.
        """
        message = await asyncio.wait_for(self._heard.get(), WAIT_SECONDS)
        if message[0] not in names:
            raise RuntimeError(f"{' '.join(map(str, message))}; expected was {' or '.join(names)}")
        return message

    def send(self, bare: bool, scattered: bool) -> None:
        """Queues the frames of a round."""
        plan, table = self.plan, self.plan.table(scattered, self._side)
        for index in range(plan.frames):
            frame, announce = plan.frame(index), partial(self._tell, "push", index)
            job: Any
            if bare:
                job = Bare(frame.nbytes, announce, lambda outcome: None)
            else:

                def push(_: Push, announce: Callable[[], None] = announce) -> None:
                    announce()

                job = self._senders.send(KEY, frame, BlockClaim(), table, self._hello, push, lambda: None)
            self._managers[self._side].submit(self._peer, 1, job)

    def expect(self, bare: bool) -> "asyncio.Future[None]":
        """The end of a round that the other end sends."""
        self._round = {"bare": bare, "table": self.plan.table(True, 2 + self._side)}
        self._arrived = 0
        self._over = self._loop.create_future()
        return self._over

    def _receive(self, index: int) -> None:
        frame, end = self.plan.frame(index), partial(self._runtime.post, self._one_arrived)
        job: Any
        if self._round["bare"]:
            job = Bare(frame.nbytes, None, end)
        else:
            job = self._receivers.receive(KEY, frame, BlockClaim(), self._round["table"], 0, self._hello, end)
        self._managers[1 - self._side].submit(self._peer, 1, job)

    def _one_arrived(self, outcome: Outcome) -> None:
        if outcome is not Outcome.VERIFIED:
            self._heard.put_nowait(("failed", f"a frame is {outcome.name}"))
        self._arrived += 1
        if self._arrived == self.plan.frames and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def digest(self, pool: KVPool, table: list[int]) -> str:
        """Of the KV in these blocks."""
        return xxhash.xxh3_64_hexdigest(pool.bytes[torch.tensor(table, device=pool.bytes.device)].cpu().numpy().data)

    async def close(self) -> None:
        for manager in self._managers:
            await manager.shut_down()


def right(pipe: Connection, plan: Plan) -> None:
    """The process of the right end."""
    asyncio.run(_serve(pipe, plan))


async def _serve(pipe: Connection, plan: Plan) -> None:
    end = End(plan, 1, pipe)
    try:
        while True:
            message = await end.next("round", "digest", "closed", "failed")
            if message[0] == "round":
                _, bare, scattered, both = message
                over = end.expect(bare)
                pipe.send(("ready",))
                if both:
                    end.send(bare, scattered)
                await over
                pipe.send(("over",))
            elif message[0] == "digest":
                sent, found = plan.table(message[1], 1), plan.table(True, 3)
                pipe.send(("digest", end.digest(end.source, sent), end.digest(end.target, found)))
            else:
                return
    finally:
        await end.close()


class Load:
    """Prompts that a thread computes one after the other, on the left end's device."""

    def __init__(self, machine: Machine) -> None:
        self._bench = Bench(machine, LOAD_POOL_BYTES)
        self._length = 16 if machine.dry else 8192
        self._stop = threading.Event()
        self.tokens = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._bench.prefill(self._length, 1)
            self.tokens += self._length


def plans(machine: Machine) -> Iterator[Plan]:
    if machine.dry:
        yield Plan("shm", ("cpu", "cpu"), TINY, 2, 4)
        return
    blocks = TransferConfig().gpu_frame_bytes // LAYOUT.block_bytes
    yield Plan("cuda_ipc", ("cuda:0", "cuda:0"), LAYOUT, blocks, FRAMES)
    if torch.cuda.device_count() > 1:
        for transport in ("cuda_ipc", "nccl"):
            yield Plan(transport, ("cuda:0", "cuda:1"), LAYOUT, blocks, FRAMES)


KINDS = (("bare", True, True), ("scattered", False, True), ("neighbours", False, False))
"""Name, whether it is the bare link, whether the sender's blocks are scattered."""


def measure(machine: Machine, rows: list[dict[str, Any]], deadline: float) -> bool:
    """Adds a row for each link, kind, direction and load. False if time ran out."""
    load = Load(machine)
    for plan in plans(machine):
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return False
        context = multiprocessing.get_context("spawn")
        pipe, there = context.Pipe()
        process = context.Process(target=right, args=(there, plan), daemon=True)
        process.start()
        there.close()
        try:
            rows += asyncio.run(_measure(machine, plan, pipe, load))
        finally:
            pipe.close()
            process.join(20)
            process.kill()
    return True


async def _measure(machine: Machine, plan: Plan, pipe: Connection, load: Load) -> list[dict[str, Any]]:
    end = End(plan, 0, pipe)
    cells = [(*kind, both, loaded) for loaded in (False, True) for both in (False, True) for kind in KINDS]
    seconds: dict[Any, list[float]] = {cell: [] for cell in cells}
    prefilled: dict[Any, int] = dict.fromkeys(cells, 0)
    """Tokens in all rounds."""
    sound: dict[Any, bool] = {}

    async def one_round(bare: bool, scattered: bool, both: bool) -> float:
        over = end.expect(bare) if both else None
        pipe.send(("round", bare, scattered, both))
        await end.next("ready")
        began = time.perf_counter()
        end.send(bare, scattered)
        await end.next("over")
        if over is not None:
            await asyncio.wait_for(over, WAIT_SECONDS)
        return time.perf_counter() - began

    try:
        for loaded in (False, True):
            if loaded:
                load.start()
            try:
                for _ in range(1 if machine.dry else ROUNDS):
                    for cell in cells:
                        name, bare, scattered, both, of_load = cell
                        if of_load != loaded:
                            continue
                        before = load.tokens
                        seconds[cell].append(await one_round(bare, scattered, both))
                        prefilled[cell] += load.tokens - before
                        # Once, as it takes longer than a round.
                        if cell not in sound:
                            sound[cell] = bare or await _same(end, pipe, scattered, both)
            finally:
                load.stop()
    finally:
        await end.close()
    link = plan.nbytes / min(seconds[cells[0]])
    found = []
    for cell in cells:
        name, _, _, both, loaded = cell
        nbytes, took = plan.nbytes * (1 + both), sorted(seconds[cell])[len(seconds[cell]) // 2]
        row = {
            "link": plan.transport,
            "devices": "-".join(plan.devices),
            "kind": name,
            "both_ways": both,
            "prefill_beside": loaded,
            "bytes": nbytes,
            "sound": sound[cell],
        }
        if not machine.dry:
            row |= {
                "seconds": took,
                "gb_per_s": nbytes / took / 1e9,
                "share_of_link": nbytes / (1 + both) / took / link,
                "prefill_tokens_per_s": prefilled[cell] / sum(seconds[cell]),
            }
        found.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return found


async def _same(end: End, pipe: Connection, scattered: bool, both: bool) -> bool:
    """Whether what arrived is what was sent."""
    pipe.send(("digest", scattered))
    _, theirs, arrived = await end.next("digest")
    same = arrived == end.digest(end.source, end.plan.table(scattered, 0))
    return same and (not both or theirs == end.digest(end.target, end.plan.table(True, 2)))
