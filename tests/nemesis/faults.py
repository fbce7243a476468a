"""The faults of the nemesis. Each is injected into a running cluster; a deadline says when all members serve again.

Hostile clients are processes of `benchmarks/siege/load.py` that call one router for some seconds.
"""

import asyncio
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil

from kvrelay.cluster.asking.control import Control
from kvrelay.cluster.errors import RunError
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from nemesis.load import Load
from nemesis.member import CLOCK_LIBRARY, POISON, REMOTE, give, set_clock
from support.chaos import CLEAR, HELD, Chaos
from support.hostile import GENERATE
from support.supervised import Supervised

CLOCK_JUMPS = (-86400, -30, 30, 86400)
"""Seconds by which the clock jumps."""
COMMAND_SECONDS = 90.0
"""Seconds for a command to be followed."""
SPARE_FDS = 2
"""File descriptors that a process may still open under the limit."""
LOAD = Path(__file__).parents[2] / "benchmarks" / "siege" / "load.py"
ATTACK_SECONDS = 8.0
"""Seconds that an attack lasts."""
START_SECONDS = 120.0
"""Seconds within which the clients' process says that it has started. The machine gives it less than the cluster."""
END_SECONDS = 30.0
LONG = {"prompts": (1500, 1500), "counts": (2000, 2000), "at_once": 30, "distinct": 0}
"""Streams that want four times the KV of both decode workers."""
Requests = Callable[[Path, random.Random], list[tuple[str, Path]]]
"""Writes bodies of requests to files of a folder; returns the path and the file of each."""
FUZZED = 200
"""Number of damaged bodies."""


@dataclass
class Ground:
    """The cluster, network and load that faults disturb."""

    cluster: Supervised
    chaos: Chaos
    load: Load
    webs: Sequence[str] = ()
    """host:port of each router's HTTP, in the order of the load's addresses."""
    authority: str = ""
    """File with the certificate that signed the routers'."""
    _known: dict[str, str] = field(default_factory=dict)
    """The role of each desired member, as last heard."""

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are desired now; commands change them."""
        return [name for name, role in self._roles().items() if role != "router"]

    @property
    def prefills(self) -> list[str]:
        return [name for name, role in self._roles().items() if role == "prefill"]

    def _roles(self) -> dict[str, str]:
        """The role of each desired member whose process has started, as the supervisor says."""
        with suppress(grpc.RpcError):
            roles = self.cluster.desired()
            self._known = {name: role for name, role in roles.items() if (self.cluster.folder / f"{name}.pid").exists()}
        return self._known

    async def recovered(self, gone: dict[str, int]) -> bool:
        """Whether every member is ready, and the processes of `gone` (by name) are replaced."""
        with suppress(grpc.RpcError):
            status = await asyncio.to_thread(self.cluster.status)
            members = [each.member for each in status.members]
            ready = {member.name: member.pid for member in members if member.state == MEMBER_STATE_READY}
            wanted = {member.name for member in status.desired.members}
            # A command may have ended the victim for good meanwhile.
            replaced = all(ready.get(name, pid) != pid for name, pid in gone.items() if name in wanted)
            return status.ready and ready.keys() >= wanted and replaced and status.settled
        return False


Inject = Callable[[Ground, random.Random], Awaitable[dict[str, int]]]
"""Function that injects a fault; when it is over, returns the processes that must be replaced: pids by name."""


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal, unless the process has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    inject: Inject
    seconds: float
    """Seconds from the end of the fault within which all members are ready again."""
    needs: Callable[[], str] = str
    """Function that tells why the fault can't be injected on this machine; empty if it can."""
    ends_workers: bool = False
    """Whether it ends workers, other than by a request."""


def _victim(ground: Ground, rng: random.Random) -> dict[str, int]:
    name = rng.choice(ground.workers)
    return {name: ground.cluster.pid(name)}


def _signalled(number: signal.Signals) -> Inject:
    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        victim = _victim(ground, rng)
        for pid in victim.values():
            send(pid, number)
        return victim

    return inject


def _stopped(seconds: float, *, lost: bool) -> Inject:
    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        victim = _victim(ground, rng)
        for pid in victim.values():
            send(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in victim.values():
            send(pid, signal.SIGCONT)
        return victim if lost else {}

    return inject


def _ordered(order: str) -> Inject:
    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        victim = _victim(ground, rng)
        for name in victim:
            give(ground.cluster.folder, name, order)
        return victim

    return inject


async def _poison(ground: Ground, rng: random.Random) -> dict[str, int]:
    """The router tries the request at some of the workers, and gives it up before it has ended all of them."""
    before = {name: ground.cluster.pid(name) for name in ground.prefills}
    await ground.load.send("poison", poison=POISON)
    return {name: pid for name, pid in before.items() if _is_over(pid)}


def _is_over(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def _router_kill(ground: Ground, rng: random.Random) -> dict[str, int]:
    name = rng.choice([name for name in ground.cluster.config["members"] if name.startswith("router")])
    pid = ground.cluster.pid(name)
    send(pid, signal.SIGKILL)
    return {name: pid}


async def _supervisor_kill(ground: Ground, rng: random.Random) -> dict[str, int]:
    ground.cluster.kill()
    await asyncio.sleep(rng.uniform(0.0, 3.0))
    await asyncio.to_thread(ground.cluster.start)
    return {}


async def _link_reset(ground: Ground, rng: random.Random) -> dict[str, int]:
    for link in ground.chaos.links():
        link.reset()
    return {}


async def _link_silent(ground: Ground, rng: random.Random) -> dict[str, int]:
    prefill = rng.choice(ground.prefills)
    link = ground.chaos.link(prefill, rng.choice(REMOTE))
    link.set(HELD, HELD)
    await asyncio.sleep(4.0)
    link.set(CLEAR, CLEAR)
    return {}


async def _slow_reader(ground: Ground, rng: random.Random) -> dict[str, int]:
    await asyncio.gather(*(ground.load.send("slow", pause=3.0) for _ in range(4)))
    return {}


async def _client_kill(ground: Ground, rng: random.Random) -> dict[str, int]:
    command = (sys.executable, "-m", "nemesis.load", f"client-{rng.random()}", ground.authority, *ground.load.addresses)
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    if client.stdout is not None:
        await client.stdout.readline()
    client.kill()
    await client.wait()
    return {}


async def _clock_jump(ground: Ground, rng: random.Random) -> dict[str, int]:
    (name,) = _victim(ground, rng)
    set_clock(ground.cluster.folder, name, rng.choice(CLOCK_JUMPS))
    await asyncio.sleep(4.0)
    set_clock(ground.cluster.folder, name, 0)
    return {}


async def _disk_full(ground: Ground, rng: random.Random) -> dict[str, int]:
    (name,) = _victim(ground, rng)
    give(ground.cluster.folder, name, "disk full")
    await asyncio.sleep(4.0)
    give(ground.cluster.folder, name, "disk free")
    return {}


async def _fd_limit(ground: Ground, rng: random.Random) -> dict[str, int]:
    (pid,) = _victim(ground, rng).values()
    with suppress(ProcessLookupError, FileNotFoundError):
        used = len(os.listdir(f"/proc/{pid}/fd"))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + SPARE_FDS, hard))
        await asyncio.sleep(4.0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return {}


Command = Callable[[Control, list[str], random.Random], int]
"""Function that gives one command to the supervisor and returns the revision of the desired state that has it."""


def _commanded(command: Command) -> Inject:
    """A command that somebody gives in the middle of everything. One that is refused as unsafe is followed by none."""

    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        def give() -> None:
            with suppress(RunError):
                revision = command(ground.cluster.control, sorted(ground.workers), rng)
                ground.cluster.settle(revision, COMMAND_SECONDS)

        await asyncio.to_thread(give)
        return {}

    return inject


def _scale(control: Control, workers: list[str], rng: random.Random) -> int:
    return control.scale({"prefill": rng.randint(1, 3), "decode": rng.randint(1, 3)})


def _role(control: Control, workers: list[str], rng: random.Random) -> int:
    return control.set_role(rng.choice(workers), rng.choice(("prefill", "decode")))


def _drain(control: Control, workers: list[str], rng: random.Random) -> int:
    return control.drain(rng.choice(workers), replace=rng.random() < 0.5)


def _restart(control: Control, workers: list[str], rng: random.Random) -> int:
    return control.restart([rng.choice(workers)])


def _no_clock() -> str:
    return "" if os.environ.get(CLOCK_LIBRARY) else "there is no C compiler"


# Hostile clients.


def attacked(kind: str, requests: Requests | None = None, **options: Any) -> Inject:
    """Clients of this kind call one router, with the bodies of `requests`; their answers don't count."""

    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        number = rng.randrange(len(ground.load.addresses))
        reach = {"grpc": ground.load.addresses[number], "http": ground.webs[number], "authority": ground.authority}
        given = {**reach, "key": "hostile", "seed": rng.randrange(2**31), "name": f"hostile-{rng.random()}", **options}
        if requests is not None:
            given["requests"] = [(path, str(file)) for path, file in requests(ground.cluster.folder, rng)]
        command = (sys.executable, str(LOAD), kind, json.dumps(given))
        client = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            if client.stdout is not None:
                await asyncio.wait_for(client.stdout.readline(), START_SECONDS)
            await asyncio.sleep(ATTACK_SECONDS)
            # It ends when its standard input does. How soon is no promise of the cluster.
            if client.stdin is not None:
                client.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(client.communicate(), END_SECONDS)
            if client.returncode:
                raise RuntimeError(f"the clients of {kind} ended with {client.returncode}")
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        return {}

    return inject


def errors(folder: Path, rng: random.Random) -> list[tuple[str, Path]]:
    """Bodies that are wrong in very many places."""
    wrong: dict[str, tuple[str, Any]] = {
        "ids": ("/detokenize", {"tokens": [-1] * 500_000}),
        "stops": ("/v1/completions", {"prompt": "a", "stop": [5] * 65_000}),
        "contents": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5] * 65_000}]}),
        "roles": ("/v1/chat/completions", {"messages": [{"role": "r" * 4_000_000, "content": "a"}]}),
        "fields": ("/v1/completions", {"y" * 4_000_000: 0}),
        "prompts": ("/v1/completions", {"prompt": [[5]] * 1024, "max_tokens": 2**40}),
    }
    made = []
    for name, (path, body) in wrong.items():
        file = folder / f"wrong-{name}.json"
        if not file.exists():
            file.write_text(json.dumps(body))
        made.append((path, file))
    return made


def fuzzed(folder: Path, rng: random.Random) -> list[tuple[str, Path]]:
    """Bodies for HTTP and for gRPC that were right before some of their bytes were changed."""
    prompt = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]), sampling=SamplingParams(max_tokens=4, temperature=0.5))
    right = [
        ("/v1/completions", b'{"prompt": "a b", "max_tokens": 4, "stop": ["x"], "seed": 3}'),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "logprobs": true}',
        ),
        ("/tokenize", b'{"prompt": "a b"}'),
        (GENERATE, prompt.SerializeToString()),
    ]
    made = []
    for number in range(FUZZED):
        path, body = rng.choice(right)
        data = bytearray(body)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
        file = folder / f"fuzzed-{number}"
        file.write_bytes(data)
        made.append((path, file))
    return made


FAULTS = (
    Fault("SIGKILL", _signalled(signal.SIGKILL), 30.0, ends_workers=True),
    Fault("SIGTERM", _signalled(signal.SIGTERM), 40.0, ends_workers=True),
    Fault("SIGSTOP for 5 s", _stopped(5.0, lost=True), 30.0, ends_workers=True),
    Fault("SIGSTOP for 0.4 s", _stopped(0.4, lost=False), 10.0),
    Fault("engine hang", _ordered("hang"), 60.0, ends_workers=True),
    Fault("engine exception", _ordered("raise"), 40.0, ends_workers=True),
    Fault("poison request", _poison, 40.0),
    Fault("router SIGKILL", _router_kill, 30.0),
    Fault("supervisor SIGKILL", _supervisor_kill, 20.0),
    Fault("link reset", _link_reset, 10.0),
    Fault("link silent for 4 s", _link_silent, 10.0),
    Fault("slow reader", _slow_reader, 10.0),
    Fault("client SIGKILL", _client_kill, 10.0),
    Fault("clock jump", _clock_jump, 10.0, _no_clock),
    Fault("log's disk full", _disk_full, 10.0),
    Fault("file descriptors used up", _fd_limit, 30.0),
    Fault("oversubscription", attacked("streams", **LONG), 40.0),
    Fault("slow bodies", attacked("slow bodies", connections=100), 10.0),
    Fault("grammars", attacked("grammars", connections=8), 20.0),
    Fault("huge errors", attacked("bodies", errors, connections=4), 10.0),
    Fault("fuzzed requests", attacked("bodies", fuzzed, connections=16), 10.0),
    Fault("random deadlines", attacked("deadlines", count=300), 10.0),
    Fault("abandoned handshakes", attacked("partial", what="handshake", count=200, source="127.0.0.9"), 10.0),
    Fault("unfinished messages", attacked("partial", what="Generate", count=200, source="127.0.0.9"), 10.0),
    Fault("viewers of the page", attacked("viewers", connections=40), 10.0),
    Fault("scale", _commanded(_scale), 60.0),
    Fault("role", _commanded(_role), 30.0),
    Fault("drain", _commanded(_drain), 60.0),
    Fault("restart", _commanded(_restart), 60.0),
)
