"""One frame of `kvrelay top`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.cli.common import Whole, duration
from kvrelay.cli.top.model import SORTS

BAR_CELLS = 10
STATES = {"ready": "green", "suspect": "yellow", "draining": "cyan", "starting": "blue", "dead": "red"}
KEYS = "q quit   p pause   s sort   w wide"
GAP = 2
"""Spaces between two columns."""


def frame(
    shown: Mapping[str, Any], sort: str, size: tuple[int, int], note: str = "", *, wide: bool = False
) -> RenderableType:
    """The whole frame.

    Args:
        shown: `Model.frame`.
        sort: a key of SORTS.
        size: columns and lines that there are.
        note: what the last line says beside the keys.
        wide: whether to show every column, however wide.
    """
    width, height = size
    requests = _requests(shown["requests"], width)
    parts: list[RenderableType] = [_head(shown), *requests, Text()]
    workers = _workers(sorted(shown["workers"], key=SORTS[sort]), sort, wide)
    parts += [Whole(workers), Text()]
    used = 3 + 2 * len(requests) + workers.row_count + 4
    if shown["links"]:
        links = _links(shown["links"])
        parts += [Whole(links), Text()]
        used += links.row_count + 3
    room = max(3, height - used - 4)
    parts += [Whole(_decisions(shown["decisions"][:room], wide)), Text(f"{KEYS}   {note}", style="dim")]
    return Group(*parts)


def _head(shown: Mapping[str, Any]) -> Text:
    text = Text("kvrelay ", style="bold")
    text.append(datetime.fromtimestamp(shown["time"]).strftime("%H:%M:%S"), style="dim")
    for router in shown["routers"]:
        text.append(f"   {router['name']} ")
        if router["error"]:
            text.append(router["error"], style="red")
        elif router["ready"]:
            text.append("ready", style="green")
        else:
            text.append("no place for requests", style="yellow")
    model = next((router["model"] for router in shown["routers"] if router["model"]), "")
    return text.append(f"   {model}", style="dim")


def _requests(found: Mapping[str, Any], width: int) -> list[RenderableType]:
    """A caption, followed by lines of names and values."""
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in found["goodput_limits"].items())
    cached = "-" if found["cached_share"] is None else f"{found['cached_share']:.0%}"
    cells = (
        ("running", str(found["running"])),
        ("requests/s", f"{found['requests_per_second']:.2f}"),
        ("good/s", f"{found['goodput_per_second']:.2f}"),
        ("tokens/s", f"{found['output_tokens_per_second']:.0f}"),
        ("TTFT p50/p99", _two(found, "ttft")),
        ("TPOT p50/p99", _two(found, "tpot")),
        ("hand-off p50/p99", _two(found, "handoff")),
        ("cached", cached),
        ("failed", str(found["failed"])),
        ("retries", str(found["retries"])),
        ("moved", str(found["migrations"])),
    )
    rows: list[list[tuple[str, str]]] = [[]]
    for cell in cells:
        if sum(max(map(len, each)) + GAP for each in [*rows[-1], cell]) > width + GAP:
            rows.append([])
        rows[-1].append(cell)
    caption = f"requests of the last {found['window_seconds']:.0f} s; good: {limits or 'all that were completed'}"
    return [Text(caption, style="dim", no_wrap=True), *map(_row, rows)]


def _row(cells: Sequence[tuple[str, str]]) -> RenderableType:
    row = Table.grid(padding=(0, GAP, 0, 0))
    row.add_row(*(Text(name, style="dim") for name, _ in cells))
    bad = {"failed", "retries"}
    row.add_row(*(Text(value, style="bold red" if name in bad and value != "0" else "bold") for name, value in cells))
    return Whole(row)


def _two(found: Mapping[str, Any], name: str) -> str:
    return f"{_ms(found[f'p50_{name}'])} / {_ms(found[f'p99_{name}'])}"


def _workers(workers: Sequence[Mapping[str, Any]], sort: str, wide: bool) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    mark = {"name": "worker", "load": "running", "memory": "KV pool", "tokens": "tokens/s"}[sort]
    names = ["worker", "role", "state", "running", "waiting", "KV pool", "tokens/s"]
    names += ["pending", "held", "cached", "free"] if wide else []
    for name in names:
        number = name not in ("worker", "role", "state", "KV pool")
        table.add_column(f"{name} ▾" if name == mark else name, justify="right" if number else "left", no_wrap=True)
    for worker in workers:
        rate = worker["tokens_per_second"]
        counts = [str(worker["pending_tokens"]), *(_share(worker[name], worker["total"]) for name in names[8:])]
        table.add_row(
            Text(worker["name"]),
            worker["role"],
            _state(worker),
            str(worker["running"]),
            str(worker["waiting"]),
            _bar(worker),
            "-" if rate is None else f"{rate:.0f}",
            *(counts if wide else ()),
        )
    return table


def _state(worker: Mapping[str, Any]) -> Text:
    """State of a worker; `avoided` if it is ready but routers avoid it."""
    if worker["avoided"] and worker["state"] == "ready":
        return Text("avoided", style="yellow")
    return Text(worker["state"], style=STATES.get(worker["state"], ""))


def _bar(worker: Mapping[str, Any]) -> Text:
    """Bar of a pool's held, cached and free blocks, with the share of the held blocks."""
    total = worker["total"] or 1
    held = min(BAR_CELLS, -(-BAR_CELLS * worker["held"] // total))
    cached = min(BAR_CELLS - held, round(BAR_CELLS * worker["cached"] / total))
    full = worker["held"] >= 0.95 * total
    text = Text("█" * held, style="red" if full else "green")
    text.append("▒" * cached, style="blue")
    text.append("·" * (BAR_CELLS - held - cached), style="dim")
    return text.append(f" {worker['held'] / total:4.0%}")


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if total else str(count)


def _links(links: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    for name in ("link", "MB/s", "sending", "transfers", "sent"):
        table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
    for link in links:
        table.add_row(
            f"{link['prefill']} → {link['decode']}",
            f"{link['bytes_per_second'] / 1e6:.1f}",
            str(link["sending"]),
            str(link["transfers"]),
            f"{link['nbytes'] / 2**20:.1f} MiB",
        )
    return table


def _decisions(decisions: Sequence[Mapping[str, Any]], wide: bool) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("placed on", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for name in ("prompt", "out", "TTFT", "TPOT", *(("cached", "waited", "hand-off", "tries") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("request", no_wrap=True)
    if wide:
        table.add_column("why", no_wrap=True)
    for each in decisions:
        pair = each["prefill"] if each["decode"] in ("", each["prefill"]) else f"{each['prefill']} → {each['decode']}"
        bad = each["outcome"] not in (None, "stop", "length", "cancelled")
        more = str(each["cached_tokens"]), _ms(each["waited"]), _ms(each["handoff"]), str(each["attempts"])
        table.add_row(
            Text(pair or "-"),
            Text(each["outcome"] or "running", style="red" if bad else "dim" if each["outcome"] else "green"),
            str(each["prompt_tokens"]),
            str(each["completion_tokens"]),
            _ms(each["ttft"]),
            _ms(each["tpot"]),
            *(more if wide else ()),
            Text(each["id"]),
            *((Text(each["why"]),) if wide else ()),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
