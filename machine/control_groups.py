"""The memory limits of the control groups around this process, of versions 1 and 2, from the kernel's files."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
"""Limit in bytes from which on a control group counts as unlimited, as it does with the word max or without a file."""


class MemoryLimit(NamedTuple):
    """Memory limit and use of one control group, in bytes."""

    limit: int
    used: int
    """Used bytes, without copies of files that were not used lately, such as those of a checkpoint: the kernel gives
    them up when it needs room."""


def memory_limits(proc: Path = PROC, groups: Path = GROUPS) -> list[MemoryLimit]:
    """The limits and uses of all control groups around this process that have a limit."""
    return [found for folder in _folders(proc, groups) for found in _limits(folder)]


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that this process's control groups and the machine still let processes take."""
    return min(
        [psutil.virtual_memory().available, *(max(0, each.limit - each.used) for each in memory_limits(proc, groups))]
    )


def total_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that this process's control groups and the machine let processes take."""
    return min([psutil.virtual_memory().total, *(each.limit for each in memory_limits(proc, groups))])


def _folders(proc: Path, groups: Path) -> Iterator[Path]:
    """The folders of this process's control group for memory and of those above it, as far as they can be seen.

    In a container the path may be the machine's, while only the container's own group is there, as the root.
    """
    table = proc / "self" / "cgroup"
    for line in table.read_text().splitlines() if table.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = groups if number == "0" else groups / "memory"
            below = root / path.lstrip("/")
            yield from (folder for folder in (below, *below.parents) if folder.is_relative_to(root))


def _limits(folder: Path) -> Iterator[MemoryLimit]:
    for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = (folder / name for name in names)
        if limit.is_file() and used.is_file():
            text = limit.read_text().strip()
            if text != "max" and int(text) < UNLIMITED:
                yield MemoryLimit(int(text), int(used.read_text()) - _file_pages(folder))


def _file_pages(folder: Path) -> int:
    """Bytes of a control group that are copies of files and were not used lately."""
    table = folder / "memory.stat"
    entries = (line.partition(" ") for line in (table.read_text().splitlines() if table.is_file() else ()))
    pages = {name: int(value) for name, _, value in entries if name in ("inactive_file", "total_inactive_file")}
    # Version 1 counts the groups below under the longer name only.
    return pages.get("total_inactive_file", pages.get("inactive_file", 0))
