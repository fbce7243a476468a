"""Links over TCP between host buffers: torch's ProcessGroupGloo, made directly, without the global process group.

Gloo reports a killed peer within about 0.1 s, and a frozen one when the wait times out. One wait that times out breaks
the pair. Nothing is sent before the other end has posted its receive. Only the timeout ends a blocked wait or connect.
"""

from datetime import timedelta
from functools import partial

import torch
from torch.distributed import ProcessGroupGloo, Work

from kvrelay.transfer.config import Encrypt
from kvrelay.transfer.transports.base import Link, LinkError, Pending, Rendezvous, host_buffer, link_errors
from kvrelay.transfer.transports.link_key import LinkKey

_CONNECT_TRIES = 5
"""Number of times that gloo tries to connect; each try lasts as long as the group's timeout."""


class GlooTransport:
    """Opens gloo links. Each has a gloo device of its own: a listening socket on `host`, and the thread that serves it.

    A shared device would be cheaper, but is not safe: if a connection arrives after its link was given up, gloo uses
    freed memory and the process ends with SIGSEGV (torch 2.13). A device per link stops listening with its link.
    """

    name = "gloo"
    scope = ""

    def __init__(self, host: str, encrypt: Encrypt = "none", pinned: bool = False) -> None:
        """Binds to `host`, an address by which the other end can reach this one. `pinned` if the KV pool is on a GPU.

        Raises:
            OSError: it can't be bound.
        """
        self._host = host
        self._encrypt = encrypt
        self._pinned = pinned
        try:
            ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise OSError(f"host {host}: gloo can't bind to it: {error}") from error

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's own stub
        options._threads = 1
        options._timeout = timedelta(seconds=timeout / _CONNECT_TRIES)
        with link_errors("gloo", RuntimeError):
            mac_key = LinkKey.agree(rendezvous, rank).derive(b"frames") if self._encrypt == "integrity" else None
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            return GlooLink(ProcessGroupGloo(rendezvous, rank, 2, options), 1 - rank, mac_key, self._pinned)


class GlooLink:
    """One end of a gloo link."""

    stream = None
    lender = None

    def __init__(self, group: ProcessGroupGloo, peer: int, mac_key: bytes | None, pinned: bool = False) -> None:
        """`peer` is the rank of the other end."""
        self._pinned = pinned
        self.mac_key = mac_key
        self._group: ProcessGroupGloo | None = group
        self._peer = peer
        self._sent = self._received = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        return host_buffer(nbytes, self._pinned)

    def send(self, data: torch.Tensor) -> Pending:
        self._sent += 1
        return self._begin("send", data, self._sent)

    def recv(self, into: torch.Tensor) -> Pending:
        # Receive as much as the buffer holds: gloo ends the process if a message is longer than its receive, which
        # happens when the two ends are out of step. Gloo accepts a shorter message, and the frame's checksum fails.
        whole = torch.empty(0, dtype=torch.uint8).set_(into.untyped_storage())
        self._received += 1
        return self._begin("recv", whole[into.storage_offset() :], self._received)

    def _begin(self, operation: str, tensor: torch.Tensor, count: int) -> Pending:
        # The count of operations is the tag, so ends that are out of step fail instead of mixing up their frames.
        if self._group is None:
            raise LinkError("gloo: the link is closed")
        with link_errors(f"gloo {operation}", RuntimeError):
            work = getattr(self._group, operation)([tensor], self._peer, count & 0x7FFFFFFF)
        return Pending(partial(_wait, work))

    def abort(self) -> None:
        """Does nothing: gloo can't end a blocked wait. The other end fails when `close` shuts the sockets."""

    def close(self) -> None:
        self._group = None


def _wait(work: Work, timeout: float) -> None:
    with link_errors("gloo", RuntimeError):
        work.wait(timedelta(seconds=timeout))
