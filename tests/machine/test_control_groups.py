"""The memory limits of control groups: which count, and what of their memory is in use."""

from pathlib import Path

import pytest

from kvrelay.machine.control_groups import MemoryLimit, memory_limits
from kvrelay.rpc import description

V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize(
    ("names", "table", "root", "unlimited", "files"),
    [
        (V2, "0::/pods/one\n", "", "max", "inactive_file 700\n"),
        (V1, "4:memory:/pods/one\n", "memory", str(2**63 - 4096), "inactive_file 1\ntotal_inactive_file 700\n"),
    ],
)
def test_copies_of_files_are_not_in_use(
    tmp_path: Path, names: tuple[str, str], table: str, root: str, unlimited: str, files: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(table)
    groups = tmp_path / "groups"
    group(groups / root / "pods" / "one", names, "1000", 950, f"anon 250\n{files}")
    group(groups / root / "pods", names, "2000", 950, None)  # a sandbox may lack the table
    group(groups / root, names, unlimited, 5000, files)
    assert memory_limits(tmp_path, groups) == [MemoryLimit(1000, 250), MemoryLimit(2000, 950)]


def test_a_process_tells_the_limit_that_it_reaches_first(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [MemoryLimit(1000, 100), MemoryLimit(1500, 1450), MemoryLimit(9000, 0)]
    monkeypatch.setattr(description, "memory_limits", lambda: limits)
    (memory,) = [amount for amount in description.amounts() if amount.name == "memory"]
    assert (memory.used, memory.limit) == (1450, 1500)
    limits.clear()
    assert "memory" not in [amount.name for amount in description.amounts()]
