"""Size of a KV pool whose `kv_memory_bytes` is `auto`.

    left  = min(memory_part * the device's memory - what this process uses of it, what is free)
    pool  = memory_share * left, at most DeviceDefaults.pool_contexts contexts of the greatest length

It is computed when the weights are there; what a GPU's runner will take for workspaces and graphs was measured before
and is left out. Workers of one machine compute it and take the pool in turn, so none counts as free what another's pool
is about to take. A runner takes its memory after the turn, so another worker of the same GPU may count that as free;
`memory_part` bounds each worker of a GPU by what it uses itself, whatever the others take.
"""

import fcntl
import gc
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import psutil
import torch

from kvrelay.engine.config import CPU_DEFAULTS, GPU_DEFAULTS, EngineConfig
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.kv.pool import KVPool, allocate_pool
from kvrelay.engine.kv.sides import side_blocks
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.machine.control_groups import GROUPS, PROC, free_memory, total_memory

logger = logging.getLogger(__name__)

TURN_SECONDS = 60.0
"""Longest time in seconds that a worker waits for another one to size and zero its pool."""
GIB = 2**30
UNBOUNDED = 2**62
"""Number of tokens that no pool bounds."""


class DeviceMemory(Protocol):
    """Memory of the device that an engine computes on, in bytes. Tests have their own."""

    def total(self) -> int:
        """Bytes that processes may use, all together."""
        ...

    def free(self) -> int:
        """Bytes that nobody uses."""
        ...

    def used(self) -> int:
        """Bytes that this process uses."""
        ...

    def settle(self) -> None:
        """Returns memory that this process has freed to the device."""
        ...


class HostMemory:
    """The machine's memory, as far as this process's control groups let it be used (v1 and v2), or a rank's part."""

    def __init__(self, proc: Path = PROC, groups: Path = GROUPS, ranks: int = 1) -> None:
        """
        Args:
            ranks: of the worker, all on this machine: each has an equal part of it.
        """
        self._proc = proc
        self._groups = groups
        self._ranks = ranks

    def total(self) -> int:
        return total_memory(self._proc, self._groups) // self._ranks

    def free(self) -> int:
        return free_memory(self._proc, self._groups) // self._ranks

    def used(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def settle(self) -> None:
        """Python and torch's allocator keep little of it."""


class GpuMemory:
    """The memory of one GPU."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def used(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def settle(self) -> None:
        gc.collect()  # a runner and its graphs refer to each other
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def memory_of(device: torch.device | str) -> DeviceMemory:
    """The memory of a GPU, or of this machine."""
    return GpuMemory(device) if torch.device(device).type == "cuda" else HostMemory()


def make_pools(
    layout: CacheLayout,
    options: EngineConfig,
    max_context: int,
    memory: DeviceMemory,
    device: torch.device | str = "cpu",
    later_bytes: int = 0,
    place: Place = ALONE,
) -> tuple[KVPool, ...]:
    """The pools of a layout's tracks, together of `kv_memory_bytes` or sized as the module says.

    Args:
        options: without `auto`, but that of `kv_memory_bytes`.
        max_context: tokens of the longest sequence, whatever the pools hold.
        memory: of `device`.
        later_bytes: what this process will take beside the pools, and doesn't use yet.
        place: of the rank: all have as many blocks as the one with the least room for them.

    Raises:
        ValueError: there isn't enough memory; the text says how much there is.
        CollectiveError: another rank is lost.
    """

    def allocate(size: int) -> tuple[KVPool, ...]:
        counts = {index: place.smallest(count) for index, count in block_counts(layout, options, size).items()}
        return tuple([allocate_pool(track, counts[index], device) for index, track in layout.tracks])

    if options.kv_memory_bytes:
        return allocate(options.kv_memory_bytes)
    # Rank 0 takes the turn for all ranks of the worker, and returns it when all have their pools.
    with _turn() if place.rank == 0 else nullcontext():
        memory.settle()
        place.smallest(0)
        pools = allocate(pool_bytes(layout, options, max_context, memory, later_bytes))
        place.smallest(0)
        return pools


def block_counts(layout: CacheLayout, options: EngineConfig, size: int) -> dict[int, int]:
    """Blocks, or slots, of each group with tracks, by its index, for pools of `size` bytes together.

    A window has as many as `side_blocks` says, but no more than all layers had if none had a window. The first group
    takes the rest, and at least half of what `kv_memory_bytes` gives, if there are states.

    Raises:
        ValueError: not even one block fits.
    """
    counts = {index: side_blocks(group, options) for index, group in enumerate(layout.groups) if index}
    sizes = [sum([track.block_bytes for track in group.tracks]) for group in layout.groups]
    states = sum([counts[index] * sizes[index] for index in counts if layout.groups[index].kind == "state"])
    left = size - (min(states, size // 2) if options.kv_memory_bytes else states)
    windows = [index for index in counts if layout.groups[index].kind == "window"]
    each = sizes[0] + sum([sizes[index] for index in windows])
    if not each:
        return counts
    if left < each:
        raise ValueError(f"kv_memory_bytes is {size}; one KV block of this model takes {each}")
    for index in windows:
        counts[index] = min(counts[index], left // each)
    if sizes[0]:
        counts[0] = (left - sum([counts[index] * sizes[index] for index in windows])) // sizes[0]
    return counts


def tokens_within(layout: CacheLayout, pools: Sequence[KVPool], options: EngineConfig) -> int:
    """Tokens of the longest sequence for which there are blocks, if it is alone.

    A window's pool bounds it only if it is too small for the window and the next step's tokens.
    """
    found = UNBOUNDED
    for (index, _), pool in zip(layout.tracks, pools, strict=True):
        group = layout.groups[index]
        whole = -(-(group.window + options.max_batch_tokens) // options.block_size) + 2
        if group.kind != "state" and (group.kind != "window" or pool.num_blocks < whole):
            found = min(found, pool.num_tokens)
    return found


def pool_bytes(
    layout: CacheLayout, options: EngineConfig, max_context: int, memory: DeviceMemory, later_bytes: int = 0
) -> int:
    """Bytes of the pools together if `kv_memory_bytes` is `auto`; the arguments are those of `make_pools`.

    Raises:
        ValueError: not even one block fits.
    """
    total, free, used = memory.total(), memory.free(), memory.used()
    own = int(options.memory_part * total)
    left = min(own - used, free) - later_bytes
    size = int(options.memory_share * left)
    facts = (
        f"{own / GIB:.2f} GiB are this worker's of {total / GIB:.2f} GiB, {free / GIB:.2f} GiB are free, and it uses "
        f"{(used + later_bytes) / GIB:.2f} GiB without a KV pool"
    )
    if size < max(1, layout.block_bytes):
        raise ValueError(f"kv_memory_bytes is auto; no memory is left for a KV pool: {facts}")
    contexts = (GPU_DEFAULTS if options.device == "cuda" else CPU_DEFAULTS).pool_contexts
    most = contexts * -(-max_context // layout.block_size) * layout.block_bytes
    for group in layout.side_groups:
        most += side_blocks(group, options) * sum([track.block_bytes for track in group.tracks])
    logger.info("the KV pool takes %.2f GiB: %s", min(size, most) / GIB, facts)
    return min(size, most)


@contextmanager
def asking(what: str, memory: DeviceMemory) -> Iterator[None]:
    """Turns the device's lack of memory into an error that says what asked for it, and how much there was.

    Raises:
        ValueError: the body ran out of the device's memory.
    """
    free, total = memory.free(), memory.total()
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        tried = re.search(r"Tried to allocate [0-9.]+ \w+", str(error))
        raise ValueError(
            f"{what}: there is not enough memory. {free / GIB:.2f} of {total / GIB:.2f} GiB were free before it."
            f"{f' {tried[0]} at the end.' if tried else ''}"
        ) from error


@contextmanager
def _turn() -> Iterator[None]:
    """Takes a lock that one of this user's workers on this machine holds at a time. A worker that waited for too long
    goes on anyway, as does one that can't open the lock's file: neither a frozen one nor another user must keep it from
    starting.
    """
    path = Path(tempfile.gettempdir()) / f"kvrelay-memory-{os.getuid()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:  # such as another user's file
        logger.warning(
            "%s can't be opened, so other workers of this machine may count the same memory: %s", path, error
        )
        yield
        return
    with os.fdopen(descriptor, "w") as lock:
        deadline = time.monotonic() + TURN_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    logger.warning("another process has held %s for %.0f s; not waiting for it", path, TURN_SECONDS)
                    break
                time.sleep(0.05)
        yield
