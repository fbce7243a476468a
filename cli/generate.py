"""`kvrelay generate`: sends one request to a router and prints its text as it arrives."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.client import Chunk, Client, GenerateOptions, Timeline, Tls
from kvrelay.client.errors import InvalidRequest, KvrelayError, Unavailable
from kvrelay.cluster import state
from kvrelay.cluster.errors import NO_CLUSTER, ClusterError, RunError, UsageError


@dataclass(frozen=True, slots=True)
class Router:
    """The address of one or more routers, and the credentials for calls to them."""

    target: str
    """host:port of the router; commas separate several."""
    name: str
    """Name of the router in error messages."""
    tls: bool
    ca: Path | None
    """File with the authorities of its certificate; None takes gRPC's own."""
    api_key: str | None

    @classmethod
    def find(cls, target: str | None, tls: bool, ca: Path | None, api_key: str | None) -> "Router":
        """The routers that `target` names, else those of the running cluster, else the default one.

        Raises:
            RunError: the cluster has none yet.
        """
        tls = tls or ca is not None
        if target is not None:
            return cls(target, f"--target {target}", tls, ca, api_key)
        current = state.current()
        if current is None:
            return cls(state.DEFAULT_TARGET, "", tls, ca, api_key)
        if not current.router:
            raise RunError("the cluster is starting; try again when it is ready")
        return cls(current.router, f"router {current.router}", tls or current.router_tls, ca, api_key)

    def failure(self, error: KvrelayError) -> ClusterError:
        """The error that the command ends with after a failed call."""
        if isinstance(error, InvalidRequest):
            return UsageError(str(error))
        if not self.name and isinstance(error, Unavailable):
            return RunError(f"{NO_CLUSTER}, --target names routers elsewhere; nothing answers at {self.target}")
        return RunError(f"{self.name or f'router {self.target}'}: {error}")

    def client(self) -> Client:
        """
        Raises:
            UsageError: `ca` can't be read.
        """
        try:
            return Client(self.target, api_key=self.api_key, tls=Tls(self.ca) if self.tls else None)
        except OSError as error:
            raise UsageError(f"--ca {self.ca}: {error.strerror}") from None


class Printer:
    """Prints completions one after the other: the text of the first one that has not ended as it arrives."""

    def __init__(self, count: int) -> None:
        self._waiting = [""] * count
        """Text of each completion that is not printed yet."""
        self._ended: set[int] = set()
        self._present = 0

    def add(self, chunk: Chunk) -> None:
        self._waiting[chunk.index] += chunk.text
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        self._print()
        while self._present in self._ended and self._present + 1 < len(self._waiting):
            self._present += 1
            sys.stdout.write(f"\n--- {self._present + 1} of {len(self._waiting)}\n")
            self._print()
        sys.stdout.flush()

    def _print(self) -> None:
        sys.stdout.write(self._waiting[self._present])
        self._waiting[self._present] = ""


def generate(router: Router, prompt: str, options: GenerateOptions, *, as_json: bool, timeline: bool) -> None:
    """Prints the text as it arrives and, with `timeline`, where the time went; or one JSON object at the end, for
    several completions with all of them.

    Raises:
        ClusterError: there is no such router, or it refuses the request.
    """
    try:
        with router.client() as client:
            if as_json:
                found = [asdict(each) for each in client.completions(prompt, **options)]
                print(json.dumps(found[0] if len(found) == 1 else {"completions": found}))
                return
            printer, ended = Printer(options.get("n") or 1), []
            with client.generate(prompt, **options) as stream:
                for chunk in stream:
                    printer.add(chunk)
                    if chunk.timeline is not None:
                        ended.append((chunk.index, chunk.timeline))
    except KvrelayError as error:
        raise router.failure(error) from None
    print()
    if timeline and ended:
        console = Console(highlight=False)
        for _, line in sorted(ended, key=lambda each: each[0]):
            console.print(timeline_table(line))
            console.print(placement_line(line), soft_wrap=True, markup=False)
        console.print(f"request {chunk.request_id}", soft_wrap=True, markup=False)


def placement_line(line: Timeline) -> str:
    """How a request was served and why: what was predicted of it, what came, and the second best choice."""
    workers = " ".join(dict.fromkeys(filter(None, (line.prefill_worker, line.decode_worker))))
    text = f"{line.way or 'placed'}: {workers}"
    if line.predicted_first_token_seconds:
        came = line.first_token_seconds - line.route_seconds
        text += f"; first token {came * 1e3:.1f} ms after placement, {line.predicted_first_token_seconds * 1e3:.1f} ms"
        text += f" predicted; hand-off {line.handoff_seconds * 1e3:.1f} ms, {line.predicted_handoff_seconds * 1e3:.1f}"
        text += f" ms predicted; {line.predicted_token_seconds * 1e3:.1f} ms between tokens predicted"
    return text + (f"; second best: {line.runner_up}" if line.runner_up else "")


def timeline_table(line: Timeline) -> Table:
    """A table of where one request's time went, in milliseconds; parts on different machines overlap."""
    table = Table(title="Where the time went (ms)", title_justify="left")
    rate = line.transfer_bytes / line.transfer_seconds / 1e9 if line.transfer_seconds else 0.0
    columns = {
        "queue": f"{line.queue_seconds * 1e3:.1f}",
        "prefill": f"{line.prefill_seconds * 1e3:.1f}",
        "transfer": f"{line.transfer_seconds * 1e3:.1f}",
        "KiB": f"{line.transfer_bytes / 1024:.0f}",
        "GB/s": f"{rate:.2f}",
        "hand-off": f"{line.handoff_seconds * 1e3:.1f}",
        "first token": f"{line.first_token_seconds * 1e3:.1f}",
        "decode": f"{line.decode_seconds * 1e3:.1f}",
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*columns.values())
    return table
