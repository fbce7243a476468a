"""Two workers of each role on the hash model, armed with failpoints, and requests whose tokens are known before."""

import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvrelay.client import Client, Completion
from support.hash_runner import VOCAB_SIZE, expected_tokens
from support.hash_worker import MODULE, STEP_SECONDS, WORKER_LAYOUT
from support.processes import ProcessCluster, process_cluster, wait_until

CHUNK = 64
PROMPT = 3 * CHUNK + 50
"""Tokens: three whole chunks and a partial one; a frame each."""
OUT = 40
ENGINE = {"block_size": WORKER_LAYOUT.block_size, "max_batch_tokens": CHUNK, "kv_memory_bytes": 4 * 2**20, "threads": 1}
TRANSFER = {
    "chunk_bytes": CHUNK * WORKER_LAYOUT.token_bytes,
    "frame_timeout_seconds": 1.0,
    "lease_seconds": 2.0,
    "transfer_timeout_seconds": 4.0,
}


@contextmanager
def hash_cluster(folder: Path, rules: Sequence[str], step_seconds: float = 0.002) -> Iterator[ProcessCluster]:
    """Two workers of each role; every one is armed with all `rules`."""
    with process_cluster(
        folder,
        "pico",
        prefill=2,
        decode=2,
        worker={"engine": ENGINE, "transfer": TRANSFER},
        modules={"prefill": MODULE, "decode": MODULE},
        variables={"KVRELAY_FAILPOINTS": ";".join(rules), STEP_SECONDS: str(step_seconds)},
    ) as cluster:
        yield cluster


def prompt_of(name: str, length: int = PROMPT) -> list[int]:
    """No two prompts begin alike, so that no prefix cache spares a transfer."""
    return random.Random(name).choices(range(VOCAB_SIZE), k=length)


def ask(client: Client, name: str, length: int = PROMPT, count: int = OUT) -> Completion:
    """A request of this name, whose tokens must be those of the undisturbed run."""
    prompt = prompt_of(name, length)
    completion = client.complete(prompt, max_tokens=count, temperature=0, ignore_eos=True, timeout=30, request_id=name)
    assert list(completion.token_ids) == expected_tokens(prompt, count, WORKER_LAYOUT), name
    return completion


def ask_in_company(client: Client, name: str, company: int = 3) -> Completion:
    """As `ask`, while other requests are under way, whose tokens must be equal too."""
    with ThreadPoolExecutor(company + 1) as pool:
        others = [pool.submit(ask, client, f"beside {name} {number}") for number in range(company)]
        completion = pool.submit(ask, client, name).result()
        for other in others:
            other.result()
    return completion


def replace(cluster: ProcessCluster, name: str) -> None:
    """Replaces a worker that has ended. Its peers may hear of it after the router, which costs a request an attempt."""
    cluster.replace(name)
    with Client(cluster.router) as client:
        wait_until(lambda: ask_in_company(client, f"settle {name}").timeline.retries == 0, f"{name} is known to all")


def workers_in(cluster: ProcessCluster, states: str) -> list[str]:
    """The workers whose processes are in one of these states of /proc/PID/stat; Z where they have ended."""
    workers = {name: process for name, process in cluster.processes.items() if name.startswith(("prefill", "decode"))}
    return [name for name, process in workers.items() if _state(process.pid) in states]


def wake(cluster: ProcessCluster, name: str) -> None:
    cluster.processes[name].popen.send_signal(signal.SIGCONT)


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "Z"
    return text[text.rindex(")") + 2]
