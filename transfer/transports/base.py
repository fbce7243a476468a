"""What carries the bulk bytes: links of two ranks, behind one interface.

A link is disposable: after any error or timeout it is of no more use, and the pair dials another one under the next
epoch. One thread owns it; only `abort` may be called from others.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # its stub doesn't say that it is public


class LinkError(RuntimeError):
    """A link could not be made, or carries nothing any more."""


class Pending(Protocol):
    """A send or receive that was begun."""

    def wait(self, timeout: float) -> None:
        """Returns when the tensor may be reused (sent) or read (received).

        Raises:
            LinkError: it failed, or did not end within `timeout` seconds; the link is of no more use.
        """


class ByteStream(Protocol):
    """What a link that carries memory as it lies adds: bytes in, the same bytes out. The link's thread calls it.

    After either has returned or raised, the link touches that memory no more.
    """

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Sends the bytes of `runs`, one after the other; returns when their memory may be reused.

        Raises:
            LinkError: it failed, or did not end before `deadline` (monotonic); the link is of no more use.
        """

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Fills `runs`, one after the other, with what the other end wrote.

        Raises:
            LinkError: as `write`.
        """


class Link(Protocol):
    """One end of a link. Sends arrive in the order in which they were begun, each in one receive of the same size."""

    @property
    def stream(self) -> ByteStream | None:
        """For frames straight out of and into a pool in host memory; None where the link carries its buffers only."""

    def send(self, data: torch.Tensor) -> Pending:
        """Begins to send `data` (uint8, contiguous, from `buffer`); it must stay as it is until `wait` returns.

        Raises:
            LinkError
        """

    def recv(self, into: torch.Tensor) -> Pending:
        """Begins to fill `into` (uint8, contiguous, from `buffer`) with what the other end sends next.

        Raises:
            LinkError
        """

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor [nbytes] where this transport can send from and receive into."""

    def abort(self) -> None:
        """Makes the other end fail as soon as can be. Never blocks; any thread; idempotent."""

    def close(self) -> None:
        """Frees what the link has. May block, so a thread that can wait calls it."""


class Rendezvous(Store):
    """Where the two ends of one link meet: a store of which each end has a copy.

    What this end sets is told to the other end over the control stream, and what that one set is `put` here. So a link
    needs no store server: no further port, nothing left behind, and none of the reverse name look-ups by which c10d's
    TCPStore stalls for seconds where a name server is slow.
    """

    def __init__(self, tell: Callable[[str, bytes], None], timeout: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout = timeout
        self._entries: dict[str, bytes] = {}
        self._closed = False
        self._changed = threading.Condition()

    def put(self, entry: str, value: bytes) -> None:
        """Takes an entry that the other end set. Any thread."""
        with self._changed:
            self._entries[entry] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Fails whoever waits here, now and later. Any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all `keys` are there; the rendezvous's own timeout counts, whatever the group's is."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._closed or all(key in self._entries for key in keys), self._timeout
            )
            if self._closed or not there:
                raise RuntimeError("closed" if self._closed else f"the other end did not come within {self._timeout} s")


class Transport(Protocol):
    """Makes links of one kind."""

    @property
    def name(self) -> str:
        """As in `transfer.transport` and in `Dial`."""

    @property
    def scope(self) -> str:
        """What two ends must have in common to be linked, such as a machine's id; empty where any two can be."""

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """Makes one end of a link; returns when the other end is there too. Blocks.

        Args:
            meeting: of this link only.
            rank: SENDER or RECEIVER.
            timeout: seconds, to be made and for every later operation.

        Raises:
            LinkError: the other end did not come, or can't be reached.
        """
