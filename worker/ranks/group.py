"""Rank 0's end of a worker of several ranks: starts the others, sends them its plans, and shares their fate."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.ranks.meet import MEET_SECONDS, Meeting, meet
from kvrelay.transfer.links.rank_links import COMMITTED
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.ranks.channel import BEAT_SECONDS, LinkChannel
from kvrelay.worker.ranks.hosts import HostLink, HostListener, OtherRanks
from kvrelay.worker.ranks.local import LocalRanks, Lost

logger = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""Longest time for the other ranks to end by themselves, once they have run something."""


class RankGroup:
    """All ranks of this worker. Implements `Ranks`."""

    def __init__(
        self,
        build: str,
        folder: Path,
        config: WorkerConfig,
        options: EngineConfig,
        failed: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            build: `module:function` that makes a rank's runner, as `kvrelay.engine.build.build_rank`.
            options: of the worker's engine.
            failed: called once if a rank is lost, on a thread of the group's.
        """
        self.degree = options.degree
        self._links: dict[int, LinkChannel] = {}
        self._failed = failed
        self._failure: BaseException | None = None
        self._closing = False
        self._closed = threading.Event()
        self.committed_step = COMMITTED
        """Number of the last step whose result rank 0 has."""
        self._led = False
        """Whether the other ranks have got something to run."""
        self._lock = threading.Lock()
        ranks, hosts = self.degree.ranks, options.hosts
        here = ranks // hosts
        threads = max(1, (options.threads or len(os.sched_getaffinity(0))) // here)
        self.options = replace(options, threads=threads)
        self.place = Place(self.degree)
        self._hosts, self._each = hosts, here
        self._here = LocalRanks(range(1, here), self._hear, self._lose)
        self._others: list[OtherRanks] = [self._here]
        self._listener: HostListener | None = None
        if hosts > 1:
            self._listener = HostListener(config.host, config.ranks_port, config.security.token(), hosts)
        self._host = config.host
        self._arrivals = threading.Semaphore(0)
        """Released by each rank, rank 0 too, that has met the others; later by each other one that is ready; and by a
        failure or `close`."""
        self._start = {
            "tensor": self.degree.tensor,
            "pipeline": self.degree.pipeline,
            "build": build,
            "folder": str(folder),
            "config": TypeAdapter(WorkerConfig).dump_json(replace(config, engine=self.options)),
        }

    @property
    def address(self) -> str:
        """host:port that the agents of other machines dial; empty if all ranks are on this one."""
        return "" if self._listener is None else self._listener.address

    def start(self) -> None:
        """Starts the other ranks, and returns when all have met; they load their parts at once.

        Raises:
            CollectiveError: a rank was lost, or the group was closed.
            ValueError: another rank found a mistake of the user's.
        """
        threading.Thread(target=self._keep, name="ranks", daemon=True).start()
        self._wait_for(self.degree.ranks, "met")

    def wait_until_ready(self) -> None:
        """Returns when the other ranks have loaded and warmed up, and can open links.

        Raises:
            As `start`.
        """
        self._wait_for(self.degree.ranks - 1, "loaded")

    def _wait_for(self, count: int, what: str) -> None:
        deadline = time.monotonic() + MEET_SECONDS
        for _ in range(count):
            arrived = self._arrivals.acquire(timeout=max(0.0, deadline - time.monotonic()))
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise CollectiveError(f"the worker was closed before all ranks had {what}")
            if not arrived:
                raise CollectiveError(f"not all ranks have {what} within {MEET_SECONDS:g} s")

    def _keep(self) -> None:
        """Starts the other ranks, and looks after them. This thread lives until they have ended: the kernel would end
        them with the thread that has started them."""
        meeting = None
        try:
            meeting = Meeting.of_hosts(self._host) if self._hosts > 1 else Meeting.in_memory()
            for number in self._here.numbers:
                with self._lock:
                    if self._over:
                        break
                    self._here.start(number, self._start | {"meeting": meeting.name})
        except (OSError, CollectiveError) as error:
            self._fail(error)
        if meeting is not None:
            threading.Thread(target=self._meet, args=(meeting,), name="ranks meet", daemon=True).start()
            if self._listener is not None:
                given = self._listener, meeting.name
                threading.Thread(target=self._take_hosts, args=given, name="rank hosts", daemon=True).start()
        while not self._closed.wait(BEAT_SECONDS):
            for ranks in self._others if self._failure is None else ():
                ranks.look()

    def _take_hosts(self, listener: HostListener, meeting: str) -> None:
        """Waits for the agents of the other machines, and has them start their ranks."""
        deadline = time.monotonic() + MEET_SECONDS
        for number in range(1, self._hosts):
            connections = listener.wait(number, max(0.0, deadline - time.monotonic()))
            if connections is None:
                self._fail(CollectiveError(f"host {number} of {self._hosts} hasn't come within {MEET_SECONDS:g} s"))
                return
            ranks = range(number * self._each, (number + 1) * self._each)
            link = HostLink(number, ranks, connections, self._hear, self._lose)
            with self._lock:
                over = self._over
                if not over:
                    self._others = [*self._others, link]
            link.start(self._start | {"meeting": meeting})
            if over:
                link.kill()
        listener.close()

    @property
    def _over(self) -> bool:
        return self._closing or self._failure is not None

    def _meet(self, meeting: Meeting) -> None:
        """Meets the other ranks. If one of them is lost before, this thread stays blocked, and nobody waits for it."""
        try:
            self.place = meet(meeting, self.degree, 0, self.options.threads, self._hosts)
        except (CollectiveError, OSError) as error:
            self._fail(error)
        if self._failure is not None:
            self.place.abort()
        self._arrivals.release()
        self._closed.wait()
        meeting.close()

    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks on this machine, rank 0's first."""
        return os.getpid(), *(pid for ranks in self._others for pid in ranks.pids())

    def send(self, message: bytes) -> None:
        """See `Ranks`."""
        self._led = True
        for ranks in self._others:
            if lost := ranks.send(message):
                self._lose(ranks.numbers.start, lost)
                raise CollectiveError(lost.text)

    def committed(self, step: int) -> None:
        """See `Ranks`."""
        self.committed_step = step

    def channels(self) -> dict[int, LinkChannel]:
        """Channels for the links of the other ranks, by rank, in place of those before."""
        self._links = {
            number: LinkChannel(partial(ranks.tell, number), lambda: self.committed_step)
            for ranks in self._others
            for number in ranks.numbers
        }
        return self._links

    @property
    def failure(self) -> BaseException | None:
        """Why the group can't go on; None while it can."""
        return self._failure

    def close(self) -> None:
        """Ends the other ranks: after the step in flight, or else with SIGKILL."""
        with self._lock:
            self._closing = True
        self._arrivals.release()
        if self._listener is not None:
            self._listener.close()
        for ranks in self._others:
            ranks.leave()
        deadline = time.monotonic() + (STOP_SECONDS if self._led and self._failure is None else 0.0)
        for ranks in self._others:
            ranks.close(deadline)
        self._closed.set()

    def _hear(self, rank: int, message: Any) -> None:
        if "arrived" in message:
            self._arrivals.release()
        elif "do" in message and rank in self._links:
            self._links[rank].take(message)

    def _lose(self, rank: int, lost: Lost) -> None:
        """Ends the worker, which can't go on without this rank. Any thread."""
        self._fail(ValueError(lost.text) if lost.mistake else CollectiveError(lost.text))

    def _fail(self, error: BaseException) -> None:
        """Notes why the worker can't go on. Any thread; the first call counts."""
        with self._lock:
            if self._over:
                return
            self._failure = error
        logger.error("the ranks are lost", extra={"reason": str(error)})
        self.place.abort()
        for ranks in self._others:
            ranks.kill()
        self._arrivals.release()
        for channel in self._links.values():
            channel.lose(str(error))
        self._failed(error)
