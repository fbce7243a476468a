"""The KV hand-off: GB/s by size beside a bare Gloo send of the same bytes, and what of it prefill doesn't hide.

    python benchmarks/transfer.py [--sizes 65536 ...] [--transports shm tcp ...] [--pin] [--model FOLDER] [--out FILE]

One JSON line a cell, the limit asked for beside it.

    throughput   the real `HandoffClient` and `HandoffService`, two processes on loopback. The offer is granted before
                 the clock starts, and all of the KV is computed, so that no compute hides the transfer. The clock stops
                 at the acknowledgement. Bare Gloo sends the same bytes in one message, and the other end answers with
                 one byte. Hand-offs with and without checksums and the bare send take turns, repeat by repeat. CPU
                 seconds are those of all threads of both processes, for each GB. The kernel places threads on cores
                 differently from run to run, which changes the figures; --pin gives each process a core.
    exposed      a whole cluster (gRPC client, router, one prefill and one decode worker), cold prompts, one at a time:
                 from the end of prefill to the decode worker's acknowledged commit. Needs --model, a checkpoint in
                 bfloat16.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch
from torch.distributed import FileStore, ProcessGroupGloo

from kvrelay.client import Client
from kvrelay.decode_worker.handoff_service import HandoffService
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.internal.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from kvrelay.prefill_worker.handoff_client import HandoffClient
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
from kvrelay.transfer.transports.registry import available_transports, entries

LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
"""Of a 1B Llama: 32 KiB a token, 512 KiB a block."""
SIZES = [2**16, 2**20, 2**22, 2**23, 2**25, 2**27, 2**28]
ASKED_RATIO, ASKED_FROM_BYTES = 0.85, 2**23
ASKED_EXPOSED_PERCENT = 5.0
PREFILL, DECODE = WorkerId("prefill-0", "p"), WorkerId("decode-0", "d")
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
KVRELAY = Path(sys.executable).parent / "kvrelay"


@dataclass(eq=False)
class Hold:
    """Blocks that nobody frees."""

    blocks: list[int]


@dataclass(eq=False)
class Reservation:
    hold: Hold
    have_tokens: int = 0


class Sending:
    """The host of a `KVSender`: one hand-off at a time."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] | None = None

    def release(self, hold: Hold) -> None:
        pass

    def exported(self, key: Key, stats: TransferStats) -> None:
        if self.ended is not None:
            self.ended.set_result(None)

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        raise SystemExit(f"hand-off {key} failed: {code.value}: {message}")


class Receiving:
    """The host of a `KVReceiver`: reports each grant to the sender's process, and ignores the KV."""

    def __init__(self, connection: Connection, blocks: int) -> None:
        self._connection = connection
        # In a pool that has been in use, the blocks of a sequence do not follow each other.
        self._blocks = random.Random(1).sample(range(blocks), blocks)

    def reserve(self, key: Key, answer: Callable[[Reservation], None]) -> None:
        asyncio.get_running_loop().call_soon(self._grant, answer)

    def _grant(self, answer: Callable[[Reservation], None]) -> None:
        self._connection.send("granted")
        answer(Reservation(Hold(self._blocks)))

    def release(self, reservation: Reservation) -> None:
        pass

    def imported(self, key: Key, reservation: Reservation, first_token: int, stats: TransferStats) -> None:
        pass

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        pass  # the sender reports it


def bare_group(store: str, rank: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's own stub
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._threads = 1
    options._timeout = TIMEOUT
    return ProcessGroupGloo(FileStore(store, 2), rank, 2, options)


def transports_of(pool: KVPool, config: TransferConfig) -> dict[str, Transport]:
    return available_transports(HOST, config.transport, pool.tensor.is_cuda)


def setup(worker: WorkerId, pool: KVPool, peers: Sequence[Peer], config: TransferConfig) -> HandoffSetup:
    local = LocalWorker(worker, LAYOUT, "-", pool.tensor.is_cuda)
    frames = PoolFrames(pool, config.checksum)
    return HandoffSetup(local, frames, PeerTable(peers), config, transports_of(pool, config))


def receiver(
    there: Connection, store: str, largest: int, configs: Sequence[TransferConfig], device: str, core: int | None
) -> None:
    """The process of the decode side, and of rank 1 of the bare group."""
    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})
    asyncio.run(_receive(there, store, largest, configs, device))


async def _receive(there: Connection, store: str, largest: int, configs: Sequence[TransferConfig], device: str) -> None:
    pool = KVPool(LAYOUT, LAYOUT.blocks_for(largest // LAYOUT.token_bytes), device)
    host = Receiving(there, pool.num_blocks)
    services, servers, ports = [], [], []
    for config in configs:
        services.append(HandoffService(setup(DECODE, pool, [Peer(PREFILL, address="")], config), host))
        servers.append(grpc.aio.server(options=server_options()))
        add_HandoffServiceServicer_to_server(services[-1], servers[-1])
        ports.append(servers[-1].add_insecure_port(f"{HOST}:0"))
        await servers[-1].start()
    there.send(ports)
    group = await asyncio.to_thread(bare_group, store, 1)
    into, byte = torch.zeros(largest, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    while (command := await asyncio.to_thread(there.recv)) is not None:
        what, key, size = command
        if what == "bare":
            work = group.recv([into[:size]], 0, 1)
            there.send("granted")
            await asyncio.to_thread(lambda w=work: (w.wait(TIMEOUT), group.send([byte], 0, 2).wait(TIMEOUT)))
        else:
            services[what].receiver.expect(key, PREFILL, range(size // LAYOUT.token_bytes))
    for service, server in zip(services, servers, strict=True):
        await service.close()
        await server.stop(0)


class Sender:
    """The prefill side, in this process."""

    def __init__(
        self,
        here: Connection,
        store: str,
        largest: int,
        configs: Sequence[TransferConfig],
        ports: list[int],
        device: str,
    ) -> None:
        self._here = here
        self._pool = KVPool(LAYOUT, LAYOUT.blocks_for(largest // LAYOUT.token_bytes), device)
        self._pool.tensor.view(torch.uint8).random_(0, 256)
        self._blocks = random.Random(2).sample(range(self._pool.num_blocks), self._pool.num_blocks)
        self._group = bare_group(store, 0)
        self._data = torch.zeros(largest, dtype=torch.uint8).random_(0, 256)
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._host = Sending()
        self._count = 0
        self._clients = []
        for config, port in zip(configs, ports, strict=True):
            peer = Peer(DECODE, f"{HOST}:{port}", tuple(entries(transports_of(self._pool, config))))
            self._clients.append(HandoffClient(setup(PREFILL, self._pool, [peer], config), self._host))

    async def _granted(self) -> None:
        """Waits for the other end; its grant has arrived here some milliseconds later."""
        await asyncio.to_thread(self._here.recv)
        await asyncio.sleep(0.01)

    async def bare(self, size: int) -> float:
        """Seconds to send one message of `size` bytes and get a byte back."""
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
        """Seconds from the end of prefill to the acknowledgement."""
        self._count += 1
        key, tokens = (f"r{self._count}", 1), range(size // LAYOUT.token_bytes)
        sender = self._clients[which].sender
        self._host.ended = asyncio.get_running_loop().create_future()
        self._here.send((which, key, size))
        sender.begin(key, DECODE, tokens)
        await self._granted()
        start = time.perf_counter()
        sender.finished(key, 7, Hold(self._blocks[: LAYOUT.blocks_for(len(tokens))]))
        await self._host.ended
        return time.perf_counter() - start

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self._here.send(None)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    cells = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in cells.items()} | {"n": len(values)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(
    sender: Sender, transport: str, sizes: Sequence[int], repeats: int, pids: Sequence[int]
) -> list[dict[str, Any]]:
    cells = []
    for size in sizes:
        kinds: dict[str, Callable[[], Any]] = {
            "bare": lambda size=size: sender.bare(size),
            "checksums on": lambda size=size: sender.handoff(0, size),
            "checksums off": lambda size=size: sender.handoff(1, size),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        cpu = dict.fromkeys(kinds, 0.0)
        for repeat in range(repeats + 2):
            # Each kind goes first in turn, so that none always runs after the same other kind.
            names = list(kinds)[repeat % 3 :] + list(kinds)[: repeat % 3]
            for kind in names:
                before = cpu_seconds(pids)
                took = await kinds[kind]()
                if repeat >= 2:
                    seconds[kind].append(took)
                    cpu[kind] += cpu_seconds(pids) - before
        bare = statistics.median(seconds["bare"])
        asked = ASKED_RATIO if size >= ASKED_FROM_BYTES else None
        for kind, times in seconds.items():
            cell: dict[str, Any] = {"part": "throughput", "transport": transport, "bytes": size, "kind": kind}
            if kind == "bare":
                cell["transport"] = "gloo, bare"
            cell["GB/s"] = spread([size / each / 1e9 for each in times])
            if size >= ASKED_FROM_BYTES:
                # /proc counts in steps of 10 ms, and the messages around a send count, too.
                cell["cpu_seconds_per_GB"] = round(cpu[kind] / len(times) / (size / 1e9), 2)
            if kind != "bare":
                cell["of_bare"] = round(bare / statistics.median(times), 3)
                cell["of_bare_by_repeat"] = spread(
                    [mine / each for mine, each in zip(seconds["bare"], times, strict=True)]
                )
                cell["asked"] = asked if kind == "checksums on" else None
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    return cells


def throughput(
    sizes: Sequence[int], repeats: int, frame_bytes: int, transport: str, pin: bool, device: str = "cpu"
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if pin:
        os.sched_setaffinity(0, cores[:1])
    on = TransferConfig(frame_bytes=frame_bytes, transport=transport)
    configs = [on, replace(on, checksum=False)]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="kvrelay-transfer-") as folder:
        store = str(Path(folder) / "store")
        process = context.Process(
            target=receiver, args=(there, store, max(sizes), configs, device, cores[-1] if pin else None), daemon=True
        )
        process.start()
        there.close()

        async def run() -> list[dict[str, Any]]:
            sender = Sender(here, store, max(sizes), configs, here.recv(), device)
            cells = await measure(sender, transport, sizes, repeats, [os.getpid(), process.pid or 0])
            await sender.close()
            return cells

        try:
            cells = asyncio.run(run())
            process.join(30)
            return cells
        finally:
            process.kill()
            process.join()
            os.sched_setaffinity(0, cores)


def kvrelay(*arguments: str) -> str:
    return subprocess.run([KVRELAY, *arguments], check=True, capture_output=True, text=True, timeout=180).stdout


@contextmanager
def cluster(model: Path) -> Iterator[str]:
    """One prefill and one decode worker on `model`; the router's address."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-transfer-") as state:
        os.environ["KVRELAY_STATE_DIR"] = state
        kvrelay("up", "--detach", "--grpc-port", "0", "--model", str(model), "--dtype", "bfloat16")
        try:
            yield str(json.loads(kvrelay("status", "--json"))["router"])
        finally:
            kvrelay("down")


def exposed(model: Path, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    cells = []
    rng = random.Random(0)
    with cluster(model) as target, Client(target) as client:
        for length in lengths:
            timelines = []
            for _ in range(repeats + 1):
                prompt = rng.choices(range(2, 4000), k=length)
                done = client.complete(prompt, max_tokens=2, temperature=0.0, ignore_eos=True, timeout=120)
                timelines.append(done.timeline)
            seen = timelines[1:]
            share = [100 * each.handoff_seconds / each.prefill_seconds for each in seen]
            cell = {
                "part": "exposed",
                "tokens": length,
                "bytes": seen[0].transfer_bytes,
                "handoff_ms": spread([each.handoff_seconds * 1e3 for each in seen], 2),
                "prefill_ms": spread([each.prefill_seconds * 1e3 for each in seen], 1),
                "percent_of_prefill": spread(share, 2),
                "asked": ASKED_EXPOSED_PERCENT if length >= 2048 else None,
            }
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    return cells


def gpu_parts(sizes: Sequence[int], repeats: int, frame_bytes: int) -> list[dict[str, Any]]:
    """Throughput between two KV pools on the first GPU; without the GPU or the transport, the reason."""
    cells = []
    for transport in ("cuda_ipc", "nccl"):
        reason = None if torch.cuda.is_available() else "no GPU"
        if reason is None:
            try:
                available_transports(HOST, transport, gpu=True)
            except ValueError as error:
                reason = str(error)
        if reason is None:
            cells += throughput(sizes, repeats, frame_bytes, transport, False, "cuda:0")
        else:
            cells.append({"part": transport, "skipped": reason})
            print(json.dumps(cells[-1]))
    return cells


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes; multiples of 32 KiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--frame-bytes", type=int, default=TransferConfig().frame_bytes)
    parser.add_argument("--transports", nargs="*", default=["shm", "tcp", "gloo"], help="best first, one after another")
    parser.add_argument("--pin", action="store_true", help="each process of the throughput part on a core of its own")
    parser.add_argument("--model", type=Path, help="checkpoint of the exposed part")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wrong = [size for size in args.sizes if size < 1 or size % LAYOUT.token_bytes]
    if wrong:
        parser.error(f"--sizes {wrong[0]}: allowed are multiples of {LAYOUT.token_bytes}")
    cells = []
    for transport in args.transports if args.sizes else ():
        cells += throughput(args.sizes, args.repeats, args.frame_bytes, transport, args.pin)
    cells += exposed(args.model, args.tokens, args.repeats) if args.model is not None else []
    cells += gpu_parts(args.sizes or SIZES, args.repeats, args.frame_bytes)
    if args.out is not None:
        results = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {cpu_name()}",
            "load_at_end": round(os.getloadavg()[0], 2),
            "versions": {name: version(name) for name in ("kvrelay", "torch", "grpcio", "xxhash")}
            | {"python": platform.python_version()},
            "frame_bytes": args.frame_bytes,
            "pinned": args.pin,
            "cells": cells,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
