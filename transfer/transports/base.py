"""Links: what carries the bulk bytes between the two workers of a pair, behind one interface.

A link has two ends, SENDER and RECEIVER. It is disposable: after any error or timeout it can't be used any more, and
the pair opens another link under the next epoch. One thread owns an end; other threads may call only `abort`.

Host buffers of a KV pool on a GPU are pinned: CUDA copies pageable memory piece by piece through pinned memory of its
own, and holds up the calling thread meanwhile.
"""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # its stub doesn't say that it is public


class LinkError(RuntimeError):
    """A link could not be opened, or can't be used any more."""


@contextmanager
def link_errors(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns an error of `kinds`, or the timeout of a socket, into a `LinkError` whose text begins with `what`."""
    try:
        yield
    except LinkError:
        raise
    except (TimeoutError, BlockingIOError) as error:
        raise LinkError(f"{what}: timed out") from error
    except kinds as error:
        raise LinkError(f"{what}: {str(error) or type(error).__name__}") from error


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` (monotonic); raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def poll(done: Callable[[], bool], timeout: float, interval: float) -> bool:
    """Calls `done` every `interval` seconds until it returns true; returns false after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


@dataclass(frozen=True, slots=True)
class Pending:
    """A send or receive in progress."""

    wait: Callable[[float], None]
    """Returns when the tensor may be reused (sent) or read (received); takes a timeout in seconds.

    Raises:
        LinkError: it failed, or did not end in time; the link can't be used any more.
    """

    @classmethod
    def in_wait(cls, move: Callable[[float], None]) -> "Pending":
        """A transfer whose bytes move only while they are waited for: `wait` calls `move` with the deadline
        (monotonic).
        """
        return cls(lambda timeout: move(time.monotonic() + timeout))


class ByteStream(Protocol):
    """Stream of links that carry host memory in place: what one end writes, the other reads. Only the link's thread
    calls it.

    After a call has returned or raised, the link no longer touches that memory.
    """

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Sends the bytes of `runs` in order; returns when their memory may be reused.

        Raises:
            LinkError: it failed, or did not end before `deadline` (monotonic); the link can't be used any more.
        """

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        """Fills `runs` in order with what the other end wrote.

        Raises:
            LinkError: as `write`.
        """


class Lender(Protocol):
    """Sender of links that send out of memory which isn't one of their buffers, such as a KV pool. Only the link's
    thread calls it.
    """

    most_runs: int
    """Largest number of runs of lent memory that one send may consist of, beside one part of a buffer behind them."""

    def lend(self, memory: torch.Tensor) -> bool:
        """Whether parts of `memory` (uint8) can be sent from now on, until the link is closed. It must live as long.

        The other end may still read what was sent after an error has ended the link.
        """

    def send_runs(self, parts: Sequence[torch.Tensor]) -> Pending:
        """As `Link.send`: of up to `most_runs` parts of lent memory and one of a buffer, which arrive one behind the
        other in one receive.
        """


class Link(Protocol):
    """One end of a link. Sends arrive in the order in which they were begun, each in one receive of the same size."""

    @property
    def stream(self) -> ByteStream | None:
        """Moves frames directly out of and into a KV pool in host memory; None if the link carries only `buffer`s."""

    @property
    def lender(self) -> Lender | None:
        """Sends KV from where it lies in a pool; None if the link sends out of its `buffer`s only."""

    @property
    def mac_key(self) -> bytes | None:
        """Key of the MAC that frames carry on this link; None where they carry the plain checksum."""

    def send(self, data: torch.Tensor) -> Pending:
        """Begins to send `data` (uint8, contiguous, part of a `buffer`); it must not change until `wait` returns.

        Raises:
            LinkError
        """

    def recv(self, into: torch.Tensor) -> Pending:
        """Begins to fill `into` (uint8, contiguous, part of a `buffer`) with what the other end sends next.

        Raises:
            LinkError
        """

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor [nbytes] that this transport can send from and receive into."""

    def abort(self) -> None:
        """Makes the other end fail as soon as possible. Never blocks; any thread; idempotent."""

    def close(self) -> None:
        """Frees what the link holds. May block, so a thread that can wait calls it."""


class Rendezvous(Store):
    """Meeting place where the two ends of one link exchange addresses: a key-value store of which each end has a copy.

    The control stream carries what this end sets to the other end, and `put` takes what the other end has set. So a
    link needs no store server: no further port, nothing to clean up, and none of the reverse name look-ups that make
    c10d's TCPStore stall for seconds where a name server is slow.
    """

    def __init__(self, tell: Callable[[str, bytes], None], timeout: float, link: str) -> None:
        """
        Args:
            tell: sends an entry to the other end.
            timeout: seconds that a wait takes at most.
            link: names the link; equal at both ends.
        """
        super().__init__()
        self.link = link
        self._tell = tell
        self._timeout = timeout
        self._entries: dict[str, bytes] = {}
        self._closed = False
        self._changed = threading.Condition()

    def put(self, entry: str, value: bytes) -> None:
        """Takes an entry that the other end has set. Any thread."""
        with self._changed:
            self._entries[entry] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Fails all waits, present and future. Any thread."""
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
        """Whether all `keys` are set. Raises RuntimeError once the rendezvous is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("closed")
            return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all `keys` are set. The rendezvous's own timeout counts, not `timeout`."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._closed or self._entries.keys() >= set(keys), self._timeout)
            if self._closed or not found:
                raise RuntimeError("closed" if self._closed else f"the other end did not come within {self._timeout} s")


class Transport(Protocol):
    """Opens links of one kind."""

    name: str
    """Name of the transport, as in `transfer.transport` and in `Dial`."""
    scope: str
    """Scope that two ends must have in common to be linked, such as a machine's id; empty if any two ends can be
    linked. The scope of nccl is a GPU, which the ends may have to have for themselves."""

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """Opens one end of a link; returns when the other end is there too. Blocks.

        Args:
            rendezvous: used for this link only.
            rank: SENDER or RECEIVER.
            timeout: seconds, to open the link and for each later operation.

        Raises:
            LinkError: the other end did not come, or can't be reached.
        """


def host_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """A uint8 tensor [nbytes]."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


class PinnedMap(mmap.mmap):
    """A mapping that CUDA copies from and to directly, from `pin` on until it is unmapped."""

    _address: int | None = None

    def pin(self) -> "PinnedMap":
        """Lets CUDA copy from and to the mapping directly."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _checked(_runtime().cudaHostRegister(address, len(self), 0))
        self._address = address
        return self

    def __del__(self) -> None:
        if self._address is not None:
            _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    return torch.cuda.cudart()


def _checked(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"cudaHostRegister: {status}")


HIGHEST = -1
"""Priority of a stream whose programs start before those of the engine's steps, which have 0."""

_second = threading.local()


def take_link_stream() -> None:
    """Gives the calling thread a stream of its own for all that it launches, in a process that uses a GPU.

    On the default stream, copies of frames would queue behind every program of a step that hasn't started yet.
    """
    if torch.cuda.is_initialized():
        torch.cuda.set_stream(torch.cuda.Stream(priority=HIGHEST))


def beside() -> AbstractContextManager[object]:
    """In its context, the calling thread launches on a second stream, the same each time: what waits there for a step
    doesn't hold up what the thread launches otherwise. Changes nothing in a process that uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return nullcontext()
    if not hasattr(_second, "stream"):
        _second.stream = torch.cuda.Stream(priority=HIGHEST)
    return torch.cuda.stream(_second.stream)
