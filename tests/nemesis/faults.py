"""The faults of the nemesis. Each is injected into a running cluster; a deadline says when all members serve again."""

import asyncio
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil

from kvrelay.cluster.asking.control import Control
from kvrelay.cluster.errors import RunError
from nemesis.ground import Ground, Inject
from nemesis.hostile import LONG, attacked, errors, fuzzed
from nemesis.member import CLOCK_LIBRARY, POISON, REMOTE, give, set_clock
from support.chaos import CLEAR, HELD

CLOCK_JUMPS = (-86400, -30, 30, 86400)
"""Seconds by which the clock jumps."""
COMMAND_SECONDS = 90.0
"""Seconds for a command to be followed."""
SPARE_FDS = 2
"""File descriptors that a process may still open under the limit."""


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
