"""`make demo`: a local cluster, three prompts streamed over gRPC, each request's timeline, and all of it down again."""

import json
import subprocess
import sys
import tempfile
import time
from os import environ
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.client import Client, Timeline

KVRELAY = Path(sys.executable).parent / "kvrelay"
PROMPTS = (
    "def __init__(self, ",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Queue:\n    '''Create a queue object with a given maximum size.",
)
MAX_TOKENS = 64


def main() -> int:
    console = Console(highlight=False)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvrelay-demo-") as state:
        environ["KVRELAY_STATE_DIR"] = state
        up = subprocess.run([KVRELAY, "up", "--detach", "--grpc-port", "0"], stdin=subprocess.DEVNULL, timeout=180)
        if up.returncode != 0:
            return up.returncode
        try:
            status = json.loads(subprocess.check_output([KVRELAY, "status", "--json"], timeout=30))
            with Client(status["router"]) as client:
                rows = [(prompt, *stream(console, client, prompt)) for prompt in PROMPTS]
            console.print(timelines(rows))
        finally:
            down = subprocess.run([KVRELAY, "down"], stdin=subprocess.DEVNULL, timeout=60)
    console.print(f"demo took {time.perf_counter() - start:.1f} s")
    return down.returncode


def stream(console: Console, client: Client, prompt: str) -> tuple[int, Timeline]:
    """Prints the completion as it comes; completion tokens and timeline."""
    console.rule()
    console.out(prompt, style="bold", end="")
    for chunk in client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, timeout=60):
        console.out(chunk.text, end="")
        if chunk.usage is not None and chunk.timeline is not None:
            console.print()
            return chunk.usage.completion_tokens, chunk.timeline
    raise RuntimeError("the stream ended without its last message")


def timelines(rows: list[tuple[str, int, Timeline]]) -> Table:
    table = Table(title="Where the time went (ms)", title_justify="left")
    for column in (
        "prompt",
        "queue",
        "prefill",
        "transfer",
        "KiB",
        "GB/s",
        "hand-off",
        "first token",
        "decode",
        "tokens",
    ):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for prompt, tokens, line in rows:
        rate = line.transfer_bytes / line.transfer_seconds / 1e9 if line.transfer_seconds else 0.0
        table.add_row(
            repr(prompt[:20]),
            *(f"{seconds * 1e3:.1f}" for seconds in (line.queue_seconds, line.prefill_seconds, line.transfer_seconds)),
            f"{line.transfer_bytes / 1024:.0f}",
            f"{rate:.2f}",
            *(f"{s * 1e3:.1f}" for s in (line.handoff_seconds, line.first_token_seconds, line.decode_seconds)),
            str(tokens),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
