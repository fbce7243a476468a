"""Threads run on the CPUs that are near a device."""

import os
import threading
from pathlib import Path

import pytest

from kvrelay.machine.numa import cpus_near, pin

ADDRESS = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("node", "cpus", "expected"),
    [
        ("1\n", "0-2,8,10-11\n", {0, 1, 2, 8, 10, 11}),
        ("-1\n", "0-2\n", set()),
        ("1\n", "\n", set()),
        (None, "0\n", set()),
    ],
)
def test_the_cpus_of_a_devices_node(tmp_path: Path, node: str | None, cpus: str, expected: set[int]) -> None:
    (tmp_path / "bus/pci/devices" / ADDRESS).mkdir(parents=True)
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text(cpus)
    if node is not None:
        (tmp_path / "bus/pci/devices" / ADDRESS / "numa_node").write_text(node)
    assert cpus_near(ADDRESS, tmp_path) == expected


def test_all_threads_run_there_as_far_as_they_may(tmp_path: Path) -> None:
    """The thread of the test itself isn't listed here, and one has ended."""
    own = os.sched_getaffinity(0)
    chosen, found = min(own), list[set[int]]()
    known, pinned = threading.Event(), threading.Event()

    def run() -> None:
        (tmp_path / "self/task" / str(threading.get_native_id())).mkdir(parents=True)
        known.set()
        pinned.wait(30)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    assert known.wait(30)
    (tmp_path / "self/task" / str(2**22 - 1)).mkdir()
    pin(frozenset({max(own) + 1}), tmp_path)
    pin(frozenset({chosen, max(own) + 1}), tmp_path)
    pinned.set()
    thread.join(30)
    assert found == [{chosen}]
    assert os.sched_getaffinity(0) == own
