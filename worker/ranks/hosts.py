"""Ranks of a worker on other machines, each of which has an agent: `python -m kvrelay.worker.ranks --join HOST:PORT`.

    rank 0's machine                        another machine
    RankGroup -- HostLink === TCP, twice === agent (`join`) -- LocalRanks -- rank r, rank r + 1, ...

An agent has a connection for messages and signs of life, and one for plans, which it passes on to its ranks. It ends,
with its ranks, when one of them or a connection is lost; rank 0 then ends the worker. Each connection begins with a
nonce of 32 bytes from both ends. Each end proves that it has the join token by an HMAC-SHA256 of both nonces and of its
own part, so a proof of an agent is none of rank 0. What follows isn't encrypted.

    rank 0                                      agent
    nonce                                 --->
                                          <---  nonce, HELLO, proof of "agent"
    proof of "rank 0"                     --->
"""

import hmac
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from pydantic import TypeAdapter

from kvrelay.engine.ranks.meet import MEET_SECONDS
from kvrelay.models import resolve
from kvrelay.rpc.identity import join as join_address
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.ranks.channel import BEAT_SECONDS, Channel, receive_bytes, receive_exactly, send_bytes
from kvrelay.worker.ranks.local import SEND_SECONDS, LocalRanks, Lost

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""Longest time for a caller to show that it has the join token."""
NONCE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct("<HB")
"""Number of a host, and index of the connection's kind in KINDS."""
MOST_CALLERS = 64
"""Callers that are listened to at once; one more is turned away, and an agent dials again."""
REDIAL_SECONDS = 0.5
CONTROL, STEPS = KINDS = "control", "steps"
"""Kinds of connections."""


class OtherRanks(Protocol):
    """Several ranks of a worker other than rank 0, as rank 0 sees them."""

    numbers: range

    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks on this machine."""

    def look(self) -> None:
        """Sends signs of life, and checks for those of the ranks."""

    def send(self, message: bytes) -> Lost | None:
        """Sends a plan to all of the ranks; returns the loss of a rank that doesn't take it."""

    def tell(self, number: int, message: Any) -> None:
        """Sends a message about links to a rank."""

    def kill(self) -> None:
        """Ends them at once."""

    def leave(self) -> None:
        """Tells them to end after the step in flight."""

    def close(self, deadline: float) -> None:
        """Waits until they have ended; from `deadline` on, a time of the monotonic clock, they are killed."""


class HostListener:
    """Rank 0's port for agents. One thread accepts, and one for each caller listens to it until it is known."""

    def __init__(self, host: str, port: int, token: str, hosts: int) -> None:
        """
        Args:
            token: the join token.
            hosts: machines of the worker, with this one.

        Raises:
            OSError: the port is in use.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.address = join_address(host, self._socket.getsockname()[1])
        """host:port that agents dial."""
        self._key, self._hosts = token.encode(), hosts
        self._arrived = threading.Condition()
        self._found: dict[tuple[int, str], socket.socket] = {}
        self._closed = False
        self._places = threading.BoundedSemaphore(MOST_CALLERS)
        threading.Thread(target=self._accept, name="rank hosts", daemon=True).start()

    def wait(self, number: int, seconds: float) -> tuple[socket.socket, socket.socket] | None:
        """The connections of an agent, for control and for steps; None if it hasn't come in time, or after `close`."""
        wanted = (number, CONTROL), (number, STEPS)
        with self._arrived:
            self._arrived.wait_for(lambda: self._closed or all(key in self._found for key in wanted), seconds)
            if self._closed or not all(key in self._found for key in wanted):
                return None
            control, steps = (self._found.pop(key) for key in wanted)
            return control, steps

    def close(self) -> None:
        """Accepts no more."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            for connection in self._found.values():
                connection.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, address = self._socket.accept()
                if not self._places.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._greet, args=(connection, address), name="rank host", daemon=True).start()

    def _greet(self, connection: socket.socket, address: Any) -> None:
        try:
            number, kind = self._known(connection)
        except (OSError, ValueError) as error:
            logger.warning("a caller isn't a host of this worker", extra={"peer": str(address), "reason": str(error)})
            connection.close()
            return
        finally:
            self._places.release()
        connection.settimeout(None)
        with self._arrived:
            before = self._found.pop((number, kind), None)
            if before is not None:
                before.close()
            if self._closed:
                connection.close()
            else:
                self._found[number, kind] = connection
            self._arrived.notify_all()

    def _known(self, connection: socket.socket) -> tuple[int, str]:
        """The number of a caller's host and the kind of its connection, once it has proven the token.

        Raises:
            OSError, ValueError: it hasn't, or isn't a host of this worker.
        """
        deadline, mine = time.monotonic() + HELLO_SECONDS, os.urandom(NONCE_BYTES)
        connection.settimeout(HELLO_SECONDS)
        connection.sendall(mine)
        said = receive_exactly(connection, NONCE_BYTES + HELLO.size, deadline)
        nonces = mine, said[:NONCE_BYTES]
        if not hmac.compare_digest(
            receive_exactly(connection, PROOF_BYTES, deadline), _proof(self._key, b"agent", mine, said)
        ):
            connection.sendall(bytes(PROOF_BYTES))  # so that the caller sees it at once
            raise ConnectionError("it doesn't have the join token")
        connection.sendall(_proof(self._key, b"rank 0", *nonces))
        number, kind = HELLO.unpack(said[NONCE_BYTES:])
        if kind >= len(KINDS) or number not in range(1, self._hosts):
            raise ValueError(f"host {number} opens connection {kind}; allowed: hosts 1 to {self._hosts - 1}, 0 or 1")
        return number, KINDS[kind]


class HostLink:
    """Implements `OtherRanks` for the ranks of another machine."""

    def __init__(
        self,
        number: int,
        ranks: range,
        connections: tuple[socket.socket, socket.socket],
        hear: Callable[[int, Any], None],
        lose: Callable[[int, Lost], None],
    ) -> None:
        """
        Args:
            number: of the machine.
            ranks: on it.
            connections: with its agent, for control and for steps.
            hear, lose: as of `LocalRanks`.
        """
        self.numbers = ranks
        self._number = number
        self._hear_rank, self._lose = hear, lose
        control, self._steps = connections
        self._steps.settimeout(SEND_SECONDS)
        self._control = Channel(control, f"host {number}")
        self._ended = threading.Event()

    def start(self, start: dict[str, Any]) -> None:
        """Has the agent start its ranks.

        Args:
            start: what they are told first.
        """
        self._control.start(self._hear, self._end)
        self._control.send({"ranks": [self.numbers.start, self.numbers.stop], "start": start})

    def pids(self) -> tuple[int, ...]:
        """None of them is on this machine."""
        return ()

    def look(self) -> None:
        """See `OtherRanks`."""
        self._control.send({"alive": True})
        if verdict := self._control.silence.verdict():
            self._lose_all(f"its agent {verdict}")

    def send(self, message: bytes) -> Lost | None:
        """See `OtherRanks`."""
        try:
            send_bytes(self._steps, message)
        except OSError as error:
            return Lost(f"host {self._number}: it takes no plan: {error}")
        return None

    def tell(self, number: int, message: Any) -> None:
        """See `OtherRanks`."""
        self._control.send({"rank": number, "message": message})

    def kill(self) -> None:
        """See `OtherRanks`: the agent ends its ranks when the connection is closed."""
        self._control.close()

    def leave(self) -> None:
        """See `OtherRanks`."""
        with suppress(OSError):
            self._steps.shutdown(socket.SHUT_RDWR)

    def close(self, deadline: float) -> None:
        """See `OtherRanks`."""
        self._ended.wait(max(0.0, deadline - time.monotonic()))
        self._control.close()
        self._steps.close()

    def _hear(self, message: Any) -> None:
        if "lost" in message:
            rank, text, mistake = message["lost"]
            self._lose(rank, Lost(text if mistake else f"host {self._number}, {text}", mistake))
        elif "rank" in message:
            self._hear_rank(message["rank"], message["message"])

    def _end(self) -> None:
        self._ended.set()
        self._lose_all("its agent has ended, or the connection is lost")

    def _lose_all(self, why: str) -> None:
        self._lose(self.numbers.start, Lost(f"host {self._number}: {why}"))


def join(address: str, number: int, token: str) -> int:
    """Runs the agent of one machine of a worker until the worker ends; returns the exit code of its process.

    Args:
        address: of rank 0's port for agents, host:port.
        number: of this machine among those of the worker, from 1.
        token: the join token.

    Raises:
        ConnectionError: rank 0 isn't reached in time, refuses the token, or starts no ranks in time.
    """
    control, steps = (_dial(address, number, kind, token) for kind in (CONTROL, STEPS))
    return _Agent(control, steps).run()


class _Agent:
    """Starts the ranks that rank 0 asks for, passes messages on, and ends with them."""

    def __init__(self, control: socket.socket, steps: socket.socket) -> None:
        self._own_address = control.getsockname()[0]
        self._steps = steps
        self._control = Channel(control, "rank 0")
        self._ended = threading.Event()
        self._first: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reported = False
        self._ranks: LocalRanks | None = None

    def run(self) -> int:
        """Runs until the worker ends."""
        self._control.start(self._hear, self._ended.set)
        message = self._told()
        numbers, start = range(*message["ranks"]), message["start"]
        self._ranks = ranks = LocalRanks(numbers, self._pass_up, self._report, first=numbers.start)
        try:
            config = TypeAdapter(WorkerConfig).validate_json(start["config"])
            own = {"folder": str(resolve(config.model)), "host": self._own_address}
            for rank in numbers:
                ranks.start(rank, start | own)
        except (OSError, ValueError) as error:
            self._report(numbers.start, Lost(str(error), mistake=isinstance(error, ValueError)))
        threading.Thread(target=self._pass_plans, args=(ranks,), name="plans", daemon=True).start()
        while not self._ended.wait(BEAT_SECONDS):
            self._control.send({"alive": True})
            ranks.look()
            if verdict := self._control.silence.verdict():
                logger.warning("rank 0 %s", verdict)
                self._ended.set()
        ranks.kill()
        ranks.close(time.monotonic())
        self._control.close()
        self._steps.close()
        return 0

    def _told(self) -> Any:
        """Rank 0's first message, by which this machine's ranks are started.

        Raises:
            ConnectionError: rank 0 has ended, or none came in time.
        """
        deadline = time.monotonic() + MEET_SECONDS
        while not self._ended.is_set():
            try:
                return self._first.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                self._control.send({"alive": True})
            if time.monotonic() > deadline:
                raise ConnectionError(f"rank 0 has started no ranks within {MEET_SECONDS:g} s")
        raise ConnectionError("rank 0 ended before it had all hosts")

    def _hear(self, message: Any) -> None:
        if "ranks" in message:
            self._first.put(message)
        elif "rank" in message and self._ranks is not None:
            self._ranks.tell(message["rank"], message["message"])

    def _pass_up(self, rank: int, message: Any) -> None:
        self._control.send({"rank": rank, "message": message})

    def _pass_plans(self, ranks: LocalRanks) -> None:
        with suppress(OSError):
            while (plan := receive_bytes(self._steps)) is not None:
                if lost := ranks.send(plan):
                    self._report(ranks.numbers.start, lost)
                    return
        ranks.leave()  # rank 0 has closed the connection: they end after the step in flight
        ranks.close(time.monotonic() + SEND_SECONDS)
        self._ended.set()

    def _report(self, rank: int, lost: Lost) -> None:
        """Tells rank 0 of the first loss, which ends the worker and so this process."""
        if not self._reported:
            self._reported = True
            logger.warning("a rank is lost: %s", lost.text)
            self._control.send({"lost": (rank, lost.text, lost.mistake)})


def _dial(address: str, number: int, kind: str, token: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline, why = time.monotonic() + MEET_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), HELLO_SECONDS)
            try:
                _introduce(connection, number, kind, token.encode())
            except BaseException:
                connection.close()
                raise
        except _WrongTokenError as error:
            raise ConnectionError(f"{address}: {error}") from error
        except OSError as error:
            why = str(error) or type(error).__name__
            time.sleep(REDIAL_SECONDS)
        else:
            connection.settimeout(None)
            return connection
    raise ConnectionError(f"rank 0 at {address} isn't reached within {MEET_SECONDS:g} s: {why}")


class _WrongTokenError(ConnectionError):
    """The other end has answered, and doesn't have the join token."""


def _introduce(connection: socket.socket, number: int, kind: str, key: bytes) -> None:
    """Introduces an agent on a new connection.

    Raises:
        OSError: rank 0 doesn't prove in time that it has the token.
    """
    deadline, mine = time.monotonic() + HELLO_SECONDS, os.urandom(NONCE_BYTES)
    theirs = receive_exactly(connection, NONCE_BYTES, deadline)
    said = mine + HELLO.pack(number, KINDS.index(kind))
    connection.sendall(said + _proof(key, b"agent", theirs, said))
    if not hmac.compare_digest(
        receive_exactly(connection, PROOF_BYTES, deadline), _proof(key, b"rank 0", theirs, mine)
    ):
        raise _WrongTokenError("the join token there is another one")


def _proof(key: bytes, part: bytes, *said: bytes) -> bytes:
    """Proof that one end has the token, bound to what both ends have sent."""
    return hmac.digest(key, b"".join([part, b":", *said]), "sha256")
