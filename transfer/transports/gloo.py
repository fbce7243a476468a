"""Links over TCP between CPU buffers: torch's ProcessGroupGloo, made directly, without the global process group.

What is known of it, and kept to here: a killed peer shows as an error within 0.1 s, a frozen one when the wait times
out; one wait that timed out breaks the pair; nothing is sent before the other end has posted its receive; nothing ends
a blocked wait or connect but its timeout.
"""

from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo, Work

from kvrelay.transfer.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, LinkError, Rendezvous

_CONNECT_TRIES = 5
"""Gloo tries to connect this often, each time for the group's timeout."""


class GlooTransport:
    """Makes gloo links. Each has a device of its own: a listening socket on `host`, and the thread that serves it.

    One device for all would do, and cost less, but for this: where a connection comes to it after its dial was given
    up, gloo touches what it has freed, and the process ends with SIGSEGV (torch 2.13). A device that goes with its dial
    has nobody listening by then.
    """

    name = "gloo"
    scope = ""

    def __init__(self, host: str) -> None:
        """Binds to `host`, by which the other end must be able to reach this one.

        Raises:
            OSError: it can't be bound.
        """
        self._host = host
        try:
            ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise OSError(f"host {host}: gloo can't bind to it: {error}") from error

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's own stub
        options._threads = 1
        options._timeout = timedelta(seconds=timeout / _CONNECT_TRIES)
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            return GlooLink(ProcessGroupGloo(meeting, rank, 2, options), rank)
        except RuntimeError as error:
            raise LinkError(f"gloo: {error}") from error


class GlooLink:
    """One end of a gloo link."""

    stream = None

    def __init__(self, group: ProcessGroupGloo, rank: int) -> None:
        self._group: ProcessGroupGloo | None = group
        self._peer = RECEIVER if rank == SENDER else SENDER
        self._sent = self._received = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, data: torch.Tensor) -> "GlooPending":
        self._sent += 1
        return self._begin("send", data, self._sent)

    def recv(self, into: torch.Tensor) -> "GlooPending":
        # As much as its buffer holds: gloo ends the process where a message is longer than its receive, as it is where
        # the two ends have got out of step. A shorter one is none of its concern, and fails its checksum.
        whole = torch.empty(0, dtype=torch.uint8).set_(into.untyped_storage())
        self._received += 1
        return self._begin("recv", whole[into.storage_offset() :], self._received)

    def _begin(self, what: str, tensor: torch.Tensor, tag: int) -> "GlooPending":
        # The count of operations is the tag: ends that disagree about what comes next fail instead of mixing frames up.
        if self._group is None:
            raise LinkError("gloo link is closed")
        try:
            return GlooPending(getattr(self._group, what)([tensor], self._peer, tag & 0x7FFFFFFF))
        except RuntimeError as error:
            raise LinkError(f"gloo {what}: {error}") from error

    def abort(self) -> None:
        """Nothing of gloo's ends a blocked wait; the other end fails when `close` shuts the sockets."""

    def close(self) -> None:
        self._group = None


class GlooPending:
    """A gloo operation that was begun."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise LinkError(f"gloo: {error}") from error
