"""A small cluster on the hash model with faults, and clients whose every token is judged.

with scene(folder) as it:
    it.order("prefill.after_finish,request=one,attempt=1:kill")
    assert it.ask("one").timeline.retries == 1
    it.settle(3, but=it.ended())
    it.heal()  # for the next test
"""

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client, Completion, KvrelayError
from kvrelay.client.messages import Chunk, completion
from kvrelay.client.sync import ChunkStream
from kvrelay.engine.request import SamplingParams
from support import damage, orders
from support.chaos import Chaos, Proxy
from support.detours import DESK, HOSTS
from support.forks import left_of
from support.hash_runner import VOCAB_SIZE, Case, tokens_of_all
from support.hash_worker import BEAT_SECONDS, FRAME_BYTES, GROUPS, MODULE, STATES, STEP_SECONDS, WORKER_LAYOUT
from support.history import Asked, History, sampling_options, seed_of, violations
from support.processes import START_SECONDS, ProcessCluster, process_cluster, wait_until
from support.wrong_costs import COSTS, PAIRS, TURNS

CHUNK = 64
PROMPT = 3 * CHUNK + 50
"""Tokens of a prompt: three whole chunks and a partial one; a frame each."""
OUT = 40
ENGINE = {
    "block_size": WORKER_LAYOUT.block_size,
    "max_batch_tokens": CHUNK,
    "kv_memory_bytes": 4 * 2**20,
    "threads": 1,
    "speculation": {"method": "ngram", "max_tokens": 2, "adaptive": False},
}
FRAME_SECONDS = 3.0
TRANSFER = {
    "transport": "auto",
    "frame_bytes": CHUNK * WORKER_LAYOUT.token_bytes,
    "frame_timeout_seconds": FRAME_SECONDS,
    "lease_seconds": 6.0,
    "transfer_timeout_seconds": 12.0,
}
TENSOR_2 = {"tensor_parallel": 2}
PIPELINE_2 = {"tensor_parallel": 1, "pipeline_parallel": 2, "block_size": 2 * WORKER_LAYOUT.block_size}
KV_DTYPE = os.environ.get("FAULTS_KV_DTYPE", "auto")
"""KV dtype of every scene; the whole suite can be run with KV in int8."""
WITH_STATES = float(os.environ.get("FAULTS_STATES", "0"))
"""Hidden states in every scene: with 1, those of prompts are handed over, too."""
CLIENT_SECONDS = 90.0
IDLE_SECONDS = 10.0
"""Seconds within which a healed cluster is idle."""
AT_ONCE = 20
"""Requests that `asking` runs at once."""
MORE_TCP = pytest.param("tcp", marks=pytest.mark.more)
SLOW_GLOO = pytest.param("gloo", marks=pytest.mark.slow)
PREDICTED = {"predicted": PAIRS, "turns": TURNS, "drawn": 1.0}
"""Costs of the scenes whose placement is by prediction, as `support.wrong_costs` has them."""
ALL_TRANSPORTS = ("auto", MORE_TCP, SLOW_GLOO)
"""Transports of a scene; between workers of one machine, `auto` is shm."""


def over(kind: str) -> dict[str, dict[str, Any]]:
    """Options of a scene: over a transport; or, for what `auto` picks, "int8" with KV in int8, or "states" with hidden
    states of prompts beside it, or "groups" with a window and a state beside it, or "ranks" with workers of several
    ranks: parts of the heads in prefill workers, of the layers in decode workers, and blocks of two sizes; or
    "predicted" with placement by predicted costs, which choose pairs; or "turns", where they choose pairs for long
    prompts, and for the next turn the decode worker that has the answer; or "drawn", where they are drawn at random."""
    if kind in PREDICTED:
        return {"transfer": TRANSFER, "variables": {COSTS: PREDICTED[kind]}, "router": {"placement": "predicted"}}
    if kind == "ranks":
        # Each of the four links has a quarter of a token's bytes. With frames of a quarter, what was computed before
        # the grant goes in as many frames as between workers of one rank: one of each index in every run.
        frame_bytes = {FRAME_BYTES: TRANSFER["frame_bytes"] // 4}
        engines = {"engine": TENSOR_2, "decode_engine": PIPELINE_2}
        return {"transfer": TRANSFER, **engines, "variables": frame_bytes}
    if kind == "groups":
        return {"transfer": TRANSFER, "engine": {"speculation": {"method": "off"}}, "variables": {GROUPS: 1.0}}
    if kind == "states":
        return {"transfer": TRANSFER, "variables": {STATES: 1.0}}
    if kind == "int8":
        return {"transfer": TRANSFER, "engine": {"kv_dtype": "int8"}}
    return {"transfer": {**TRANSFER, "transport": kind}}


class Running:
    """A client that reads its stream in a thread of its own, and records what it sees."""

    def __init__(self, name: str, chunks: ChunkStream, history: History) -> None:
        self.tokens = 0
        """Tokens received so far."""
        self.ended = math.inf
        """Time at which the stream was over, on the monotonic clock."""
        self._name = name
        self._chunks = chunks
        self._history = history
        self._seen: list[Chunk] = []
        self._over = False
        """Whether the record has this request's end."""
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
        """Ends the request unless it is over. Chunks that arrive later are ignored."""
        self._record_end("cancel")
        self._chunks.close()
        self._thread.join()

    def _read(self) -> None:
        try:
            for chunk in self._chunks:
                with self._lock:
                    if self._over:
                        return
                    for token in chunk.token_ids:
                        self._history.add(self._name, "token", index=self.tokens, token=token)
                        self.tokens += 1
                self._seen.append(chunk)
                if chunk.usage is not None and chunk.timeline is not None:
                    count, retries = chunk.usage.completion_tokens, chunk.timeline.retries
                    self._record_end("finish", count=count, retries=retries)
        except KvrelayError as error:
            if self._record_end("error", text=str(error)):
                self._error = error
        finally:
            self.ended = time.monotonic()

    def _record_end(self, kind: Any, **fields: Any) -> bool:
        """Records the request's end, unless there is one already."""
        with self._lock:
            first, self._over = not self._over, True
            if first:
                self._history.add(self._name, kind, **fields)
        return first


@dataclass(eq=False)
class Scene:
    """A cluster, its clients, and what they saw."""

    cluster: ProcessCluster
    client: Client
    orders: Path
    """File of the workers' orders."""
    rules: Sequence[str] = ()
    variables: Mapping[str, float] = field(default_factory=dict)
    """Orders that hold unless a test gives others: rules, and numbers by variable."""
    chaos: Chaos | None = None
    losses: bool = False
    """Whether workers or links are lost here, so that the router's retry budget doesn't bound the retries."""
    turn: int = 0
    """Number of the present test: workers keep prompts in their caches, so another test has other ones."""
    began: float = field(default_factory=time.monotonic)
    """Time at which the present test began, on the monotonic clock."""
    history: History = field(default_factory=History)
    may_fail: set[str] = field(default_factory=set)
    """Requests that may end with an error."""
    frozen: set[str] = field(default_factory=set)
    """Routers that were frozen: what they log when they wake is about requests that have ended elsewhere."""
    _lines_judged: dict[str, int] = field(default_factory=dict)
    """Lines of each router's log that were judged already."""
    _hit: set[str] = field(default_factory=set)
    """Members that got a signal or other options in this test."""

    def order(self, *rules: str, **variables: float) -> None:
        """Gives orders to all workers, in the place of those before: rules, and numbers by variable."""
        orders.give(self.orders, [*self.rules, *rules], {**self.variables, **variables})

    def heal(self) -> None:
        """Makes the cluster as it was at its start, for the next test: orders and links, and members in the place of
        those that were hit. Checks that it is idle then."""
        self.order()
        if self.chaos is not None:
            self.chaos.clear()
        restarts = "supervisor" in self._hit or self.cluster.processes["supervisor"].popen.poll() is not None
        if restarts:
            self.cluster.restart_supervisor()
        members = [name for name in self.cluster.processes if name != "supervisor"]
        gone = [name for name in members if name in self._hit or self.cluster.processes[name].popen.poll() is not None]
        for name in gone:
            self.cluster.processes[name].popen.kill()
        before = {name: self.cluster.processes[name].pid for name in gone}
        if gone:
            self.cluster.replace(*gone)
        assert {name: left_of(pid) for name, pid in before.items()} == {name: [] for name in before}
        if restarts:
            self._wait_for_news(members)  # routers without workers of a role aren't ready
        self.cluster.wait_idle(IDLE_SECONDS)
        for known in (self._hit, self.frozen, self.may_fail, self._lines_judged):
            known.clear()
        self.history, self.turn, self.began = History(), self.turn + 1, time.monotonic()

    # Clients.

    def begin(
        self,
        name: str,
        length: int = PROMPT,
        count: int = OUT,
        client: Client | None = None,
        before: Sequence[int] = (),
    ) -> Running:
        """Sends a request of this name, by default with the scene's client. It runs until it ends or is cancelled.

        Args:
            length: tokens of the prompt, which depend on the name, behind those of `before`.
        """
        prompt, seed = [*before, *prompt_of(f"{name} of test {self.turn}", length)], seed_of(name)
        self.history.add(name, "invoke", prompt=tuple(prompt), count=count, seed=seed)
        options = sampling_options(seed) | {"max_tokens": count, "ignore_eos": True, "request_id": name}
        return Running(name, (client or self.client).generate(prompt, timeout=CLIENT_SECONDS, **options), self.history)

    def ask(self, name: str, length: int = PROMPT, count: int = OUT) -> Completion:
        """A whole request."""
        return self.begin(name, length, count).result()

    def ask_all(
        self, names: Sequence[str], length: int = PROMPT, count: int = OUT, at_once: int = 8
    ) -> list[Completion]:
        """Many requests, `at_once` at any time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda name: self.ask(name, length, count), names))

    def ask_in_company(self, name: str, company: int = 3) -> Completion:
        """Asks as `ask` does, with other requests under way."""
        return self.ask_all([name, *(f"beside {name} {number}" for number in range(company))])[0]

    # Workers.

    @property
    def prefills(self) -> list[str]:
        return [name for name in self.cluster.workers if name.startswith("prefill")]

    @property
    def decodes(self) -> list[str]:
        return [name for name in self.cluster.workers if name.startswith("decode")]

    def decoding(self, name: str, count: int = 200, **more: Any) -> tuple[Running, str]:
        """A request that decodes, and the worker where it does; `more` is of `begin`."""
        request = self.begin(name, count=count, **more)
        wait_until(lambda: request.tokens >= 5, f"{name} decodes")
        return request, self.serving()

    def ended(self) -> list[str]:
        """The workers whose processes have ended."""
        return [name for name, process in self.cluster.workers.items() if process.popen.poll() is not None]

    def lost(self, seconds: float = 10.0) -> str:
        """The only worker whose process has ended; waits until there is one."""
        (name,) = wait_until(self.ended, "one worker has ended", seconds)
        return str(name)

    def replace(self, name: str) -> None:
        """Replaces a member that has ended; the next requests cost no retry."""
        self.cluster.replace(name)
        self.frozen.discard(name)
        self._lines_judged.pop(name, None)
        assert self.ask_in_company(f"after the replacement of {name} at {time.monotonic():.3f}").timeline.retries == 0

    def restart(self, *names: str, **options: Any) -> None:
        """Kills processes, and starts them with other options until the end of the test."""
        if "supervisor" in names:
            self._hit.add("supervisor")
            self._restart_supervisor(**options)
            return
        for name in names:
            self.signal(name, signal.SIGKILL)
        self.cluster.replace(*names, **options)

    def _restart_supervisor(self, **options: Any) -> None:
        self.cluster.restart_supervisor(**options)
        alive = [name for name, process in self.cluster.processes.items() if process.popen.poll() is None]
        self._wait_for_news([name for name in alive if name != "supervisor" and name not in self._hit])

    def _wait_for_news(self, members: Sequence[str]) -> None:
        """Waits until the supervisor has heard that these members are ready."""

        def unheard() -> list[str]:
            return [name for name in members if not self.cluster.is_ready(name)]

        def who() -> str:
            found = [(name, self.cluster.processes[name]) for name in unheard()]
            states = [f"{name} ({process.popen.poll()}): {process.log.read_text()[-500:]}" for name, process in found]
            return "the supervisor has heard of all, but not of " + "; ".join(states)

        wait_until(lambda: not unheard(), who, START_SECONDS)

    def signal(self, name: str, number: signal.Signals, rank: int = 0) -> None:
        self._hit.add(name)
        if rank:
            os.kill(self.cluster.member(name).member.rank_pids[rank], number)
        else:
            self.cluster.processes[name].popen.send_signal(number)

    def serving(self) -> str:
        """The only decode worker that reports held blocks; waits until there is one."""
        (name,) = wait_until(lambda: [name for name in self.decodes if self.held(name)], "one decodes")
        return str(name)

    def held(self, name: str) -> int:
        """Blocks that a worker reports as held."""
        return self.cluster.member(name).load.blocks.held

    def link(self, prefill: str = "prefill-0", decode: str = "decode-0") -> Proxy:
        """The proxy that carries this pair's bulk bytes."""
        if self.chaos is None:
            raise RuntimeError("this scene has no proxies")
        return self.chaos.link(prefill, decode)

    def log(self, name: str) -> list[dict[str, Any]]:
        """A process's log since the test began, a dict for each line; `at` is its time on this process's monotonic
        clock."""
        text = self.cluster.processes[name].log.read_text()
        lines = [_log_line(line) for line in text.splitlines() if line.startswith("{")]
        return [line for line in lines if line["at"] > self.began]

    @property
    def routers(self) -> list[str]:
        return [name for name in self.cluster.processes if name.startswith("router")]

    def failures(self, router: str = "router-0") -> list[dict[str, Any]]:
        """The failed attempts in a router's log."""
        return [line for line in self.log(router) if line["message"] == "attempt failed"]

    def faults(self) -> list[dict[str, Any]]:
        """Log lines of workers about the frames that a rule has damaged, and the threads that a failpoint has ended."""
        lines = [line for name in self.cluster.workers for line in self.log(name)]
        return [line for line in lines if line["message"] == damage.DAMAGED or "Injected" in line.get("exception", "")]

    # The end of a test.

    def settle(self, seconds: float, but: Collection[str] = ()) -> None:
        """Waits until no live worker, except `but`, holds anything; judges what clients saw since the last call."""
        self.cluster.wait_idle(seconds, but)
        self._record_retries()
        history, self.history = self.history, History()
        found = violations(history, oracle_of_all, may_fail=self.may_fail, budget=not (self.losses or self._hit or but))
        assert not found, "\n".join(found)
        ended = [name for name in self.ended() if name not in but]
        assert not ended, [self.cluster.processes[name].log.read_text()[-2000:] for name in ended]

    def _record_retries(self) -> None:
        """Records the failed attempts in the routers' logs; the last one of a failed request is no retry."""
        new: list[dict[str, Any]] = []
        for router in self.routers:
            lines = [] if router in self.frozen else self.failures(router)
            new += lines[self._lines_judged.get(router, 0) :]
            self._lines_judged[router] = len(lines)
        failed = {event.request for event in self.history.events if event.kind == "error"}
        last = {_client_name(line): line for line in new}
        for line in new:
            name = _client_name(line)
            if name not in failed or line is not last[name]:
                self.history.add(name, "retry", line["at"], text=line["reason"])


@contextmanager
def scene(
    folder: Path,
    rules: Sequence[str] = (),
    *,
    prefill: int = 2,
    decode: int = 2,
    routers: int = 1,
    chaos: bool = False,
    losses: bool = False,
    variables: Mapping[str, float] | None = None,
    **options: Mapping[str, Any],
) -> Iterator[Scene]:
    """A cluster on the hash model.

    Args:
        rules: of `kvrelay.transfer.failpoints` and `support.damage`, which hold in all tests; every worker has all.
        chaos: whether links run through proxies.
        losses: whether workers or links are lost here, so that the router's retry budget doesn't bound the retries.
        variables: numbers by variable of `support.hash_worker`.
        options: `engine`, added to ENGINE; `decode_engine`, the same for decode workers only; `transfer`, in TRANSFER's
            place; `worker`, other options of every worker; `router`, those of every router; `supervisor`, its own.
    """
    if unknown := options.keys() - {"engine", "decode_engine", "transfer", "worker", "router", "supervisor"}:
        raise TypeError(f"scene has no options {', '.join(sorted(unknown))}")
    times = {STEP_SECONDS: 0.002, BEAT_SECONDS: 0.5, STATES: WITH_STATES, **(variables or {})}
    environment = {name: str(value) for name, value in times.items()} | {orders.VARIABLE: str(folder / "orders.json")}
    folder.mkdir(parents=True, exist_ok=True)
    orders.give(folder / "orders.json", rules, times)
    engine = {**ENGINE, "kv_dtype": KV_DTYPE, **options.get("engine", {})}
    decode_engine = {**engine, **options.get("decode_engine", {})}
    roles: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {"engine": decode_engine}}
    with ExitStack() as stack:
        proxies = stack.enter_context(Chaos()) if chaos else None
        if proxies is not None:
            environment[DESK] = proxies.desk
            for role, host in HOSTS.items():
                roles[role]["host"] = host
        cluster = stack.enter_context(
            process_cluster(
                folder,
                "pico",
                prefill=prefill,
                decode=decode,
                routers=routers,
                router=dict(options.get("router", {})),
                worker={
                    "engine": engine,
                    "transfer": dict(options.get("transfer", TRANSFER)),
                    **options.get("worker", {}),
                },
                roles=roles,
                modules={"prefill": MODULE, "decode": MODULE},
                variables=environment,
                supervisor=options.get("supervisor"),
            )
        )
        client = stack.enter_context(Client(cluster.router))
        yield Scene(cluster, client, folder / "orders.json", rules, times, proxies, losses)


def oracle(prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """The tokens of an undisturbed request."""
    return oracle_of_all([(prompt, count, seed)])[0]


def oracle_of_all(asked: Sequence[Asked]) -> list[list[int]]:
    """Right tokens of many requests; the oracle of the history."""
    return tokens_of_all([Case(prompt, count, _params(seed)) for prompt, count, seed in asked], WORKER_LAYOUT)


def _params(seed: int | None) -> SamplingParams:
    options = sampling_options(seed)
    options["logit_bias"] = tuple(options.get("logit_bias", {}).items())
    return SamplingParams(**options)


def prompt_of(name: str, length: int = PROMPT) -> list[int]:
    """Prompts that begin differently, so that no prefix cache saves a transfer. The name is the seed."""
    return random.Random(name).choices(range(VOCAB_SIZE), k=length)


def until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 30.0) -> float:
    """Waits as `wait_until` does; returns the seconds that it took."""
    started = time.monotonic()
    wait_until(condition, what, seconds)
    return time.monotonic() - started


def _client_name(line: Mapping[str, Any]) -> str:
    return str(line["request"]).partition("/")[0]


def _log_line(text: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text)
    line["at"] = datetime.fromisoformat(line["time"]).timestamp() - time.time() + time.monotonic()
    return line


@contextmanager
def asking(it: Scene, name: str, count: int) -> Iterator[list[Completion]]:
    """`count` requests, AT_ONCE at a time, while the body runs; their completions are in the list in the end."""
    done: list[Completion] = []
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(it.ask_all, [f"{name} {number}" for number in range(count)], at_once=AT_ONCE)
        yield done
        done += running.result()
