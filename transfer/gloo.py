"""Links over TCP between CPU buffers: torch's ProcessGroupGloo, made directly, without the global process group.

What is known of it, and kept to here: a killed peer shows as an error within 0.1 s, a frozen one when the wait times out;
one wait that timed out breaks the pair; nothing is sent before the other end has posted its receive.
"""

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from kvrelay.transfer.transport import RECEIVER, SENDER, Link, LinkError

STORE_TIMEOUT = timedelta(seconds=5)


class StoreServer:
    """The rendezvous store that a receiving worker hosts: links to it meet here."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`.

        Raises:
            OSError: `host` can't be bound.
        """
        try:
            self._store = TCPStore(host, 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
        except RuntimeError as error:
            raise OSError(f"host {host}: the rendezvous store can't listen there: {error}") from error
        self.address = f"{host}:{self._store.port}"


def store_client(address: str, timeout: float) -> TCPStore:
    """A connection of its own to the store at `address`: a shared one would let one link's wait block another's.

    Raises:
        LinkError: it can't be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), None, False, timedelta(seconds=timeout), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise LinkError(f"rendezvous store {address!r}: {error}") from error


class GlooTransport:
    """Makes gloo links. All of them share one device: one socket loop of gloo's own, bound to `host`."""

    name = "gloo"

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def connect(self, store: str, prefix: str, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        client = store_client(store, timeout)
        options = ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout)
        try:
            group = ProcessGroupGloo(PrefixStore(prefix, client), rank, 2, options)
        except RuntimeError as error:
            raise LinkError(f"gloo link {prefix}: {error}") from error
        if rank == RECEIVER:
            _forget_keys(client, prefix)
        return GlooLink(group, rank)


def _forget_keys(client: TCPStore, prefix: str) -> None:
    """Deletes a finished rendezvous's keys, so that the store doesn't grow with every link."""
    try:
        for key in client.list_keys():
            if key.startswith(f"{prefix}/"):
                client.delete_key(key)
    except RuntimeError as error:
        raise LinkError(f"rendezvous keys of {prefix}: {error}") from error


class GlooLink:
    """One end of a gloo link."""

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
        self._received += 1
        return self._begin("recv", into, self._received)

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
            raise LinkError(str(error)) from error
