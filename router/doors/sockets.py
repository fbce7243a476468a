"""The descriptors of this process, and the connections that gRPC has accepted in it. On Linux, by `/proc`.

gRPC accepts its connections itself, and tells nobody of them before a call has come whole. They are found among the
process's descriptors, and ended by `shutdown`, which gRPC takes for their client's end.
"""

import asyncio
import os
import resource
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

from kvrelay.router.doors.connections import Connections, Peer, peer_of

FOLDER = "/proc/self/fd"
TURN = 256
"""Descriptors that are looked at in one turn of the event loop; each takes about two microseconds."""
HIGH, LOW = 7 / 8, 3 / 4
"""Shares of its connections at which gRPC's face closes idle ones, and down to which: gRPC closes new connections
above the limit that it was started with."""


def raise_limit() -> None:
    """Lets this process open as many descriptors as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """Descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Descriptors that this process has open; 0 where that can't be told."""
    try:
        return len(os.listdir(FOLDER))
    except OSError:
        return 0


class AcceptedSockets:
    """The TCP connections to one port of this process, whoever has accepted them."""

    def __init__(self, connections: Connections, descriptors_changed: Callable[[int], object]) -> None:
        """
        Args:
            connections: learns them.
            descriptors_changed: called with the number of this process's open descriptors, at each look.
        """
        self._connections = connections
        self._descriptors_changed = descriptors_changed
        self._known: dict[int, Peer] = {}
        """Peers by the socket's inode, which no other socket of the machine has at the same time."""
        self._other: set[int] = set()
        """Inodes of other sockets."""
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._slot = os.dup(self._null)
        """Takes a duplicate of a descriptor for as long as it is examined: what is done to a duplicate can't meet
        another file that has got the descriptor's number meanwhile. It is there when no descriptor is left."""

    def close(self) -> None:
        os.close(self._slot)
        os.close(self._null)

    async def look(self, port: int) -> None:
        """Finds the connections to `port` that are new, and those that are gone."""
        try:
            descriptors = [int(name) for name in os.listdir(FOLDER)]
        except OSError:
            return
        self._descriptors_changed(len(descriptors))
        found: dict[int, Peer] = {}
        other: set[int] = set()
        for count, descriptor in enumerate(descriptors, 1):
            if count % TURN == 0:
                await asyncio.sleep(0)
            inode = _socket_inode(descriptor)
            if inode is None:
                continue
            if inode in self._other:
                other.add(inode)
            elif inode in self._known:
                found[inode] = self._known[inode]
            elif (peer := self._examine(descriptor, inode, port)) is None:
                other.add(inode)
            else:
                found[inode] = peer
        self._known, self._other = found, other
        self._forget_all_but(set(found.values()))
        if len(self._connections) > HIGH * self._connections.most:
            while len(self._connections) > LOW * self._connections.most and self._connections.make_room():
                pass

    def _examine(self, descriptor: int, inode: int, port: int) -> Peer | None:
        """The other end of a new socket, if it is a connection to `port`."""
        with self._duplicate(descriptor, inode) as own:
            if own is None:
                return None
            try:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != port:
                    return None
                peer = peer_of(*own.getpeername()[:2])
            except OSError:
                return None
        known = self._connections.of(peer)
        if known is None:
            known = self._connections.add(peer, None)
            if known is None:
                self._shut(descriptor, inode)
                return None
        known.close = lambda: self._shut(descriptor, inode)
        return peer

    def _forget_all_but(self, peers: set[Peer]) -> None:
        for peer in self._connections.peers():
            if peer not in peers and (known := self._connections.of(peer)) is not None and not known.calls:
                self._connections.remove(peer, known)

    def _shut(self, descriptor: int, inode: int) -> None:
        with self._duplicate(descriptor, inode) as own:
            if own is not None:
                with suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)

    def _duplicate(self, descriptor: int, inode: int) -> "_Duplicate":
        return _Duplicate(descriptor, inode, self._slot, self._null)


class _Duplicate:
    """A socket in the slot, for the duration of a `with`; None if the descriptor is no longer that socket's."""

    def __init__(self, descriptor: int, inode: int, slot: int, null: int) -> None:
        self._descriptor, self._inode, self._slot, self._null = descriptor, inode, slot, null
        self._socket: socket.socket | None = None

    def __enter__(self) -> socket.socket | None:
        try:
            os.dup2(self._descriptor, self._slot, inheritable=False)
            if _socket_inode(self._slot) == self._inode:
                self._socket = socket.socket(fileno=self._slot)
        except OSError:
            return None
        return self._socket

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.detach()
        os.dup2(self._null, self._slot, inheritable=False)


def _socket_inode(descriptor: int) -> int | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
