"""Output of `kvrelay bench` on the terminal: a progress bar, then a table."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvrelay.cli.bench import load
from kvrelay.cli.bench.figures import LATENCIES
from kvrelay.cli.bench.result import Result, Run

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two messages",
    "e2el": "whole request",
    "ttft_scheduled": "first token, since due",
    "e2el_scheduled": "whole request, since due",
}
MOST_ERRORS = 5


class Bars:
    """One progress bar for each run, on a terminal; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, name: str, count: int) -> load.Watch:
        """Begins another run's bar."""
        task = self._progress.add_task(name or "requests", total=count, note="")

        def show(progress: load.Tally) -> None:
            flying = progress.sent - progress.done
            failed = f"[red]{progress.failed} failed[/] " if progress.failed else ""
            self._progress.update(task, completed=progress.done, note=f"{failed}{flying} in flight")

        return show


def show(result: Result, percentiles: Sequence[float], console: Console) -> None:
    """Prints the figures of each run."""
    for run in result.runs:
        console.print(_table(run, percentiles, result.options.get("goodput") or {}))
        console.print()
        for line in errors(run):
            console.print(Text.assemble(("failed", "red"), f"  {line}"), soft_wrap=True)


def errors(run: Run) -> list[str]:
    """Each kind of failure, with how often it came; the most frequent ones."""
    counts: dict[str, int] = {}
    for request in run.requests:
        if not request.ok:
            counts[request.error] = counts.get(request.error, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{count} x {text}" for text, count in ordered[:MOST_ERRORS]]
    return shown + ([f"{len(ordered) - MOST_ERRORS} other kinds of errors"] if len(ordered) > MOST_ERRORS else [])


def name_of(run: Run) -> str:
    """A name for a run that says how its requests arrived."""
    parts = [f"{run.request_rate:g} requests/s"] if run.request_rate is not None else []
    parts += [f"at most {run.concurrency} at once"] if run.concurrency else []
    return ", ".join(parts) or "all at once, or as traced"


def summary(run: Run, goodput: Mapping[str, float]) -> list[tuple[str, str]]:
    """Name and value of each figure that isn't a latency."""
    found = run.figures
    lines = [
        ("requests", f"{found['completed']:g} completed, {found['failed']:g} failed"),
        ("duration", f"{found['duration']:.2f} s"),
        ("requests/s", f"{found['request_throughput']:.2f}"),
        ("output tokens/s", f"{found['output_throughput']:.1f}"),
        ("all tokens/s", f"{found['total_token_throughput']:.1f}"),
        ("prompt tokens", f"{found['total_input_tokens']:g}, {found['total_cached_tokens']:g} of them cached"),
        ("output tokens", f"{found['total_output_tokens']:g}"),
        ("most in flight", f"{found['max_concurrent_requests']:g}"),
        ("sent late", f"up to {found['max_late_ms']:.1f} ms"),
    ]
    if run.interrupted:
        lines.insert(0, ("interrupted", "figures of the requests that were done by then"))
    if "request_goodput" in found:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.items())
        lines.insert(3, ("goodput", f"{found['request_goodput']:.2f} requests/s within {limits}"))
    return lines


def _table(run: Run, percentiles: Sequence[float], goodput: Mapping[str, float]) -> Table:
    text = "\n".join(f"{name:>16}  {value}" for name, value in summary(run, goodput))
    table = Table(title=f"{name_of(run)}\n{text}", title_justify="left", title_style="")
    table.add_column("milliseconds")
    columns = ["mean", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    for column in columns:
        table.add_column(column, justify="right")
    for name in LATENCIES:
        table.add_row(TITLES[name], *(f"{run.figures[f'{column}_{name}_ms']:.2f}" for column in columns))
    return table
