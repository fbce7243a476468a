"""A small cluster on the hash model, armed with failpoints, and clients whose every token is judged.

with scene(folder, ["prefill.after_finish,request=one,attempt=1:kill"]) as it:
    assert it.ask("one").timeline.retries == 1
    it.settle(3, but=it.workers_in("Z"))
"""

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kvrelay.client import Client, Completion, KvrelayError
from kvrelay.client.messages import Chunk, completion
from kvrelay.client.sync import ChunkStream
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.chaos import Chaos, Proxy
from support.detours import DESK, HOSTS
from support.hash_runner import VOCAB_SIZE, expected_tokens
from support.hash_worker import BEAT_SECONDS, MODULE, NEWS_SECONDS, STEP_SECONDS, WORKER_LAYOUT
from support.history import History, Pool, violations
from support.processes import ProcessCluster, process_cluster, wait_until

CHUNK = 64
PROMPT = 3 * CHUNK + 50
"""Tokens: three whole chunks and a partial one; a frame each."""
OUT = 40
ENGINE = {"block_size": WORKER_LAYOUT.block_size, "max_batch_tokens": CHUNK, "kv_memory_bytes": 4 * 2**20, "threads": 1}
TRANSFER = {
    "transport": os.environ.get("KVRELAY_FAULTS_OVER", "gloo"),
    "frame_bytes": CHUNK * WORKER_LAYOUT.token_bytes,
    "frame_timeout_seconds": 1.0,
    "lease_seconds": 2.0,
    "transfer_timeout_seconds": 4.0,
}
CLIENT_SECONDS = 30.0


class Running:
    """A client that reads its stream in a thread of its own, and writes down what it sees."""

    def __init__(self, name: str, chunks: ChunkStream, history: History) -> None:
        self.tokens = 0
        """That have come so far."""
        self.ended = math.inf
        """When the stream was over, on the monotonic clock."""
        self._name = name
        self._chunks = chunks
        self._history = history
        self._seen: list[Chunk] = []
        self._cancelled = self._over = False
        self._error: KvrelayError | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name=f"client {name}")
        self._thread.start()

    def result(self) -> Completion:
        """Waits for the end.

        Raises:
            KvrelayError: the request failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return completion(self._seen)

    def cancel(self) -> None:
        """Goes away, unless it is over. What still comes is nobody's."""
        with self._lock:
            self._cancelled = True
            if not self._over:
                self._history.cancel(self._name)
        self._chunks.close()
        self._thread.join()

    def _read(self) -> None:
        try:
            for chunk in self._chunks:
                with self._lock:
                    if self._cancelled:
                        return
                    self._note(chunk)
        except KvrelayError as error:
            with self._lock:
                if not self._cancelled:
                    self._over = True
                    self._error = error
                    self._history.error(self._name, str(error))
        finally:
            self.ended = time.monotonic()

    def _note(self, chunk: Chunk) -> None:
        for token in chunk.token_ids:
            self._history.token(self._name, self.tokens, token)
            self.tokens += 1
        if chunk.usage is not None and chunk.timeline is not None:
            self._over = True
            self._history.finish(self._name, chunk.usage.completion_tokens, chunk.timeline.retries)
        self._seen.append(chunk)


@dataclass(eq=False)
class Scene:
    """A cluster, its clients, and what they saw."""

    cluster: ProcessCluster
    client: Client
    chaos: Chaos | None = None
    losses: bool = False
    """Whether workers are killed here, so that retries aren't bound by the router's budget."""
    history: History = field(default_factory=History)
    may_fail: set[str] = field(default_factory=set)
    """Requests that may end with an error."""
    _read: int = 0

    # Clients.

    def begin(self, name: str, length: int = PROMPT, count: int = OUT) -> "Running":
        """Sends a request of this name, which goes on by itself until it ends or is cancelled."""
        prompt = prompt_of(name, length)
        self.history.invoke(name, prompt, count)
        options: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "request_id": name}
        return Running(name, self.client.generate(prompt, timeout=CLIENT_SECONDS, **options), self.history)

    def ask(self, name: str, length: int = PROMPT, count: int = OUT) -> Completion:
        """A whole request."""
        return self.begin(name, length, count).result()

    def try_(self, name: str, length: int = PROMPT, count: int = OUT) -> Completion | None:
        """As `ask`; None where the client was told that it failed."""
        self.may_fail.add(name)
        try:
            return self.ask(name, length, count)
        except KvrelayError:
            return None

    def ask_all(
        self, names: Sequence[str], length: int = PROMPT, count: int = OUT, at_once: int = 8
    ) -> list[Completion]:
        """Many requests, `at_once` at any time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda name: self.ask(name, length, count), names))

    def ask_in_company(self, name: str, company: int = 3) -> Completion:
        """As `ask`, with other requests under way."""
        return self.ask_all([name, *(f"beside {name} {number}" for number in range(company))])[0]

    # Workers.

    def workers_in(self, states: str) -> list[str]:
        """The workers whose processes are in one of these states of /proc/PID/stat; Z where they have ended."""
        workers = {name: process for name, process in self.cluster.processes.items() if _is_worker(name)}
        return [name for name, process in workers.items() if _state(process.pid) in states]

    @property
    def prefills(self) -> list[str]:
        return [name for name in self.cluster.processes if name.startswith("prefill")]

    @property
    def decodes(self) -> list[str]:
        return [name for name in self.cluster.processes if name.startswith("decode")]

    def moved(self, prefill: str, decode: str) -> int:
        """Bytes that the proxy of this pair's link has passed on to decode."""
        return self.link(prefill, decode).passed[0]

    def link(self, prefill: str = "prefill-0", decode: str = "decode-0") -> Proxy:
        """The proxy that carries this pair's bulk bytes."""
        if self.chaos is None:
            raise RuntimeError("this scene has no proxies")
        return self.chaos.proxy("link", prefill, decode)

    def failures(self) -> list[dict[str, Any]]:
        """What the router has logged of failed attempts."""
        return [line for line in self.log("router-0") if line["message"] == "attempt failed"]

    def signal(self, name: str, number: signal.Signals) -> None:
        self.cluster.processes[name].popen.send_signal(number)

    def log(self, name: str) -> list[dict[str, Any]]:
        """A process's log so far, a dict for each line; `at` is its time on this process's monotonic clock."""
        return [
            _log_line(line) for line in self.cluster.processes[name].log.read_text().splitlines() if line[:1] == "{"
        ]

    # The end of a test.

    def settle(self, seconds: float, but: Collection[str] = ()) -> None:
        """Waits until no live worker, `but` those, holds anything, and judges all that happened since the last time."""
        self.cluster.wait_idle(seconds, but)
        self.judge(but)

    def judge(self, but: Collection[str] = ()) -> None:
        """Judges all that happened since the last time; to be called when all is quiet."""
        self._note_retries()
        history, self.history = self.history, History()
        pools = [
            Pool(
                status.member.name,
                status.load.blocks.total,
                status.load.blocks.free,
                status.load.blocks.cached,
                status.load.blocks.held,
                status.load.requests.running + status.load.requests.waiting,
            )
            for status in self.cluster.status().members
            if _is_worker(status.member.name)
            and status.member.name not in but
            and status.member.state != MEMBER_STATE_DEAD
        ]
        history.quiet(pools)
        found = violations(history, oracle, may_fail=self.may_fail, budget=not self.losses)
        assert not found, "\n".join(found)
        ended = [name for name in self.workers_in("Z") if name not in but]
        assert not ended, [self.cluster.processes[name].log.read_text()[-2000:] for name in ended]

    def _note_retries(self) -> None:
        """Takes over the failed attempts that the router has logged; a failed request's last one is no retry."""
        lines = self.log("router-0")
        new, self._read = lines[self._read :], len(lines)
        failed = {event.request for event in self.history.events if event.kind == "error"}
        names = [line["request"].partition("/")[0] for line in new if line["message"] == "attempt failed"]
        for line in new:
            if line["message"] == "attempt failed":
                name = line["request"].partition("/")[0]
                names.remove(name)
                if name in names or name not in failed:
                    self.history.retry(name, line["reason"], line["at"])


@contextmanager
def scene(
    folder: Path,
    rules: Sequence[str] = (),
    *,
    prefill: int = 2,
    decode: int = 2,
    chaos: bool = False,
    losses: bool = False,
    step_seconds: float = 0.002,
    beat_seconds: float = 0.5,
    news_seconds: float | None = None,
    engine: Mapping[str, Any] | None = None,
    transfer: Mapping[str, Any] = TRANSFER,
    decode_engine: Mapping[str, Any] | None = None,
) -> Iterator[Scene]:
    """A cluster whose every worker is armed with all `rules`; with `chaos`, hand-offs go through proxies."""
    variables = {
        "KVRELAY_FAILPOINTS": ";".join(rules),
        STEP_SECONDS: str(step_seconds),
        BEAT_SECONDS: str(beat_seconds),
    }
    if news_seconds is not None:
        variables[NEWS_SECONDS] = str(news_seconds)
    options = {**ENGINE, **(engine or {})}
    roles: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {"engine": {**options, **(decode_engine or {})}}}
    with ExitStack() as stack:
        proxies = stack.enter_context(Chaos()) if chaos else None
        if proxies is not None:
            variables[DESK] = proxies.desk
            for role, host in HOSTS.items():
                roles[role]["host"] = host
        cluster = stack.enter_context(
            process_cluster(
                folder,
                "pico",
                prefill=prefill,
                decode=decode,
                worker={"engine": options, "transfer": dict(transfer)},
                roles=roles,
                modules={"prefill": MODULE, "decode": MODULE},
                variables=variables,
            )
        )
        yield Scene(cluster, stack.enter_context(Client(cluster.router)), proxies, losses)


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, WORKER_LAYOUT)


def prompt_of(name: str, length: int = PROMPT) -> list[int]:
    """No two prompts begin alike, so that no prefix cache spares a transfer. The name is the seed."""
    return random.Random(name).choices(range(VOCAB_SIZE), k=length)


def replace(it: Scene, name: str) -> None:
    """Replaces a worker that has ended; what is asked next costs no attempt."""
    it.cluster.replace(name)
    assert it.ask_in_company(f"after the replacement of {name} at {time.monotonic():.3f}").timeline.retries == 0


def held(it: Scene, name: str) -> int:
    """Blocks that a worker says it holds."""
    return it.cluster.member(name).load.blocks.held


def until(condition: Any, what: str, seconds: float = 5.0) -> float:
    """As `wait_until`, often, and returns how long it took."""
    started = time.monotonic()
    wait_until(condition, what, seconds, every=0.002)
    return time.monotonic() - started


def _is_worker(name: str) -> bool:
    return name.startswith(("prefill", "decode"))


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "Z"
    return text[text.rindex(")") + 2]


def _log_line(text: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text)
    line["at"] = datetime.fromisoformat(line["time"]).timestamp() - time.time() + time.monotonic()
    return line
