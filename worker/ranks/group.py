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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.ranks.meet import MEET_SECONDS, meet
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.ranks.channel import Channel, LinkChannel, send_bytes

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
"""Time between two signs of life."""
SILENT_SECONDS = 3.0
"""Time without a sign of life after which a rank is lost."""
SEND_SECONDS = 3.0
"""Longest time for a rank to take a plan: it takes the next one when it has computed the one before."""
STOP_SECONDS = 2.0
"""Longest time for the other ranks to end by themselves."""


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
        """Starts the other ranks, and returns when all have met; they load their parts at once.

        Args:
            build: `module:function` that makes a rank's runner, as `kvrelay.engine.build.build_rank`.
            options: of the worker's engine.
            failed: called once if a rank is lost, on a thread of the group's.

        Raises:
            CollectiveError: a rank was lost.
            OSError: a process can't be started.
        """
        self.degree = degree = options.degree
        self._links: dict[int, LinkChannel] = {}
        self._failed = failed
        self._failure: BaseException | None = None
        self._closing = False
        self._meetings = threading.Semaphore(0)
        """Released by each rank that has met the others, and by a failure."""
        self._lock = threading.Lock()
        threads = max(1, (options.threads or len(os.sched_getaffinity(0))) // degree.ranks)
        self.options = replace(options, threads=threads)
        self.place = Place(degree)
        self._ranks: list[_Rank] = []
        try:
            with TemporaryDirectory(prefix="kvrelay-ranks-") as meeting:
                for number in range(1, degree.ranks):
                    self._ranks.append(self._start(number, build, folder, config, meeting))
                threading.Thread(target=self._watch, name="ranks", daemon=True).start()
                self.place = meet(Path(meeting), degree, 0, threads)
                self._wait_for_others()
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, build: str, folder: Path, config: WorkerConfig, meeting: str) -> _Rank:
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
        rank = _Rank(number, process, steps, Channel(control, f"rank {number}"))
        rank.control.start(lambda message: self._hear(rank, message), lambda: self._lose(rank, "its process has ended"))
        rank.control.send(
            {
                "rank": number,
                "tensor": self.degree.tensor,
                "pipeline": self.degree.pipeline,
                "meeting": meeting,
                "build": build,
                "folder": str(folder),
                "config": TypeAdapter(WorkerConfig).dump_json(replace(config, engine=self.options)),
            }
        )
        return rank

    def _wait_for_others(self) -> None:
        """Returns when all ranks have met."""
        deadline = time.monotonic() + MEET_SECONDS
        for _ in self._ranks:
            if not self._meetings.acquire(timeout=deadline - time.monotonic()):
                raise CollectiveError(f"not all ranks have met within {MEET_SECONDS:g} s")
            if self._failure is not None:
                raise self._failure

    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, rank 0's first."""
        return os.getpid(), *(rank.process.pid for rank in self._ranks)

    def send(self, message: bytes) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            try:
                send_bytes(rank.steps, message)
            except OSError as error:
                self._lose(rank, f"it takes no plan: {error}")
                raise CollectiveError(f"rank {rank.number} takes no plan: {error}") from error

    def channels(self) -> dict[int, LinkChannel]:
        """Channels for the links of the other ranks, by rank, in place of those before."""
        self._links = {rank.number: LinkChannel(rank.control) for rank in self._ranks}
        return self._links

    @property
    def failure(self) -> BaseException | None:
        """Why the group can't go on; None while it can."""
        return self._failure

    def close(self) -> None:
        """Ends the other ranks: after the step in flight, or else with SIGKILL."""
        self._closing = True
        for rank in self._ranks:
            with suppress(OSError):
                rank.steps.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + (0.0 if self._failure else STOP_SECONDS)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.control.close()
            rank.steps.close()

    def _watch(self) -> None:
        """Sends signs of life, and looks for those of the others."""
        while not self._closing and self._failure is None:
            for rank in self._ranks:
                rank.control.send({"alive": True})
                silent = time.monotonic() - rank.control.heard
                if silent > SILENT_SECONDS and rank.process.poll() is None:
                    self._lose(rank, f"silent for {silent:.1f} s")
            time.sleep(BEAT_SECONDS)

    def _hear(self, rank: _Rank, message: Any) -> None:
        if "failed" in message:
            kind, text = message["failed"]
            self._lose(rank, text, ValueError(text) if kind == "ValueError" else None)
        elif "met" in message:
            self._meetings.release()
        elif "alive" not in message and rank.number in self._links:
            self._links[rank.number].take(message)

    def _lose(self, rank: _Rank, why: str, error: BaseException | None = None) -> None:
        """The worker can't go on without this rank. Any thread; the first call counts."""
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = error or CollectiveError(f"rank {rank.number} (pid {rank.process.pid}): {why}")
        logger.error("a rank is lost", extra={"rank": rank.number, "pid": rank.process.pid, "why": why})
        self.place.abort()
        for each in self._ranks:
            each.process.kill()
            self._meetings.release()
        for channel in self._links.values():
            channel.lose(str(self._failure))
        self._failed(self._failure)


def _environment(number: int) -> dict[str, str]:
    """The environment of a rank: of the GPUs that this process sees, it sees its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}
    devices = visible.split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": devices[number] if number < len(devices) else ""}
