"""The secret of one link: its two ends prove to each other that they know it, before anything else is sent.

The sender draws the secret and tells it the receiver over the control stream, whose ends have authenticated each other.
Keys derived from it are bound to the link: both incarnations and the epoch. Then, on the connection itself:

    listener  --  challenge                -->  caller
              <--  its own challenge, proof  --
              --  proof                    -->

Both challenges are new each time, so a recorded exchange is worth nothing. A listener serves many callers at once:
one that sends nothing, or the wrong bytes, holds up nobody.
"""

import hashlib
import hmac
import secrets
import selectors
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from kvrelay.transfer.protocol.ports import SENDER
from kvrelay.transfer.transports.base import LinkError, Rendezvous, seconds_left

SECRET_BYTES = 32
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
MAX_CALLERS = 64
"""Limit of one listener's callers that have not proved anything yet; the one that has waited longest makes room for
another."""
BACKLOG = 128
LOOK_SECONDS = 0.1
"""Seconds between two looks at whether the link is still wanted."""


class LinkKey:
    """The secret of one link."""

    def __init__(self, secret: bytes, link: str) -> None:
        """`link` names the link; equal at both ends."""
        self._secret = secret
        self._link = link.encode()

    @classmethod
    def agree(cls, rendezvous: Rendezvous, rank: int) -> "LinkKey":
        """The key of the rendezvous's link, the same at both ends.

        Raises:
            RuntimeError: the other end did not come.
        """
        if rank == SENDER:
            secret = secrets.token_bytes(SECRET_BYTES)
            rendezvous.set("key", secret)
        else:
            secret = rendezvous.get("key")
            if len(secret) != SECRET_BYTES:
                raise LinkError(f"a link's key has {SECRET_BYTES} bytes; {len(secret)} came")
        return cls(secret, rendezvous.link)

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this link can compute, for one purpose (of up to 16 bytes)."""
        return hashlib.blake2b(self._link, digest_size=32, key=self._secret, person=purpose).digest()

    def proof(self, who: bytes, asked: bytes, own: bytes) -> bytes:
        """The proof that `who` (caller, listen) sends, which was asked with one challenge and asks with its own."""
        return hmac.digest(self.derive(b"handshake " + who), asked + own, "sha256")

    def introduce(self, connection: socket.socket, deadline: float) -> None:
        """The caller's side, on a connected socket.

        Raises:
            LinkError: the listener doesn't know the key.
            OSError: the connection failed, or the deadline (monotonic) has passed.
        """
        asked = _read(connection, CHALLENGE_BYTES, deadline)
        own = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(own + self.proof(b"caller", asked, own))
        answer = _read(connection, PROOF_BYTES, deadline)
        if not hmac.compare_digest(answer, self.proof(b"listen", own, asked)):
            raise LinkError("the listening process does not know the link's key")

    def admit(
        self,
        listener: socket.socket,
        deadline: float,
        look: Callable[[], object],
        known: Callable[[socket.socket], bool] = lambda caller: True,
    ) -> socket.socket:
        """The listener's side: the connection of the first caller that knows the key, in blocking mode.

        Args:
            look: called now and then; raises what ends the wait.
            known: whether to talk to a caller at all.

        Raises:
            LinkError: none has come before the deadline (monotonic).
        """
        listener.setblocking(False)
        callers: OrderedDict[int, _Caller] = OrderedDict()
        """Callers by file descriptor."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while True:
                    look()
                    for ready, _ in selector.select(min(LOOK_SECONDS, seconds_left(deadline))):
                        caller = callers.get(ready.fd)
                        if caller is None:
                            if len(callers) == MAX_CALLERS:
                                _, oldest = callers.popitem(last=False)
                                selector.unregister(oldest.connection)
                                oldest.connection.close()
                            caller = _accept(listener, known)
                            if caller is not None:
                                callers[caller.connection.fileno()] = caller
                                selector.register(caller.connection, selectors.EVENT_READ)
                        elif (proved := caller.hear(self)) is not None:
                            selector.unregister(caller.connection)
                            del callers[ready.fd]
                            if proved:
                                caller.connection.setblocking(True)
                                return caller.connection
                            caller.connection.close()
            except TimeoutError:
                raise LinkError("the other end did not come in time") from None
            finally:
                for caller in callers.values():
                    caller.connection.close()


class _Caller:
    """A connection whose other end has not proved yet that it knows the key."""

    def __init__(self, connection: socket.socket) -> None:
        """
        Raises:
            OSError: the caller has gone.
        """
        self.connection = connection
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._received = b""
        connection.setblocking(False)
        connection.sendall(self._challenge)

    def hear(self, key: LinkKey) -> bool | None:
        """Reads what has come: True if the caller has proved that it knows the key, False if it has failed."""
        whole = CHALLENGE_BYTES + PROOF_BYTES
        try:
            part = self.connection.recv(whole - len(self._received))
            self._received += part
            if not part:
                return False
            if len(self._received) < whole:
                return None
            asked, proof = self._received[:CHALLENGE_BYTES], self._received[CHALLENGE_BYTES:]
            if not hmac.compare_digest(proof, key.proof(b"caller", self._challenge, asked)):
                return False
            self.connection.sendall(key.proof(b"listen", asked, self._challenge))
        except BlockingIOError:
            return None
        except OSError:
            return False
        return True


def _accept(listener: socket.socket, known: Callable[[socket.socket], bool]) -> _Caller | None:
    """The next caller; None if it has gone again, or isn't `known`."""
    with suppress(OSError):
        connection, _ = listener.accept()
        try:
            if known(connection):
                return _Caller(connection)
        except OSError:
            pass
        connection.close()
    return None


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        connection.settimeout(seconds_left(deadline))
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionError("the other end has closed")
        received += part
    return received
