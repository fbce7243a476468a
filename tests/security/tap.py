"""A tap on a link: a transport that lets a test record the connections, or dial the listening end first."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # its stub doesn't say that it is public

from kvrelay.transfer.transports.base import Link, Rendezvous, Transport


class Watched(Store):
    """A rendezvous in which `change` sees, and may replace, the address that this end gets or publishes."""

    def __init__(self, inner: Rendezvous, change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self.link = inner.link
        self._inner = inner
        self._change = change

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, self._change(data) if key == "address" else data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timeout)


class WatchedTransport:
    """A real transport; `change` sees the addresses on which its links listen, before the other end does."""

    def __init__(self, inner: Transport, change: Callable[[bytes], bytes]) -> None:
        self.name, self.scope = inner.name, inner.scope
        self._inner = inner
        self._change = change

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        watched = Watched(rendezvous, self._change)
        return self._inner.connect(watched, rank, timeout)  # type: ignore[arg-type]  # what a transport uses of it


class Tap:
    """Passes TCP connections on, and keeps a copy of the bytes."""

    def __init__(self) -> None:
        self.forth = bytearray()
        """Bytes from the callers."""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def change(self, address: bytes) -> bytes:
        """The tap's address in place of one of a listener."""
        host, _, port = address.decode().rpartition(":")
        listener = socket.create_server((host, 0))
        self._sockets.append(listener)
        self._begin(lambda: self._serve(listener, (host, int(port))))
        return f"{host}:{listener.getsockname()[1]}".encode()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with suppress(OSError):
            caller, _ = listener.accept()
            called = socket.create_connection(target)
            self._sockets += [caller, called]
            self._begin(lambda: self._pass(called, caller, bytearray()))
            self._pass(caller, called, self.forth)

    def _pass(self, source: socket.socket, target: socket.socket, copy: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                copy += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Strangers:
    """Callers that come first to every link, and know no key."""

    def __init__(self, kind: str, count: int) -> None:
        self._unix = kind == "shm"
        self._count = count
        self.callers: list[socket.socket] = []

    def change(self, address: bytes) -> bytes:
        """Calls a listener before the other end knows its address. Some callers say nothing, some little, some much."""
        for number in range(self._count):
            if self._unix:
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                target: object = address
            else:
                host, _, port = address.decode().rpartition(":")
                caller = socket.socket()
                target = (host, int(port))
            caller.settimeout(5)
            caller.connect(target)  # type: ignore[arg-type]  # of its family
            with suppress(OSError):
                caller.sendall((b"", b"?", bytes(range(200)))[number % 3])
            self.callers.append(caller)
        return address

    def all_refused(self, seconds: float) -> bool:
        """Whether every caller's connection has been closed."""
        deadline = time.monotonic() + seconds
        for caller in self.callers:
            caller.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                while caller.recv(2**16):
                    pass
            except ConnectionError:
                continue
            except TimeoutError:
                return False
            finally:
                caller.close()
        return True
