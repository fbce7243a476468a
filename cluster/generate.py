"""`kvrelay generate`: sends one request to a router and prints its text as it arrives."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from kvrelay.client import Client, GenerateOptions, Timeline
from kvrelay.client.errors import InvalidRequest, KvrelayError
from kvrelay.cluster.errors import RunError, UsageError


def complete_as_json(target: str, prompt: str, options: GenerateOptions) -> None:
    """Prints the whole completion as one JSON object.

    Raises:
        ClusterError: there is no router, or it refuses the request.
    """
    with _errors(target), Client(target) as client:
        completion = client.complete(prompt, **options)
    print(json.dumps(asdict(completion)))


def stream_text(target: str, prompt: str, options: GenerateOptions, timeline: bool) -> None:
    """Prints the text as it arrives and, with `timeline`, where the time went.

    Raises:
        ClusterError: there is no router, or it refuses the request.
    """
    last = None
    with _errors(target), Client(target) as client, client.generate(prompt, **options) as stream:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            last = chunk
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


@contextmanager
def _errors(target: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    except KvrelayError as error:
        raise RunError(f"--target {target}: {error}") from None
