"""Lays siege to a live cluster, one row after another, while another tenant's streams are compared token by token.

    python benchmarks/siege [ROW ...] [--seconds 60] [--count 10000] [--json benchmarks/results/siege-2-cores.json]

Each row prints what was asked and what was measured; the exit code is 1 if a row misses. Load comes from processes of
its own, which the machine gives less of its cores than the cluster. ROW is one of:

    bodies     10 connections repeat the worst body of each endpoint
    deadlines  requests with random deadlines, on asyncio and uvloop
    kv         one tenant asks for four times the KV that there is
    tenant     one tenant at its worst: prompts, slow bodies, streams, viewers, grammars
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

from turns import earlier, end_on_signal, own_setting, save  # noqa: E402

from siege import rows  # noqa: E402  # after the path
from siege.witness import Given, Measure  # noqa: E402

ROWS: dict[str, Callable[[Given], list[Measure]]] = {
    "bodies": rows.bodies,
    "deadlines": rows.deadlines,
    "kv": rows.kv,
    "tenant": rows.tenant,
}


def shown(row: str, measures: Sequence[Measure]) -> str:
    """A table of the limits and the measured values."""
    width = max(len(each.what) for each in measures)
    wide = max(len(each.asked) for each in measures)
    lines = [
        f"  {'ok  ' if each.ok else 'MISS'}  {each.what:<{width}}  {each.asked:<{wide}}  {each.measured}"
        for each in measures
    ]
    return "\n".join([row, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of an attack")
    parser.add_argument("--count", type=int, default=10_000, help="of requests in deadlines")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of the row, by a piece of its name")
    parser.add_argument("--json", type=Path, help="file for the results; rows that it has and that don't run stay")
    parser.add_argument("--folder", type=Path, help="for logs; by default one that is removed")
    args = parser.parse_args()
    if unknown := set(args.rows) - ROWS.keys():
        parser.error(f"ROW is {', '.join(sorted(unknown))}; allowed: {', '.join(ROWS)}")
    end_on_signal()
    results = earlier(args.json).get("rows", {})
    missed = False
    with tempfile.TemporaryDirectory(prefix="siege-") as temporary:
        for row in args.rows or ROWS:
            folder = (args.folder or Path(temporary)) / row
            began = time.monotonic()
            given = Given(folder, args.seconds, args.count, args.seed, args.only)
            measures = ROWS[row](given)
            print(shown(row, measures), flush=True)
            missed |= not all(each.ok for each in measures)
            results[row] = {
                "seconds": round(time.monotonic() - began, 1),
                "options": {"seconds": args.seconds, "count": args.count, "seed": args.seed},
                "measures": [asdict(each) for each in measures],
                "holds": all(each.ok for each in measures),
            }
            if args.json is not None:
                setting = own_setting("torch", "ray", "grpcio", "protobuf", "uvloop")
                save(args.json, setting | {"rows": results})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
