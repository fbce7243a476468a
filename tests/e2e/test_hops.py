"""The walk of one request through router and workers is the one that docs/architecture.md lists, hop by hop."""

import asyncio
import inspect
import itertools
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import aiohttp

import kvrelay.router
from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.config import EngineConfig
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from support.router_fakes import FakeSupervisor, until

ROOT = Path(kvrelay.router.__file__).resolve().parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
STAGE = re.compile(r"^\*\*(.+)\*\*$")
HOP = re.compile(r"^\d+\. (?:\*(.+?)\*: )?`(\S+)` `(\S+)`")
COUNT = re.compile(r"(\d+) hops, (\d+) of them on another thread than the hop before")
VALUES = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>", "__init__")
"""Names of code that only computes a value."""
PERIODIC = {"Endpoint.tick"}
"""Functions that run again and again, whatever is asked."""
LOOPS = {"LinkThread._begin_jobs"}
"""Functions in which a thread waits for work: whether they were entered before the request is a matter of chance."""
THREADS = {"MainThread": "event loop", "engine": "engine thread", "link": "link's thread"}
PROMPT_TOKENS = 64
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
RESUMED = 3
"""Bits of a RESUME instruction's argument, one of which is set where a function goes on."""


class Hop(NamedTuple):
    """A function of the walk."""

    file: str
    """Path in the repository."""
    name: str
    """Qualified name."""


class Page(NamedTuple):
    """The walk as the page describes it."""

    stages: dict[str, list[Hop]]
    threads: dict[Hop, str]
    """Thread of each hop."""
    counts: tuple[int, int]
    """Hops, and those of them that begin on another thread than the hop before them."""


def documented() -> Page:
    """The hops that the page lists. A hop without a thread runs on that of the hop before."""
    section = PAGE.read_text().partition("\n## The straight road\n")[2].partition("\n## ")[0]
    page = Page({}, {}, (0, 0))
    thread = ""
    for line in section.splitlines():
        if found := COUNT.search(line):
            page = page._replace(counts=(int(found[1]), int(found[2])))
        elif found := STAGE.match(line):
            page.stages[found[1]] = []
        elif found := HOP.match(line):
            thread = found[1] or thread
            hop = Hop(found[2], found[3])
            page.stages[list(page.stages)[-1]].append(hop)
            page.threads[hop] = thread
    return page


class Walk:
    """Records which functions of ours are entered or go on, on any thread, with those that have called them."""

    def __init__(self) -> None:
        self.on = False
        self.entries: list[tuple[str, list[tuple[int, Hop]]]] = []
        """Thread and stack of each, the innermost function last, with the number of the entry by which it began."""
        self.calls: Counter[Hop] = Counter()
        """How often each was entered, from its beginning."""
        self._begun: dict[int, tuple[int, FrameType]] = {}
        # By id, since two functions of the same text on the same line of two files are equal.
        self._hops: dict[int, tuple[CodeType, Hop | None]] = {}

    def _hop(self, code: CodeType) -> Hop | None:
        if id(code) not in self._hops:
            path = Path(os.path.realpath(code.co_filename))
            ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv")
            known = ours and code.co_name not in VALUES
            self._hops[id(code)] = code, Hop(str(path.relative_to(ROOT)), code.co_qualname) if known else None
        return self._hops[id(code)][1]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        entered = self._hop(frame.f_code) if self.on and event == "call" else None
        if entered is None:
            return
        if not frame.f_code.co_flags & SUSPENDED or not frame.f_code.co_code[frame.f_lasti + 1] & RESUMED:
            self._begun[id(frame)] = len(self.entries), frame
            self.calls[entered] += 1
        stack, at = [(len(self.entries), entered)], frame.f_back
        while at is not None:
            if id(at) in self._begun and (hop := self._hop(at.f_code)) is not None:
                stack.append((self._begun[id(at)][0], hop))
            at = at.f_back
        self.entries.append((threading.current_thread().name.partition(" ")[0], stack[::-1]))

    def steps(self, listed: Collection[Hop]) -> list[tuple[Hop, str]]:
        """Each entry of a listed function between the last byte of the body and the first token of decode, and its
        thread; before the first one, those of the functions that have called it."""
        names = [stack[-1][1].name for _, stack in self.entries]
        writes = [at for at, name in enumerate(names) if name == "Events._send"]
        first = max(at for at, name in enumerate(names[: writes[0]]) if name == "HttpConnection.data_received")
        steps: dict[tuple[int, Hop], str] = {}
        seen: set[Hop] = set()
        for thread, stack in self.entries[first : writes[1] + 1]:
            hop = stack[-1][1]
            if hop in listed and PERIODIC.isdisjoint(each.name for _, each in stack):
                new = stack[-1:] if hop in seen else [each for each in stack if each[0] >= first]
                steps |= {each: THREADS[thread] for each in new if each not in steps and each[1].name not in LOOPS}
                seen.add(hop)
        return [(hop, thread) for (_, hop), thread in steps.items()]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also watches the threads that are started meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


async def request(url: str, prompt: list[int]) -> list[bytes]:
    """Asks for a streamed completion, whose body follows the headers; returns the events."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, expect100=True) as answer,
    ):
        return [line async for line in answer.content if line.strip()]


async def walked() -> Walk:
    """The walk of a request for a pair of workers that has served others before."""
    walk = Walk()
    supervisor = FakeSupervisor()
    await supervisor.start()
    address = f"127.0.0.1:{supervisor.port}"
    engine = EngineConfig(kv_memory_bytes=24 * 2**20, threads=1)
    sending = WorkerConfig("prefill-0", "prefill", "pico", supervisor=address, engine=engine)
    receiving = WorkerConfig("decode-0", "decode", "pico", supervisor=address, engine=engine)
    with walk.watching():
        router = RouterServer(RouterConfig(model="pico", grpc_port=0, http_port=0, supervisor=address))
        prefill = WorkerServer(sending, {"prefill": PrefillRole})
        decode = WorkerServer(receiving, {"decode": DecodeRole})
        try:
            for server in (prefill, decode, router):
                await server.start()
            heard = supervisor.heard.values
            await until(lambda: sum(member.state == MEMBER_STATE_READY for member in heard()) == 2, "both are ready")
            supervisor.announce(*heard())
            await until(lambda: sum(view.ready for view in router.registry.view()) == 2, "the router reaches both")
            for number in range(3):
                walk.on = number == 2
                await request(f"http://{router.http_address}", [10 + number, *range(11, 10 + PROMPT_TOKENS)])
        finally:
            walk.on = False
            for server in (router, prefill, decode):
                await server.stop(0.0)
            await supervisor.stop()
    return walk


def test_a_request_takes_the_hops_that_the_page_lists() -> None:
    page = documented()
    assert page.threads, "the page lists no hops"
    walk = asyncio.run(walked())
    steps = walk.steps(page.threads)
    entered = {hop for hop, _ in steps}
    assert entered - page.threads.keys() == set(), "these are not listed"
    assert page.threads.keys() - entered == set(), "these are listed, and not entered"
    for stage, hops in page.stages.items():
        # Two threads may take their hops in any order: the one that queued work goes on beside the one that takes it.
        left = {thread: iter([step for step in steps if step[1] == thread]) for thread in set(page.threads.values())}
        for hop in hops:
            step = hop, page.threads[hop]
            assert step in left[step[1]], f"{hop} does not follow its thread's hop before it in the stage {stage!r}"
    assert {hop: walk.calls[hop] for hop in page.stages["Check"]} == dict.fromkeys(page.stages["Check"], 1)
    crossings = sum(thread != before for before, thread in itertools.pairwise(page.threads.values()))
    assert page.counts == (len(page.threads), crossings)
