"""One end of a gloo link in a process of its own, so that it can be killed or frozen."""

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from kvrelay.transfer.gloo import GlooTransport
from kvrelay.transfer.transport import RECEIVER, SENDER, Link, Rendezvous

TIMEOUT = 20.0
Behaviour = Literal["send", "idle"]


def _listen(connection: Connection, meeting: Rendezvous) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            meeting.put(*connection.recv())


def dial(connection: Connection, rank: int, timeout: float) -> Link:
    """One end of a link whose rendezvous runs over `connection`."""
    meeting = Rendezvous(lambda entry, value: connection.send((entry, value)), timeout)
    threading.Thread(target=_listen, args=(connection, meeting), daemon=True).start()
    return GlooTransport("127.0.0.1").connect(meeting, rank, timeout)


def _other_end(connection: Connection, behaviour: Behaviour, sizes: list[int]) -> None:
    link = dial(connection, SENDER, TIMEOUT)
    if behaviour == "send":
        for size in sizes:
            link.send(pattern(size)).wait(TIMEOUT)
    threading.Event().wait(TIMEOUT)


def pattern(size: int) -> torch.Tensor:
    """Bytes that differ from place to place and from size to size."""
    return (torch.arange(size, dtype=torch.int64) * 31 + size).to(torch.uint8)


@dataclass
class LinkedProcess:
    """This process's receiving end, and the process that has the other one."""

    link: Link
    process: "multiprocessing.process.BaseProcess"


@contextlib.contextmanager
def linked_process(behaviour: Behaviour, sizes: list[int]) -> Iterator[LinkedProcess]:
    """Starts a process that sends frames of `sizes`, or does nothing; always ends it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_other_end, args=(there, behaviour, sizes), daemon=True)
    process.start()
    try:
        yield LinkedProcess(dial(here, RECEIVER, TIMEOUT), process)
    finally:
        process.kill()
        process.join(TIMEOUT)
        here.close()
