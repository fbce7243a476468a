"""A small cluster on a virtual clock: seeded worlds in which everything that may happen to a hand-off does.

A world is one to three requests, each in up to three attempts, on one or two prefill and one or two decode processes
with pools of a few blocks. Processes crash and come back as another incarnation, freeze and wake as zombies, see their
clocks jump, lose their engine, or get a partial membership; streams are cut or swallow messages, or lose, double and
reorder them; links break, and damage frames; clients cancel; pools are full. Coordinators, machines, the queue of
reservations, pools, frames with their checksums and the managers of links are those of the product; engines, streams,
the threads of links and the router are simulated. After every event the guarantees are checked: `Violation` names the
one that broke.

`run_world(seed)` is one world. The same seed is the same world, event by event.
"""

import gc
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from kvrelay.decode_worker import kv_receiver
from kvrelay.engine.degree import ONE, Degree
from kvrelay.prefill_worker import kv_sender
from kvrelay.transfer.links import links
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.routes import RankPair, unroutable
from support.simulation.blocks import CODES, FLOATS, LAYERS, STATES, Violation, caches_of
from support.simulation.damage import DAMAGES, Damage, History
from support.simulation.judge import ObservedReceiveAttempt, ObservedSendAttempt, Observer, Seen
from support.simulation.links import Link, SimulatedThread, Stream
from support.simulation.workers import DecodeProcess, PrefillProcess, Process, config_of

DEGREES = (ONE, Degree(2), Degree(4), Degree(1, 2), Degree(2, 3))
ATTEMPTS = 3
END_SECONDS = 300.0
"""Simulated seconds after which every world must be over: several times the deadlines of all attempts together."""
CALM_SLOW_FRAMES = 3
"""Slow frames of a world in which nothing fails: with more, each attempt of a request may end by its deadline."""


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
        elif what == "failed":
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
    """The world of one seed."""

    def __init__(
        self,
        rng: random.Random,
        checksums: bool = True,
        trace: list[str] | None = None,
        noise: float | None = None,
        ranks: bool | None = None,
    ):
        """
        Args:
            rng: makes every decision; Hypothesis has generators whose decisions it can shrink.
            noise: share of the frames that links damage; in a quarter of the worlds a tenth by default.
            ranks: whether processes have several ranks; in a quarter of the worlds by default, where the model allows.
        """
        self.rng = rng
        self.random = random_ = rng.random
        self.trace = trace
        self.observer = Observer()
        self.observer.trace = trace
        self.now = 0.0
        self.events = 0
        self.commits: set[Key] = set()
        self.slow_frames = 0
        self._heap: list[tuple[float, int, Any, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.hostile = random_() < 0.35
        self.link_noise = (0.1 if random_() < 0.25 else 0.0) if noise is None else noise
        self.damages = Counter[str]()
        self.histories: dict[tuple[str, str, RankPair], History] = {}
        self.streams_of_memory = random_() < 0.6
        caches = caches_of(FLOATS if random_() < 0.8 else CODES)
        self.cache = caches[0] if random_() < 0.4 else caches[int(random_() * len(caches))]
        """Cache that the model keeps of a sequence."""
        ranked = random_() < 0.25 if ranks is None else ranks
        self.degrees = (DEGREES[int(random_() * len(DEGREES))], DEGREES[int(random_() * len(DEGREES))])
        """Ranks of the prefill and of the decode processes."""
        if not ranked or unroutable(self.cache, *self.degrees) is not None:
            self.degrees = (ONE, ONE)
        self.states = (None, None, STATES, replace(STATES, last=True))[int(random_() * 4)]
        """Hidden states that decode wants."""
        if self.degrees[0].pipeline > 1:
            self.states = None
        self.roomy = random_() < 0.7
        """Whether the hidden states of all requests fit into memory."""
        frame_layers = (1, 2, LAYERS, 2 * LAYERS)[int(random_() * 4)]
        self.config = config_of(frame_layers, 1 if random_() < 0.1 else 8, 1000 if self.roomy else 10, checksums)
        self.router = Router(self)
        self.processes: dict[str, Any] = {}
        self.streams: list[Stream] = []
        self.dialled: dict[tuple[str, str, int, RankPair], Link] = {}
        self.prefills: list[Any] = [self._new(PrefillProcess, f"P{n}", 0) for n in range(1 + int(random_() * 2))]
        self.decodes: list[Any] = [self._new(DecodeProcess, f"D{n}", 0) for n in range(1 + int(random_() * 2))]
        self.tokens: dict[str, int] = {}
        for number in range(1 + int(random_() * 2.6)):
            request = f"r{number}"
            self.tokens[request] = 1 + int(random_() * 13)
            self.post(random_() * 0.5, self.router, self.router.start, request)
        for process in self.processes.values():
            process.members(self._peers_of(process))
        faults = (
            self._crash,
            self._freeze,
            self._jump,
            self._cut,
            self._break,
            self._silence,
            self._cancel,
            self._forget,
            self._end_engine,
        )
        expected = int(random_() * 4)
        self.calm = not (expected or self.hostile or self.link_noise or self.config.max_links == 1)
        """Whether nothing fails here."""
        self.orderly = not (self.hostile or self.link_noise)
        """Whether no message is lost, doubled or reordered in a stream, and no frame is damaged, whatever else
        fails."""
        for _ in range(expected):
            self.post(random_() * 2.0, self.router, self._fail, faults[int(random_() * len(faults))])
        if self.hostile or (not self.calm and random_() < 0.1):
            for _ in range(int(random_() * 12)):
                self.post(random_() * 1.5, self.router, self._fail, self._break)

    def _new(self, kind: type[Process], name: str, incarnation: int) -> Process:
        process = kind(self, name, incarnation, 5 + int(self.random() * 6))
        self.processes[process.id.incarnation] = process
        return process

    def process(self, peer: Peer) -> Any:
        return self.processes[peer.incarnation]

    def _peers_of(self, process: Any) -> list[Peer]:
        others = self.decodes if isinstance(process, PrefillProcess) else self.prefills
        return [other.peer for other in others]

    def pick(self, processes: list[Any]) -> Any:
        return processes[int(self.random() * len(processes))]

    def slow_frame(self) -> bool:
        """Whether the next frame takes up to 2.5 s."""
        slow = self.random() < 0.05
        self.slow_frames += slow
        return slow and not (self.calm and self.slow_frames > CALM_SLOW_FRAMES)

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f}  {text}")

    # The clock.

    def post(self, delay: float, process: Any, what: Callable[..., None], *arguments: Any) -> None:
        """`what` happens in `process` after `delay`, unless that has died; later, if it is frozen then."""
        self.post_at(self.now + delay, process, what, *arguments)

    def post_at(self, at: float, process: Any, what: Callable[..., None], *arguments: Any) -> None:
        """Posts as `post` does, for a time. Calls for the same time happen in the order of posting."""
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, process, what, arguments))

    def run(self) -> "World":
        """Runs to the end: until nothing is under way any more."""
        Observer.current = self.observer
        with ExitStack() as patched:
            patched.enter_context(_quiet())
            patched.enter_context(mock.patch.object(links, "LinkThread", SimulatedThread))
            patched.enter_context(mock.patch.object(kv_sender, "SendAttempt", ObservedSendAttempt))
            patched.enter_context(mock.patch.object(kv_receiver, "ReceiveAttempt", ObservedReceiveAttempt))
            self._run_events()
        for process in self.processes.values():
            if not process.dead:
                process.check_end()
            process.blocks.give_back()
        lost = self.tokens.keys() - {request for request, _ in self.commits}
        if self.calm and lost:
            raise Violation("lost", f"nothing failed, and {', '.join(sorted(lost))} did not arrive")
        return self

    def _run_events(self) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap:
            at, _, process, what, arguments = pop(heap)
            if process.dead:
                continue
            if process.frozen > at:
                self._number += 1
                heapq.heappush(heap, (process.frozen, self._number, process, what, arguments))
                continue
            if at > END_SECONDS:
                raise Violation("leak", f"{process}: attempts are left that end by no deadline")
            self.now = self.observer.clock = at
            self.events += 1
            try:
                what(*arguments)
            except Violation:
                raise
            except Exception as error:
                raise Violation("crash", f"{process}: {what}: {error!r}") from error
            if process is not self.router:
                process.watch()

    # Faults.

    def damage(self) -> Damage | None:
        """Draws the damage to a frame on its way; None, mostly."""
        if not self.link_noise or self.random() >= self.link_noise:
            return None
        damage = DAMAGES[int(self.random() * len(DAMAGES))]
        self.damages[damage.__name__] += 1
        return damage

    def _fail(self, fault: Callable[[Any], None]) -> None:
        """Something happens to a process that lives, if one does."""
        living = [process for process in self.prefills + self.decodes if not process.dead]
        if living:
            fault(self.pick(living))

    def _streams_of(self, process: Any) -> list[Stream]:
        return [each for each in self.streams if process in (each.left.process, each.right.process)]

    def _links_of(self, process: Any) -> list[Link]:
        return [link for link in self.dialled.values() if process in [end.process for end in link.ends]]

    def _replace(self, process: Any) -> None:
        """The supervisor starts another incarnation; peers and router hear of it, each in its time."""
        workers = self.prefills if process in self.prefills else self.decodes
        if process not in workers:
            return
        new = self._new(type(process), process.id.name, process.number + 1)
        workers[workers.index(process)] = new
        new.members(self._peers_of(new))
        for other in self.decodes if workers is self.prefills else self.prefills:
            self.post(self.random() * 0.5, other, lambda other=other: other.members(self._peers_of(other)))
        self.router.lost(process)

    def _crash(self, process: Any) -> None:
        self.say(f"{process} crashes")
        process.dead = True
        for stream in self._streams_of(process):
            if self.random() < 0.8:
                stream.cut()
        for link in self._links_of(process):
            if self.random() < 0.8:
                link.break_()
        self.post(self.random() * 0.5, self.router, self._replace, process)

    def _freeze(self, process: Any) -> None:
        seconds = (0.3, 1.5, 3.0, 6.0)[int(self.random() * 4)]
        self.say(f"{process} is frozen for {seconds}")
        # Never earlier: what is kept until then would be overtaken.
        process.frozen = max(process.frozen, self.now + seconds)
        if seconds > 1.0 and self.random() < 0.6:
            self.post(0.8, self.router, self._replace, process)

    def _jump(self, process: Any) -> None:
        seconds = (0.5, 2.5, 9.0)[int(self.random() * 3)]
        self.say(f"{process}'s clock jumps by {seconds}")
        process.skew += seconds

    def _cut(self, process: Any) -> None:
        for stream in self._streams_of(process)[-1:]:
            self.say(f"the stream {stream.left.process} to {stream.right.process} is cut")
            stream.cut()

    def _break(self, process: Any) -> None:
        links = [link for link in self._links_of(process) if not link.broken]
        if links:
            link = self.pick(links)
            self.say(f"the link of {link.ends[0].process} breaks")
            link.break_()

    def _silence(self, process: Any) -> None:
        for stream in self._streams_of(process)[-1:]:
            side = stream.left if self.random() < 0.5 else stream.right
            stream.silenced.add(side)
            self.say(f"the messages of {side.process} are swallowed")

    def _forget(self, process: Any) -> None:
        """A restarted supervisor sends a membership without one of the members, and later the whole one."""
        peers = self._peers_of(process)
        self.say(f"{process} gets a membership without {peers[-1]}")
        process.members(peers[:-1])
        self.post(self.random(), process, lambda: process.members(self._peers_of(process)))

    def _end_engine(self, process: Any) -> None:
        """The engine thread of a worker ends; the process follows a moment later."""
        self.say(f"the engine of {process} ends")
        process.engine_ended = True
        self.post(1.0 + self.random(), process, process.endpoint.end_pairs, Code.DRAINING)
        self.post(0.5, self.router, self._replace, process)

    def _cancel(self, process: Any) -> None:
        """A client cancels, whatever its processes do."""
        request = self.pick(sorted(self.tokens))
        self.say(f"the client cancels {request}")
        self.router.client_cancels(request)


@contextmanager
def _quiet() -> Iterator[None]:
    """Turns log lines off, as in these worlds almost everything fails, and lets torch compute in this thread only, as
    their tensors are small."""
    level, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)


def run_world(seed: int, **options: Any) -> World:
    """One seed's world, run to its end; `options` as of `World`.

    Raises:
        Violation: naming the guarantee that broke, the seed, and the world's last events.
    """
    try:
        return World(random.Random(seed), **options).run()
    except Violation as violation:
        violation.add_note(f"seed {seed}, its last events:\n" + "\n".join(trace(seed, **options)[-60:]))
        raise


def trace(seed: int, **options: Any) -> list[str]:
    """All events of one seed's world, up to the violation if there is one."""
    lines: list[str] = []
    with suppress(Violation):
        World(random.Random(seed), trace=lines, **options).run()
    return lines


@dataclass(slots=True)
class Explored:
    """Results of the worlds of some seeds."""

    worlds: int = 0
    commits: int = 0
    seen: Seen = field(default_factory=dict)
    visits: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    """Damaged frames by kind of damage."""
    violations: dict[int, str] = field(default_factory=dict)
    """Violations by seed: what broke, and the trace."""

    def add(self, other: "Explored") -> None:
        """Adds the results of other worlds."""
        self.worlds += other.worlds
        self.commits += other.commits
        self.visits += other.visits
        self.damages += other.damages
        self.violations |= other.violations
        for transition, actions in other.seen.items():
            self.seen.setdefault(transition, set()).update(actions)


def explore(seeds: Sequence[int], **options: Any) -> Explored:
    """Runs these seeds' worlds, in this process."""
    explored = Explored()
    # A world is full of cycles; looking for garbage after each few hundred objects would take a third of the time. What
    # was there before stays frozen: a collection that looks at all of it takes half a second.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number, seed in enumerate(seeds):
            if number % 20 == 0:
                gc.collect()
            try:
                world = run_world(seed, **options)
            except Violation as violation:
                explored.violations[seed] = "\n".join((str(violation), *violation.__notes__))
                continue
            seen = world.observer.seen
            explored.add(Explored(1, len(world.commits), seen, Counter(seen.keys()), world.damages))
    finally:
        gc.enable()
    return explored
