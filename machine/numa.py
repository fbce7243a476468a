"""CPUs that are near a device, and threads that run on them."""

import os
from contextlib import suppress
from pathlib import Path

SYS, PROC = Path("/sys"), Path("/proc")


def cpus_near(address: str, sys: Path = SYS) -> frozenset[int]:
    """The CPUs of the NUMA node of a PCI device; none if the machine doesn't tell, or has one node.

    Args:
        address: such as `0000:1b:00.0`.
    """
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        cpus = (sys / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return frozenset()
    ranges = [part.partition("-") for part in cpus.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def pin(cpus: frozenset[int], proc: Path = PROC) -> None:
    """Has all threads of this process, and those that they start, run on such CPUs as they may use anyway. Nothing
    changes where that leaves none."""
    for thread in (proc / "self/task").iterdir():
        # The thread may have ended.
        with suppress(ProcessLookupError):
            own = os.sched_getaffinity(int(thread.name)) & cpus
            if own:
                os.sched_setaffinity(int(thread.name), own)
