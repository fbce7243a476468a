"""The ranks of a worker on one machine but rank 0: child processes, started, watched and ended together."""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from psutil import Process

from kvrelay.worker.ranks.channel import Channel, send_bytes

logger = logging.getLogger(__name__)

SEND_SECONDS = 3.0
"""Longest time for a rank to take a plan: it takes the next one when it has computed the one before."""


class Lost(NamedTuple):
    """Why a worker can't go on without a rank."""

    text: str
    mistake: bool = False
    """Whether the user's configuration is the reason."""


class _Rank(NamedTuple):
    """A rank, as the process that has started it knows it."""

    number: int
    process: "subprocess.Popen[bytes]"
    steps: socket.socket
    """Socket for plans."""
    control: Channel


class LocalRanks:
    """Implements `OtherRanks` for child processes of this one."""

    def __init__(
        self, numbers: range, hear: Callable[[int, Any], None], lose: Callable[[int, Lost], None], first: int = 0
    ) -> None:
        """
        Args:
            numbers: of the ranks.
            hear: gets each message of a rank for rank 0, with the rank's number; on a thread of the rank's channel.
            lose: called when a rank can't go on. Any thread; it may be called several times.
            first: number of the first rank of this machine, which has the first of the GPUs.
        """
        self.numbers = numbers
        self._hear_rank, self._lose = hear, lose
        self._first = first
        self._ranks: list[_Rank] = []

    def start(self, number: int, start: Mapping[str, Any]) -> None:
        """Starts one of the ranks, which lives no longer than the calling thread.

        Args:
            start: what it is told first.

        Raises:
            OSError: no process can be started.
        """
        steps, their_steps = socket.socketpair()
        control, their_control = socket.socketpair()
        with their_steps, their_control:
            descriptors = their_steps.fileno(), their_control.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", "kvrelay.worker.ranks", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(number - self._first),
            )
        steps.settimeout(SEND_SECONDS)
        rank = _Rank(number, process, steps, Channel(control, f"rank {number}", Process(process.pid)))
        self._ranks.append(rank)
        rank.control.start(lambda message: self._hear(rank, message), lambda: self._end(rank, "its process has ended"))
        rank.control.send({"start": {"rank": number, **start}})

    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks."""
        return tuple(rank.process.pid for rank in self._ranks)

    def look(self) -> None:
        """Sends signs of life, and checks for those of the ranks."""
        for rank in self._ranks:
            rank.control.send({"alive": True})
            if verdict := rank.control.silence.verdict():
                self._end(rank, f"it {verdict}")

    def send(self, message: bytes) -> Lost | None:
        """Sends a plan to all of the ranks; returns the loss of a rank that doesn't take it."""
        for rank in self._ranks:
            try:
                send_bytes(rank.steps, message)
            except OSError as error:
                return Lost(f"rank {rank.number} (pid {rank.process.pid}): it takes no plan: {error}")
        return None

    def tell(self, number: int, message: Any) -> None:
        """Sends a message about links to a rank."""
        next(rank for rank in self._ranks if rank.number == number).control.send(message)

    def kill(self) -> None:
        """Ends them at once."""
        for rank in self._ranks:
            rank.process.kill()

    def leave(self) -> None:
        """Tells them to end after the step in flight."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.steps.shutdown(socket.SHUT_RDWR)

    def close(self, deadline: float) -> None:
        """Waits until they have ended; from `deadline` on, a time of the monotonic clock, they are killed."""
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.control.close()
            rank.steps.close()

    def _hear(self, rank: _Rank, message: Any) -> None:
        if "failed" in message:
            kind, text = message["failed"]
            if kind == "ValueError":
                self._lose(rank.number, Lost(text, mistake=True))
            else:
                self._end(rank, text)
        elif "alive" not in message:
            self._hear_rank(rank.number, message)

    def _end(self, rank: _Rank, why: str) -> None:
        self._lose(rank.number, Lost(f"rank {rank.number} (pid {rank.process.pid}): {why}"))


def _environment(place: int) -> dict[str, str]:
    """The environment of a rank: of the GPUs that this process sees, it sees the one at its place among this machine's
    ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(place)}
    devices = visible.split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": devices[place] if place < len(devices) else ""}
