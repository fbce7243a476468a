"""Rank 0's end of a worker of several ranks: starts the others, sends them its plans, and shares their fate."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from psutil import Process
from pydantic import TypeAdapter

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.ranks.meet import MEET_SECONDS, meet
from kvrelay.transfer.links.rank_links import COMMITTED
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.ranks.channel import Channel, LinkChannel, send_bytes

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.2
"""Time between two signs of life."""
SEND_SECONDS = 3.0
"""Longest time for a rank to take a plan: it takes the next one when it has computed the one before."""
STOP_SECONDS = 1.0
"""Longest time for the other ranks to end by themselves, once they have run something."""


class _Rank(NamedTuple):
    """Another rank, as rank 0 knows it."""

    number: int
    process: "subprocess.Popen[bytes]"
    steps: socket.socket
    """Socket for plans."""
    control: Channel


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
        threads = max(1, (options.threads or len(os.sched_getaffinity(0))) // self.degree.ranks)
        self.options = replace(options, threads=threads)
        self.place = Place(self.degree)
        self._ranks: list[_Rank] = []
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
        meeting = os.memfd_create("kvrelay ranks")
        try:
            for number in range(1, self.degree.ranks):
                with self._lock:
                    if self._closing or self._failure is not None:
                        break
                    self._ranks.append(self._start_rank(number, _path_of(meeting)))
        except OSError as error:
            self._fail(error)
        threading.Thread(target=self._meet, args=(meeting,), name="ranks meet", daemon=True).start()
        while not self._closed.wait(BEAT_SECONDS):
            self._look()

    def _meet(self, meeting: int) -> None:
        """Meets the other ranks. If one of them is lost before, this thread waits on, and nobody waits for it."""
        try:
            self.place = meet(Path(_path_of(meeting)), self.degree, 0, self.options.threads)
        except (CollectiveError, OSError) as error:
            self._fail(error)
        if self._failure is not None:
            self.place.abort()
        self._arrivals.release()
        self._closed.wait()
        os.close(meeting)  # not before: another file would get its number, and ranks that are late would write to it

    def _start_rank(self, number: int, meeting: str) -> _Rank:
        steps, their_steps = socket.socketpair()
        control, their_control = socket.socketpair()
        with their_steps, their_control:
            descriptors = their_steps.fileno(), their_control.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", "kvrelay.worker.ranks", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(number),
            )
        steps.settimeout(SEND_SECONDS)
        rank = _Rank(number, process, steps, Channel(control, f"rank {number}", Process(process.pid)))
        rank.control.start(lambda message: self._hear(rank, message), lambda: self._lose(rank, "its process has ended"))
        rank.control.send({"start": {"rank": number, "meeting": meeting, **self._start}})
        return rank

    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, rank 0's first."""
        return os.getpid(), *(rank.process.pid for rank in self._ranks)

    def send(self, message: bytes) -> None:
        """See `Ranks`."""
        self._led = True
        for rank in self._ranks:
            try:
                send_bytes(rank.steps, message)
            except OSError as error:
                self._lose(rank, f"it takes no plan: {error}")
                raise CollectiveError(f"rank {rank.number} takes no plan: {error}") from error

    def committed(self, step: int) -> None:
        """See `Ranks`."""
        self.committed_step = step

    def channels(self) -> dict[int, LinkChannel]:
        """Channels for the links of the other ranks, by rank, in place of those before."""
        self._links = {rank.number: LinkChannel(rank.control, lambda: self.committed_step) for rank in self._ranks}
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
        for rank in self._ranks:
            with suppress(OSError):
                rank.steps.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + (STOP_SECONDS if self._led and self._failure is None else 0.0)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.control.close()
            rank.steps.close()
        self._closed.set()

    def _look(self) -> None:
        """Sends signs of life, and looks for those of the others."""
        for rank in self._ranks if self._failure is None else ():
            rank.control.send({"alive": True})
            if verdict := rank.control.silence.verdict():
                self._lose(rank, f"it {verdict}")

    def _hear(self, rank: _Rank, message: Any) -> None:
        if "failed" in message:
            kind, text = message["failed"]
            self._lose(rank, text, ValueError(text) if kind == "ValueError" else None)
        elif "arrived" in message:
            self._arrivals.release()
        elif "do" in message and rank.number in self._links:
            self._links[rank.number].take(message)

    def _lose(self, rank: _Rank, why: str, error: BaseException | None = None) -> None:
        """The worker can't go on without this rank. Any thread."""
        self._fail(error or CollectiveError(f"rank {rank.number} (pid {rank.process.pid}): {why}"))

    def _fail(self, error: BaseException) -> None:
        """The worker can't go on. Any thread; the first call counts."""
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = error
        logger.error("the ranks are lost", extra={"reason": str(error)})
        self.place.abort()
        for rank in self._ranks:
            rank.process.kill()
        self._arrivals.release()
        for channel in self._links.values():
            channel.lose(str(error))
        self._failed(error)


def _path_of(descriptor: int) -> str:
    """A path at which the processes of this user can open a file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _environment(number: int) -> dict[str, str]:
    """The environment of a rank: of the GPUs that this process sees, it sees its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}
    devices = visible.split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": devices[number] if number < len(devices) else ""}
