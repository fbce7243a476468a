"""How many calls a router works on at once, and how much memory their requests take.

A request of n bytes counts as CHARGE * n bytes until its prompt is known: gRPC keeps its n bytes to the end of the
call, and each byte may be a token of four bytes. From then on it counts as n bytes and those of its packed prompt.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.router.errors import Exhausted

TOKEN_BYTES = 4
CHARGE = 1 + TOKEN_BYTES
PEER_SHARE = 2
"""One client may hold 1 / PEER_SHARE of all bytes."""


class Ticket:
    """The share of one call."""

    def __init__(self, admission: "Admission", peer: str, size: int) -> None:
        self.holder = peer
        """The client's tenant, or its address where nobody is authenticated."""
        self._admission = admission
        self._size = size
        self._prompts = 0
        self._nbytes = 0
        self._set(CHARGE * size)

    def hold(self, nbytes: int) -> None:
        """A prompt of the request is known, and packed into `nbytes`."""
        self._prompts += nbytes
        self._set(self._size + self._prompts)

    def resize(self, size: int) -> None:
        """The request, which came without its size, has `size` bytes.

        Raises:
            Exhausted: too many bytes.
        """
        self._admission._check_bytes(self.holder, CHARGE * size - self._nbytes)
        self._size = size
        self._set(CHARGE * size)

    @contextmanager
    def more_calls(self, count: int) -> Iterator[None]:
        """Counts the call as `count` more for the duration of a `with`.

        Raises:
            Exhausted: too many calls.
        """
        self._admission._check_calls(count)
        self._admission.calls += count
        try:
            yield
        finally:
            self._admission.calls -= count

    def close(self) -> None:
        self._set(0)

    def _set(self, nbytes: int) -> None:
        self._admission._add(self.holder, nbytes - self._nbytes)
        self._nbytes = nbytes


class Admission:
    """Admits calls up to a number and an amount of memory."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.calls = 0
        """Calls that were admitted and have not ended; one with several completions counts as many."""
        self.nbytes = 0
        """Bytes that they hold."""
        self._by_peer: Counter[str] = Counter()

    @contextmanager
    def admit(self, peer: str, size: int) -> Iterator[Ticket]:
        """Admits one call for the duration of a `with`.

        Args:
            peer: the client's tenant, or its address without the port where nobody is authenticated.
            size: of the request as it came, in bytes.

        Raises:
            Exhausted: too many calls, or too many bytes.
        """
        self._check_calls(1)
        self._check_bytes(peer, CHARGE * size)
        self.calls += 1
        ticket = Ticket(self, peer, size)
        try:
            yield ticket
        finally:
            ticket.close()
            self.calls -= 1

    def _check_calls(self, count: int) -> None:
        if self.calls + count > self._max_requests:
            raise Exhausted(f"{self.calls} requests are in flight; the router's max_requests is {self._max_requests}")

    def _check_bytes(self, peer: str, more: int) -> None:
        if more <= 0:
            return
        if self.nbytes + more > self._max_bytes:
            raise Exhausted(
                f"the requests in flight hold {self.nbytes} bytes; the router's max_queued_bytes would be passed"
            )
        if self._by_peer[peer] + more > self._max_bytes // PEER_SHARE:
            raise Exhausted(
                f"this client's requests hold {self._by_peer[peer]} bytes; its share of the router's max_queued_bytes "
                "would be passed"
            )

    def _add(self, peer: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._by_peer[peer] += nbytes
        if not self._by_peer[peer]:
            del self._by_peer[peer]
