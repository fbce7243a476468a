"""Placement on conversations: nearly every token that some worker has computed is found there again, at any load."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "placement.py"
BLOCK = 512
SHARE_ASKED = 0.9


def conversations(path: Path, count: int) -> Path:
    """A trace in which conversations of one to eight turns run side by side; each turn adds a few blocks. Half of them
    begin with a block that all of these share."""
    rng = random.Random(7)
    fresh = iter(range(1, 10**6))
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        blocks = [0] if rng.random() < 0.5 else [next(fresh)]
        at = rng.uniform(0, 600_000)
        for _ in range(rng.randint(1, 8)):
            blocks = [*blocks, *(next(fresh) for _ in range(rng.randint(1, 8)))]
            rows.append({"timestamp": at, "input_length": BLOCK * len(blocks), "hash_ids": blocks})
            at += rng.uniform(5_000, 60_000)
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_conversations_hit_nine_tenths_of_what_one_endless_cache_would(tmp_path: Path) -> None:
    trace = conversations(tmp_path / "trace.jsonl", 150)
    options = ["--workers", "2", "8", "--cache", "100000000", "--busy", "0.8"]
    done = subprocess.run([sys.executable, SCRIPT, trace, *options], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    near = [result for result in results if result["placement"] == "near its cache"]
    assert [result["workers"] for result in near] == [2, 8]
    assert min(result["of_best_possible"] for result in near) >= SHARE_ASKED, near
    by_load = [result for result in results if result["placement"] == "by load only"]
    assert max(result["of_best_possible"] for result in by_load) < SHARE_ASKED, "the trace tells the two apart"
