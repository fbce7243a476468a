"""A small cluster on a virtual clock: seeded worlds in which everything that may happen to a hand-off does.

A world is one to three requests, each in up to three attempts, on one or two prefill and one or two decode processes
with pools of a few blocks. Processes crash and come back as another incarnation, freeze and wake as zombies, see their
clocks jump; streams are cut or swallow what is said, or lose, double and reorder it; links break, and damage frames;
clients cancel; pools are full. The machines, the guards and the queue for room are the real ones; exporter, importer,
links and router are stood in for. After every event the guarantees are checked: `Violation` names the one that broke.

`run_world(seed)` is one world. The same seed is the same world, event by event.
"""

import gc
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvrelay.transfer.events import Manifest
from kvrelay.transfer.messages import Key
from support.simulated_blocks import BLOCK, LAYERS, Violation
from support.simulated_ends import TICK
from support.simulated_links import Stream
from support.simulated_processes import DecodeProcess, PrefillProcess, Process

ATTEMPTS = 3

Seen = dict[tuple[str, str, str, str], set[str]]
"""(machine, state, event, next state) -> names of the actions asked for."""


class Router:
    """Places attempts, tries again, cancels. It acts on what it hears, late."""

    dead = False
    frozen = 0.0

    def __init__(self, world: "World") -> None:
        self.world = world
        self.placed: dict[Key, tuple[PrefillProcess, DecodeProcess]] = {}
        self.current: dict[str, int] = {}
        self.open: set[str] = set()

    def start(self, request: str, attempt: int = 1) -> None:
        world = self.world
        if attempt == 1:
            self.open.add(request)
        if attempt > ATTEMPTS or request not in self.open:
            self.open.discard(request)
            return
        key = request, attempt
        self.current[request] = attempt
        left, right = world.pick(world.prefills), world.pick(world.decodes)
        self.placed[key] = left, right
        tokens = world.tokens[request]
        world.post(world.random() * 0.1, left, left.begin, key, right, tokens)
        if world.hostile and world.random() < 0.03:
            tokens += 1  # the two ends are told of different prompts
        world.post(world.random() * 0.1, right, right.expect, key, left, tokens)

    def report(self, key: Key, what: str) -> None:
        self.world.post(self.world.random() * 0.1, self, self._heard, key, what)

    def _heard(self, key: Key, what: str) -> None:
        request, attempt = key
        if request not in self.open or self.current[request] != attempt:
            return
        if what == "imported":
            self.open.discard(request)
        else:
            self.current[request] = attempt + 1
            self.cancel(key)
            self.world.post(self.world.random() * 0.1, self, self.start, request, attempt + 1)

    def cancel(self, key: Key) -> None:
        for process in self.placed.get(key, ()):
            self.world.post(self.world.random() * 0.1, process, process.cancel, key)

    def client_cancels(self, request: str) -> None:
        if request in self.open:
            self.open.discard(request)
            self.cancel((request, self.current[request]))

    def lost(self, process: Process) -> None:
        """A process is gone; its requests go elsewhere."""
        for request in sorted(self.open):
            key = request, self.current[request]
            if process in self.placed.get(key, ()):
                self._heard(key, "failed")


class World:
    """One seed's."""

    def __init__(self, seed: int, checksums: bool = True, trace: list[str] | None = None):
        rng = random.Random(seed)
        self.random = random_ = rng.random
        self.checksums = checksums
        self.trace = trace
        self.now = 0.0
        self.events = 0
        self.quiet = False
        self.seen: Seen = {}
        self.commits: set[Key] = set()
        self._heap: list[tuple[float, int, Any, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.hostile = random_() < 0.35
        self.link_noise = 0.1 if random_() < 0.25 else 0.0
        self._frame_blocks = 1 + int(random_() * 2)
        self.router = Router(self)
        self.processes: list[Any] = []
        self.prefills: list[Any] = [self._new(PrefillProcess, f"P{n}", 0) for n in range(1 + int(random_() * 2))]
        self.decodes: list[Any] = [self._new(DecodeProcess, f"D{n}", 0) for n in range(1 + int(random_() * 2))]
        self.tokens: dict[str, int] = {}
        for number in range(1 + int(random_() * 2.6)):
            request = f"r{number}"
            self.tokens[request] = 1 + int(random_() * 13)
            self.post(random_() * 0.5, self.router, self.router.start, request)
        faults = (self._crash, self._freeze, self._jump, self._cut, self._break, self._silence, self._cancel)
        expected = int(random_() * 4)
        self.calm = not (expected or self.hostile or self.link_noise)
        """Nothing fails here."""
        for _ in range(expected):
            self.post(random_() * 2.0, self.router, faults[int(random_() * len(faults))])
        if self.hostile or (not self.calm and random_() < 0.1):
            for _ in range(int(random_() * 8)):
                self.post(random_() * 1.2, self.router, self._break)

    def _new(self, kind: type[Process], name: str, incarnation: int) -> Process:
        process = kind(self, name, incarnation, 5 + int(self.random() * 6))
        self.processes.append(process)
        return process

    def shape(self, key: Key, tokens: int) -> Manifest:
        return Manifest(tokens, key[0].encode(), 2 * LAYERS, BLOCK, self._frame_blocks * BLOCK, LAYERS)

    def pick(self, processes: list[Any]) -> Any:
        return processes[int(self.random() * len(processes))]

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f}  {text}")

    # The clock.

    def post(self, delay: float, process: Any, what: Callable[..., None], *arguments: Any) -> None:
        """`what` happens in `process` after `delay`, unless that has died; later, if it is frozen then."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay, self._number, process, what, arguments))

    def run(self) -> "World":
        """To the end: until nothing is under way any more."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            at, _, process, what, arguments = pop(heap)
            if process.dead:
                continue
            if process.frozen > at:
                self._number += 1
                heapq.heappush(heap, (process.frozen, self._number, process, what, arguments))
                continue
            self.now = at
            self.events += 1
            what(*arguments)
            if not self.quiet and (at > 12.0 or (at > 0.6 and not self.router.open)):
                self.quiet = True
        for process in self.processes:
            if not process.dead:
                for end in process.ends:
                    end.check_end()
                process.blocks.check_all_free()
        lost = self.tokens.keys() - {request for request, _ in self.commits}
        if self.calm and lost:
            raise Violation("lost", f"nothing failed, and {', '.join(sorted(lost))} did not arrive")
        return self

    # Faults.

    def damage(self) -> str | None:
        """What happens to a frame on its way."""
        if not self.link_noise or self.random() >= self.link_noise:
            return None
        kinds = ("flip", "replay", "drop", "twice", "swap")
        return kinds[int(self.random() * len(kinds))]

    def _any(self) -> Any:
        living = [process for process in self.prefills + self.decodes if not process.dead]
        return self.pick(living) if living else None

    def _replace(self, process: Any) -> None:
        """The supervisor starts another incarnation; the peers hear of it, and the router."""
        workers = self.prefills if process in self.prefills else self.decodes
        if process not in workers:
            return
        new = self._new(type(process), process.name, process.incarnation + 1)
        workers[workers.index(process)] = new
        for stream in list(process.streams.values()):
            peer = stream.left if stream.right is process else stream.right
            self.post(self.random() * 0.2, peer, peer.on_stream_end, stream)
        self.router.lost(process)

    def _crash(self) -> None:
        process = self._any()
        if process is None:
            return
        self.say(f"{process} crashes")
        process.dead = True
        for stream in process.streams.values():
            link = stream.left_link if stream.left is process else stream.right_link
            if self.random() < 0.8:
                stream.cut()
                if link is not None:
                    link.break_()
        self.post(self.random() * 0.5, self.router, self._replace, process)

    def _freeze(self) -> None:
        process = self._any()
        if process is None:
            return
        seconds = (0.3, 1.5, 3.0, 6.0)[int(self.random() * 4)]
        self.say(f"{process} is frozen for {seconds}")
        process.frozen = self.now + seconds
        if seconds > 1.0 and self.random() < 0.6:
            self.post(0.8, self.router, self._replace, process)

    def _jump(self) -> None:
        process = self._any()
        if process is None:
            return
        seconds = (0.5, 2.5, 9.0)[int(self.random() * 3)]
        self.say(f"{process}'s clock jumps by {seconds}")
        process.skew += seconds
        for end in list(process.attempts.values()):
            self.post(self.random() * TICK, process, end.look)

    def _stream(self) -> Stream | None:
        streams = [stream for process in self.prefills for stream in process.streams.values()]
        return self.pick(streams) if streams else None

    def _cut(self) -> None:
        stream = self._stream()
        if stream is not None:
            self.say(f"the stream {stream.left} to {stream.right} is cut")
            stream.cut()

    def _break(self) -> None:
        stream = self._stream()
        if stream is not None and stream.left_link is not None:
            self.say(f"the link {stream.left} to {stream.right} breaks")
            stream.left_link.break_()

    def _silence(self) -> None:
        stream = self._stream()
        if stream is not None:
            forward = self.random() < 0.5
            self.say(f"the stream {stream.left} to {stream.right} swallows, {forward=}")
            stream.silent[forward] = True

    def _cancel(self) -> None:
        request = self.pick(sorted(self.tokens))
        self.say(f"the client cancels {request}")
        self.router.client_cancels(request)


def run_world(seed: int, checksums: bool = True) -> World:
    """One seed's world, run to its end.

    Raises:
        Violation: naming the guarantee that broke, the seed, and the world's last events.
    """
    try:
        return World(seed, checksums).run()
    except Violation as violation:
        violation.add_note(f"seed {seed}, its last events:\n" + "\n".join(trace(seed, checksums)[-60:]))
        raise


def trace(seed: int, checksums: bool = True) -> list[str]:
    """All events of one seed's world, up to the violation if there is one."""
    lines: list[str] = []
    with suppress(Violation):
        World(seed, checksums, lines).run()
    return lines


@dataclass(slots=True)
class Explored:
    """What some seeds' worlds came to."""

    worlds: int = 0
    events: int = 0
    commits: int = 0
    seen: Seen = field(default_factory=dict)
    visits: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    """By seed: what broke, and the trace."""
    cpu_seconds: float = 0.0

    def add(self, other: "Explored") -> None:
        """Both together."""
        self.worlds += other.worlds
        self.events += other.events
        self.commits += other.commits
        self.visits += other.visits
        self.violations |= other.violations
        self.cpu_seconds += other.cpu_seconds
        for transition, actions in other.seen.items():
            self.seen.setdefault(transition, set()).update(actions)


def explore(seeds: Sequence[int]) -> Explored:
    """Runs these seeds' worlds, in this process."""
    explored = Explored()
    started = time.process_time()
    # A world is full of cycles; looking for garbage after each few hundred objects would take a third of the time.
    gc.disable()
    for number, seed in enumerate(seeds):
        if number % 100 == 0:
            gc.collect()
            gc.freeze()
        try:
            world = run_world(seed)
        except Violation as violation:
            explored.violations[seed] = "\n".join((str(violation), *violation.__notes__))
            continue
        explored.worlds += 1
        explored.events += world.events
        explored.commits += len(world.commits)
        explored.visits.update(world.seen.keys())
        for transition, actions in world.seen.items():
            explored.seen.setdefault(transition, set()).update(actions)
    gc.enable()
    explored.cpu_seconds = time.process_time() - started
    return explored
