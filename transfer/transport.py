"""What carries the bulk bytes: links of two ranks, behind one interface.

A link is disposable: after any error or timeout it is of no more use, and the pair dials another one under the next
epoch. One thread owns it; only `abort` may be called from others.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

SENDER, RECEIVER = 0, 1
"""Ranks of a link's two ends."""


class LinkError(RuntimeError):
    """A link could not be made, or carries nothing any more."""


class Pending(Protocol):
    """A send or receive that was begun."""

    def wait(self, timeout: float) -> None:
        """Returns when the tensor may be reused (sent) or read (received).

        Raises:
            LinkError: it failed, or did not end within `timeout` seconds; the link is of no more use.
        """


class Link(Protocol):
    """One end of a link. Sends arrive in the order in which they were begun, each in one receive of the same size."""

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


class Transport(Protocol):
    """Makes links of one kind."""

    name: str

    def connect(self, store: str, prefix: str, rank: int, timeout: float) -> Link:
        """Makes one end of the link `prefix`; returns when the other end is there too.

        Args:
            store: host:port of the rendezvous store, on the receiver's worker.
            prefix: of the link's keys in the store; never used twice.
            rank: SENDER or RECEIVER.
            timeout: seconds, to be made and for every later operation.

        Raises:
            LinkError: the other end did not come, or can't be reached.
        """


def choose(wanted: str, here: Sequence[str], there: Sequence[str]) -> str:
    """The transport of a pair: the one `wanted`, or for "auto" the best (first) of `here` that is also `there`.

    Raises:
        LinkError: there is none; the text says what either end can do.
    """
    common = [name for name in here if name in there]
    allowed = common if wanted == "auto" else [name for name in common if name == wanted]
    if not allowed:
        can = f"this worker can do {', '.join(here) or 'none'}, the other {', '.join(there) or 'none'}"
        raise LinkError(f"no transport for transfer.transport = {wanted}: {can}")
    return allowed[0]
