"""The KV hand-off: GB/s by size beside a bare Gloo send of the same bytes, and the part that prefill doesn't hide.

    python benchmarks/transfer.py [--sizes 65536 ...] [--transports shm tcp ...] [--pin] [--model FOLDER] [--out FILE]

One JSON line per cell, with its limit.

    throughput   a real sender and receiver, two processes on loopback. The offer is granted before the clock starts,
                 and all of the KV is ready at once, so no compute hides anything. The clock stops at the
                 acknowledgement. Bare Gloo sends the same bytes in one message, and the other end answers with one
                 byte. Hand-offs with and without checksums, with each setting of `transfer.encrypt` that changes what
                 the transport does, and the bare send take turns, repeat by repeat. CPU seconds per GB are those of
                 both processes. Without --pin the kernel chooses the cores, and the figures vary with its choice;
                 --pin gives each process its own core.
    exposed      the whole road (gRPC client, router, one prefill and one decode worker), cold prompts, one at a time:
                 from the end of prefill to the decode worker's acknowledged commit. Needs --model, a checkpoint in
                 bfloat16. With `--stages 1 2`, pairs whose prefill workers have one pipeline stage and two take turns.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from clusters import local_pair
from torch.distributed import FileStore, ProcessGroupGloo
from turns import own_setting, save, spread

from kvrelay.client import Timeline
from kvrelay.cluster import certificates
from kvrelay.decode_worker.handoff_service import HandoffService
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.rpc.certificates import part_files
from kvrelay.transfer.config import Encrypt, TransferConfig
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.registry import available_transports, entries
from support.forks import spawned
from support.handoff import HOST, RECEIVER, SENDER, Ends, ReceivingHost, SendingHost, StandInHold, setup
from support.secrets import credentials

LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
"""KV layout of a 1B Llama: 32 KiB per token, 512 KiB per block."""
SIZES = [2**16, 2**20, 2**22, 2**23, 2**25, 2**27, 2**28]
ASKED_RATIO, ASKED_FROM_BYTES = 0.85, 2**23
ASKED_EXPOSED_PERCENT = 5.0
TIMEOUT = timedelta(seconds=60)
ENCRYPTED: dict[str, tuple[Encrypt, ...]] = {"tcp": ("integrity", "full"), "gloo": ("integrity",)}
"""The settings of `transfer.encrypt` that change what a transport does."""


def pool_of(largest: int) -> KVPool:
    """A pool for hand-offs of up to so many bytes."""
    return KVPool(LAYOUT, LAYOUT.blocks_for(largest // LAYOUT.token_bytes))


def offered(config: TransferConfig, folder: str) -> dict[str, Transport]:
    """The transports of one end; `folder` has its certificates."""
    files = part_files(Path(folder), "worker") if config.encrypt == "full" else None
    return available_transports(HOST, config.transport, encrypt=config.encrypt, certificates=files)


class Sending(SendingHost):
    """The sender's host: one hand-off at a time."""

    ended: asyncio.Future[None]

    def exported(self, key: Key, stats: TransferStats) -> None:
        self.ended.set_result(None)

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        raise SystemExit(f"hand-off {key} failed: {code.value}: {message}")


class Receiving(ReceivingHost):
    """The receiver's host: reports each grant, and frees the blocks of what has come."""

    def __init__(self, there: Connection, blocks: int) -> None:
        super().__init__(Ends(), blocks)
        self._there = there

    def reserve(self, key: Key, answer: Callable[[StandInHold | None], None], *, passing: bool) -> None:
        def granted(reservation: StandInHold | None) -> None:
            self._there.send("granted")
            answer(reservation)

        super().reserve(key, granted, passing=passing)

    def imported(self, key: Key, reservation: StandInHold, first_token: int, stats: TransferStats, states: Any) -> None:
        """The sender's end stops the clock."""
        self.release(reservation)


def bare_group(folder: str, rank: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's own stub
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._threads = 1
    options._timeout = TIMEOUT
    return ProcessGroupGloo(FileStore(str(Path(folder) / "store"), 2), rank, 2, options)


def receiver(there: Connection, folder: str, largest: int, configs: Sequence[TransferConfig], core: int | None) -> None:
    """The process of the decode side, and of the bare group's rank 1."""
    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})
    asyncio.run(_receive(there, folder, largest, configs))


async def _receive(there: Connection, folder: str, largest: int, configs: Sequence[TransferConfig]) -> None:
    pool = pool_of(largest)
    host = Receiving(there, pool.num_blocks)
    services, ports = [], []
    async with AsyncExitStack() as stack:
        for config in configs:
            senders = PeerTable([Peer(SENDER, address="")])
            services.append(HandoffService(setup(RECEIVER, pool, senders, config, offered(config, folder)), host))
            server = credentials("worker").server()
            services[-1].add_to(server)
            ports.append(server.add_insecure_port(f"{HOST}:0"))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            stack.push_async_callback(services[-1].close)
        there.send(ports)
        group = await asyncio.to_thread(bare_group, folder, 1)
        into, byte = torch.zeros(largest, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        while (command := await asyncio.to_thread(there.recv)) is not None:
            what, key, size = command
            if what == "bare":
                work = group.recv([into[:size]], 0, 1)
                there.send("granted")
                await asyncio.to_thread(lambda w=work: (w.wait(TIMEOUT), group.send([byte], 0, 2).wait(TIMEOUT)))
            else:
                tokens = range(size // LAYOUT.token_bytes)
                host.need[key] = LAYOUT.blocks_for(len(tokens))
                services[what].receiver.expect(key, SENDER, tokens)


class PrefillSide:
    """The prefill side, in this process."""

    def __init__(
        self, here: Connection, folder: str, largest: int, configs: Sequence[TransferConfig], ports: list[int]
    ) -> None:
        self._here = here
        pool = pool_of(largest)
        pool.tensor.view(torch.uint8).random_(0, 256)
        # In a pool that has been in use, a sequence's blocks are no neighbours.
        self._blocks = random.Random(2).sample(range(pool.num_blocks), pool.num_blocks)
        self._group = bare_group(folder, 0)
        self._data = torch.zeros(largest, dtype=torch.uint8).random_(0, 256)
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._host = Sending(Ends())
        self._count = 0
        self._clients = []
        for config, port in zip(configs, ports, strict=True):
            transports = offered(config, folder)
            peers = PeerTable([Peer(RECEIVER, f"{HOST}:{port}", tuple(entries(transports)))])
            self._clients.append(HandoffClient(setup(SENDER, pool, peers, config, transports), self._host))

    async def _granted(self) -> None:
        """Waits until the other end has granted; the grant itself may arrive some milliseconds later."""
        await asyncio.to_thread(self._here.recv)
        await asyncio.sleep(0.01)

    async def bare(self, size: int) -> float:
        """Seconds for one message of `size` bytes there, and a byte back."""
        self._here.send(("bare", None, size))
        await self._granted()

        def send() -> float:
            start = time.perf_counter()
            sent = self._group.send([self._data[:size]], 1, 1)
            self._group.recv([self._byte], 1, 2).wait(TIMEOUT)
            sent.wait(TIMEOUT)
            return time.perf_counter() - start

        return await asyncio.to_thread(send)

    async def handoff(self, which: int, size: int) -> float:
        """Seconds from the end of the prompt's computation to the acknowledgement."""
        self._count += 1
        key, tokens = (f"r{self._count}", 1), range(size // LAYOUT.token_bytes)
        sender, hold = self._clients[which].sender, StandInHold(self._blocks[: LAYOUT.blocks_for(len(tokens))])
        self._host.ended = asyncio.get_running_loop().create_future()
        self._here.send((which, key, size))
        sender.begin(key, RECEIVER, tokens)
        await self._granted()
        start = time.perf_counter()
        sender.finished(key, 7, hold)
        await self._host.ended
        return time.perf_counter() - start

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self._here.send(None)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(
    sender: PrefillSide, configs: Mapping[str, TransferConfig], sizes: Sequence[int], repeats: int, pids: Sequence[int]
) -> list[dict[str, Any]]:
    """`configs` are those of `sender`, in its order, by the name of the kind."""
    cells = []
    for size in sizes:
        kinds: dict[str, Callable[[], Any]] = {"bare": partial(sender.bare, size)}
        kinds |= {name: partial(sender.handoff, number, size) for number, name in enumerate(configs)}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        cpu = dict.fromkeys(kinds, 0.0)
        for repeat in range(repeats + 2):
            # Each kind goes first in turn, so that other processes on the machine disturb all kinds alike.
            turn = repeat % len(kinds)
            names = list(kinds)[turn:] + list(kinds)[:turn]
            for kind in names:
                before = cpu_seconds(pids)
                took = await kinds[kind]()
                if repeat >= 2:
                    seconds[kind].append(took)
                    cpu[kind] += cpu_seconds(pids) - before
        bare = statistics.median(seconds["bare"])
        for kind, times in seconds.items():
            cell: dict[str, Any] = {"part": "throughput", "bytes": size, "kind": kind}
            cell["transport"] = "gloo, bare" if kind == "bare" else configs["checksums on"].transport
            cell["GB/s"] = spread([size / each / 1e9 for each in times])
            if size >= ASKED_FROM_BYTES:
                # /proc counts in ticks of 10 ms, and the exchange around a send counts too.
                cell["cpu_seconds_per_GB"] = round(cpu[kind] / len(times) / (size / 1e9), 2)
            if kind != "bare":
                cell["of_bare"] = round(bare / statistics.median(times), 3)
                pairs = zip(seconds["bare"], times, strict=True)
                cell["of_bare_by_repeat"] = spread([other / own for other, own in pairs])
            if kind == "checksums on" and size >= ASKED_FROM_BYTES:
                cell["asked"] = ASKED_RATIO
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    return cells


def throughput(sizes: Sequence[int], repeats: int, transport: str, pin: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if pin:
        os.sched_setaffinity(0, cores[:1])
    on = TransferConfig(transport=transport)
    configs = {"checksums on": on, "checksums off": replace(on, checksum=False)}
    for encrypt in ENCRYPTED.get(transport, ()):
        configs[encrypt] = replace(on, encrypt=encrypt)
    with tempfile.TemporaryDirectory(prefix="kvrelay-transfer-") as folder:
        certificates.make(Path(folder), 365, keep_authority=False)

        async def run(here: Connection, other: int) -> list[dict[str, Any]]:
            sender = PrefillSide(here, folder, max(sizes), list(configs.values()), here.recv())
            cells = await measure(sender, configs, sizes, repeats, [os.getpid(), other])
            await sender.close()
            return cells

        core = cores[-1] if pin else None
        try:
            with spawned(receiver, folder, max(sizes), list(configs.values()), core) as (process, here):
                cells = asyncio.run(run(here, process.pid or 0))
                process.join(30)
                return cells
        finally:
            os.sched_setaffinity(0, cores)


def exposed(model: Path, lengths: Sequence[int], repeats: int, stages: Sequence[int]) -> list[dict[str, Any]]:
    """Pairs whose prefill workers have so many stages, side by side, which get each prompt in turn."""
    cells = []
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="kvrelay-transfer-") as folder, ExitStack() as stack:
        clients = {each: stack.enter_context(local_pair(model, Path(folder), "bfloat16", each)) for each in stages}
        for length in lengths:
            timelines: dict[int, list[Timeline]] = {each: [] for each in stages}
            for number in range(repeats + 1):
                prompt = rng.choices(range(2, 4000), k=length)
                for each, client in clients.items():
                    done = client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, timeout=120)
                    if number:  # the first one warms up
                        timelines[each].append(done.timeline)
            for each, seen in timelines.items():
                share = [100 * timeline.handoff_seconds / timeline.prefill_seconds for timeline in seen]
                cell = {
                    "part": "exposed",
                    "tokens": length,
                    "stages": each,
                    "bytes": seen[0].transfer_bytes,
                    "handoff_ms": spread([timeline.handoff_seconds * 1e3 for timeline in seen], 2),
                    "prefill_ms": spread([timeline.prefill_seconds * 1e3 for timeline in seen], 1),
                    "percent_of_prefill": spread(share, 2),
                    "asked": ASKED_EXPOSED_PERCENT if length >= 2048 else None,
                }
                print(json.dumps(cell), flush=True)
                cells.append(cell)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes; multiples of 32 KiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transports", nargs="*", default=["shm", "tcp", "gloo"], help="best first, one after another")
    parser.add_argument("--pin", action="store_true", help="each process of the throughput part on a core of its own")
    parser.add_argument("--model", type=Path, help="checkpoint of the exposed part")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048], help="of the exposed part's prompts")
    parser.add_argument("--stages", type=int, nargs="*", default=[1], help="of its prefill workers: a pair for each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wrong = [size for size in args.sizes if size < 1 or size % LAYOUT.token_bytes]
    if wrong:
        parser.error(f"--sizes {wrong[0]}: allowed are multiples of {LAYOUT.token_bytes}")
    cells = []
    for transport in args.transports if args.sizes else ():
        cells += throughput(args.sizes, args.repeats, transport, args.pin)
    cells += exposed(args.model, args.tokens, args.repeats, args.stages) if args.model is not None else []
    if args.out is not None:
        pinned = {"frame_bytes": TransferConfig().frame_bytes, "pinned": args.pin, "cells": cells}
        save(args.out, own_setting("torch", "grpcio", "xxhash") | pinned)


if __name__ == "__main__":
    main()
