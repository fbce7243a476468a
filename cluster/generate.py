"""`kvrelay generate`: sends one request to a router and prints its text as it arrives."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.client import Client, GenerateOptions, Timeline, Tls
from kvrelay.client.errors import InvalidRequest, KvrelayError
from kvrelay.cluster.errors import RunError, UsageError


@dataclass(frozen=True, slots=True)
class Router:
    """A router, and what it is called with."""

    target: str
    """Its host:port."""
    tls: bool
    ca: Path | None
    """File with the authorities of its certificate; None takes gRPC's own."""
    api_key: str | None

    def client(self) -> Client:
        """
        Raises:
            UsageError: `ca` can't be read.
        """
        try:
            return Client(self.target, api_key=self.api_key, tls=Tls(self.ca) if self.tls else None)
        except OSError as error:
            raise UsageError(f"--ca {self.ca}: {error.strerror}") from None


def generate(router: Router, prompt: str, options: GenerateOptions, *, as_json: bool, timeline: bool) -> None:
    """Prints the text as it arrives and, with `timeline`, where the time went; or one JSON object at the end.

    Raises:
        ClusterError: there is no such router, or it refuses the request.
    """
    try:
        with router.client() as client:
            if as_json:
                print(json.dumps(asdict(client.complete(prompt, **options))))
                return
            last = None
            with client.generate(prompt, **options) as stream:
                for last in stream:
                    sys.stdout.write(last.text)
                    sys.stdout.flush()
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    except KvrelayError as error:
        raise RunError(f"--target {router.target}: {error}") from None
    print()
    if timeline and last is not None and last.timeline is not None:
        Console(highlight=False).print(timeline_table(last.timeline))


def timeline_table(line: Timeline) -> Table:
    """Where one request's time went, in milliseconds; parts on different machines overlap."""
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
