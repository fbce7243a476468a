"""Pairs that connect and part leave nothing behind: threads, sockets and memory stay as they were."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.transports.registry import available_transports
from support.handoff import LAYOUT, RECEIVER, Pair, pair

TESTS = Path(__file__).parent.parent
SETTLED = 300
"""Cycles after which nothing may grow any more."""
TOKENS = list(range(40))
BLOCKS = list(range(LAYOUT.blocks_for(len(TOKENS))))
CYCLE_SECONDS = 20.0
GROWTH_BYTES = 6 * 1024
"""Bytes that memory may grow by in each cycle: the smallest leak of a link's parts (a thread's stack, a socket's
buffers, a group)."""


@dataclass(frozen=True)
class Size:
    """Threads, open files and memory of a process."""

    threads: int
    files: int
    memory: int


def size() -> Size:
    gc.collect()
    process = psutil.Process()
    return Size(threading.active_count(), process.num_fds(), process.memory_info().rss)


async def cycle(world: Pair, number: int) -> None:
    """The pair connects, hands one prompt over, and drops all that it knows of each other."""
    key = (f"cycle {number}", 1)
    world.announce(key, TOKENS)
    world.compute(key, BLOCKS)
    await world.ends.until(lambda: key in world.ends.exported and key in world.ends.imported, CYCLE_SECONDS)
    reservation, _, _ = world.ends.imported.pop(key)
    world.receiving.free += reservation.hold.blocks
    del world.ends.exported[key], world.receiving.reservations[key]
    world.sending.holds.clear()
    world.sender.end_pairs(Code.CLOSED)
    await world.ends.until(lambda: world.sender.epoch(RECEIVER.incarnation) == 0, CYCLE_SECONDS)


async def cycles(transport: str, count: int) -> list[Size]:
    """Sizes after each 100 cycles, and after the end of all."""
    config = TransferConfig(transport=transport, frame_timeout_seconds=2.0)  # type: ignore[arg-type]  # from argv
    here, there = (available_transports("127.0.0.1", transport) for _ in range(2))
    sizes = [size()]
    async with pair(config, transports=(here, there)) as world:
        for number in range(count):
            await cycle(world, number)
            if number % 100 == 99:
                await world.ends.until(lambda: threading.active_count() <= sizes[0].threads + 8, CYCLE_SECONDS)
                sizes.append(size())
    return [*sizes, size()]


@pytest.mark.parametrize(
    ("transport", "cycles"),
    [
        pytest.param("shm", 600, marks=pytest.mark.more),
        *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in ("shm", "tcp", "gloo")),
    ],
)
def test_hundreds_of_pairs_leave_nothing_behind(transport: str, cycles: int) -> None:
    """The cycles run in a process of their own, so that nothing else changes its memory."""
    run = subprocess.run(
        [sys.executable, __file__, transport, str(cycles)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    sizes = [Size(**fields) for fields in json.loads(run.stdout)]
    print("\n".join(map(str, sizes)))
    settled, later = sizes[1 : SETTLED // 100 + 1], sizes[-3:]
    assert min(each.threads for each in later) <= max(each.threads for each in settled)
    assert min(each.files for each in later) <= max(each.files for each in settled)
    assert min(each.memory for each in later) - settled[-1].memory < (cycles - SETTLED) * GROWTH_BYTES


if __name__ == "__main__":
    started = time.monotonic()
    measured = asyncio.run(cycles(sys.argv[1], int(sys.argv[2])))
    print(json.dumps([vars(each) for each in measured]))
    print(f"{time.monotonic() - started:.1f} s", file=sys.stderr)
