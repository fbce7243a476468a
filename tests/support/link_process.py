"""One end of a link in a process of its own, so that it can be killed or frozen."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import torch

from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, Rendezvous, Transport
from kvrelay.transfer.transports.registry import available_transports
from support.forks import spawned

TIMEOUT = 30.0
HOST = "127.0.0.1"
Behaviour = Literal["idle", "abort"]


def transport_named(name: str) -> Transport:
    """The transport of this name, in host memory unless it is one between GPUs.

    Raises:
        ValueError: this machine lacks it.
    """
    return available_transports(HOST, name, gpu=name == "nccl")[name]


def _listen(connection: Connection, meeting: Rendezvous) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            meeting.put(*connection.recv())


def dial(connection: Connection, transport: Transport, rank: int, timeout: float) -> Link:
    """One end of a link whose rendezvous runs over `connection`."""
    meeting = Rendezvous(lambda entry, value: connection.send((entry, value)), timeout, "a link")
    threading.Thread(target=_listen, args=(connection, meeting), daemon=True).start()
    return transport.connect(meeting, rank, timeout)


def _other_end(connection: Connection, name: str, behaviour: Behaviour, sizes: list[int]) -> None:
    link = dial(connection, transport_named(name), SENDER, TIMEOUT)
    for size in sizes:
        link.send(filled(link, size)).wait(TIMEOUT)
    if behaviour == "abort":
        link.abort()
        link.close()
    threading.Event().wait(TIMEOUT)


def pattern(size: int) -> torch.Tensor:
    """Bytes that depend on the position and on the size."""
    return (torch.arange(size, dtype=torch.int64) * 31 + size).to(torch.uint8)


def filled(link: Link, size: int) -> torch.Tensor:
    """A buffer of the link that holds the pattern."""
    buffer = link.buffer(size)
    buffer.copy_(pattern(size))
    return buffer


@contextlib.contextmanager
def linked_process(name: str, behaviour: Behaviour, sizes: list[int]) -> Iterator[tuple[Link, BaseProcess]]:
    """Starts a process that sends frames of `sizes`, and then aborts the link or does nothing; always ends it. The
    receiving end is in this process."""
    with spawned(_other_end, name, behaviour, sizes) as (process, connection):
        link = dial(connection, transport_named(name), RECEIVER, TIMEOUT)
        try:
            yield link, process
        finally:
            link.close()


def meetings(timeout: float) -> tuple[Rendezvous, Rendezvous]:
    """The two copies of one link's rendezvous, for two ends in this process."""
    pair: list[Rendezvous] = []
    pair.append(Rendezvous(lambda entry, value: pair[1].put(entry, value), timeout, "a link"))
    pair.append(Rendezvous(lambda entry, value: pair[0].put(entry, value), timeout, "a link"))
    return pair[SENDER], pair[RECEIVER]


def beside(work: Callable[[], None]) -> Callable[[], None]:
    """Runs `work` on a thread. The returned call waits for its end and raises its exception."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again by `join`
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(TIMEOUT)
        if thread.is_alive():
            raise AssertionError("the other end's thread hangs")
        if failures:
            raise failures[0]

    return join


def joined(
    transports: Sequence[Transport],
    send: Callable[[Link], object],
    receive: Callable[[Link], object],
    timeout: float = TIMEOUT,
) -> None:
    """Both ends of a link in this process, each on a thread of its own and of its own transport; closed in the end."""
    meeting = meetings(timeout)
    # A send is done when its buffer may be reused, perhaps before the other end has the bytes.
    done = threading.Event(), threading.Event()

    def end(rank: int, work: Callable[[Link], object]) -> None:
        link = transports[rank].connect(meeting[rank], rank, timeout)
        try:
            work(link)
        finally:
            done[rank].set()
            done[1 - rank].wait(TIMEOUT)
            link.close()

    other = beside(lambda: end(RECEIVER, receive))
    try:
        end(SENDER, send)
    finally:
        other()
