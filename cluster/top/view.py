"""One frame of `kvrelay top`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.top.model import SORTS

BAR_CELLS = 16
ROLES = ("prefill", "decode", "colocated")
STATES = {"ready": "green", "suspect": "yellow", "draining": "cyan", "starting": "blue", "dead": "red"}
KEYS = "q quit   p pause   s sort"


def frame(shown: Mapping[str, Any], sort: str, height: int, note: str = "") -> RenderableType:
    """The whole frame.

    Args:
        shown: `Model.frame`.
        sort: a key of SORTS.
        height: lines that there are.
        note: what the last line says beside the keys.
    """
    parts: list[RenderableType] = [_head(shown), _requests(shown["requests"]), Text()]
    workers = _workers(sorted(shown["workers"], key=SORTS[sort]), sort)
    parts += [workers, Text()]
    used = 4 + workers.row_count + 4
    if shown["links"]:
        links = _links(shown["links"])
        parts += [links, Text()]
        used += links.row_count + 3
    room = max(3, height - used - 4)
    parts += [_decisions(shown["decisions"][:room]), Text(f"{KEYS}   {note}", style="dim")]
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


def _requests(found: Mapping[str, Any]) -> RenderableType:
    line = Table.grid(padding=(0, 2))
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
    for _ in cells:
        line.add_column(no_wrap=True)
    line.add_row(*(Text(name, style="dim") for name, _ in cells))
    bad = {"failed", "retries"}
    line.add_row(*(Text(value, style="bold red" if name in bad and value != "0" else "bold") for name, value in cells))
    caption = f"requests of the last {found['window_seconds']:.0f} s; good: {limits or 'all that were completed'}"
    return Group(Text(caption, style="dim"), line)


def _two(found: Mapping[str, Any], name: str) -> str:
    return f"{_ms(found[f'p50_{name}'])} / {_ms(found[f'p99_{name}'])}"


def _workers(workers: Sequence[Mapping[str, Any]], sort: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    marks = {"name": "worker", "load": "running", "memory": "KV pool", "tokens": "tokens/s"}
    columns = (
        ("worker", "left"),
        ("role", "left"),
        ("state", "left"),
        ("running", "right"),
        ("waiting", "right"),
        ("pending", "right"),
        ("tokens/s", "right"),
        ("KV pool", "left"),
        ("held", "right"),
        ("cached", "right"),
        ("free", "right"),
    )
    for name, justify in columns:
        table.add_column(f"{name} ▾" if marks[sort] == name else name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # a literal
    for worker in workers:
        state = worker["state"] + (" avoided" if worker["avoided"] else "")
        rate = worker["tokens_per_second"]
        table.add_row(
            escape(worker["name"]),
            worker["role"],
            Text(state, style=STATES.get(worker["state"], "")),
            str(worker["running"]),
            str(worker["waiting"]),
            str(worker["pending_tokens"]),
            "-" if rate is None else f"{rate:.0f}",
            _bar(worker),
            _share(worker["held"], worker["total"]),
            _share(worker["cached"], worker["total"]),
            _share(worker["free"], worker["total"]),
        )
    return table


def _bar(worker: Mapping[str, Any]) -> Text:
    """The pool: held blocks, cached ones, free ones."""
    total = worker["total"] or 1
    held = min(BAR_CELLS, -(-BAR_CELLS * worker["held"] // total))
    cached = min(BAR_CELLS - held, round(BAR_CELLS * worker["cached"] / total))
    full = worker["held"] >= 0.95 * total
    text = Text("█" * held, style="red" if full else "green")
    text.append("▒" * cached, style="blue")
    return text.append("·" * (BAR_CELLS - held - cached), style="dim")


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if total else str(count)


def _links(links: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
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


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("request", no_wrap=True, max_width=24)
    table.add_column("placed on", no_wrap=True)
    for name in ("prompt", "cached", "out", "waited", "TTFT", "TPOT", "hand-off", "tries"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    for each in decisions:
        pair = each["prefill"] if each["decode"] in ("", each["prefill"]) else f"{each['prefill']} → {each['decode']}"
        bad = each["outcome"] not in (None, "stop", "length", "cancelled")
        table.add_row(
            escape(each["id"]),
            pair or "-",
            str(each["prompt_tokens"]),
            str(each["cached_tokens"]),
            str(each["completion_tokens"]),
            _ms(each["waited"]),
            _ms(each["ttft"]),
            _ms(each["tpot"]),
            _ms(each["handoff"]),
            str(each["attempts"]),
            Text(each["outcome"] or "running", style="red" if bad else "dim" if each["outcome"] else "green"),
            Text(each["why"]),
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
