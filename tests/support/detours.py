"""Sends a worker's links through the proxies of `support.chaos`, where the variable CHAOS_DESK names their desk.

A receiver publishes its address in the link's rendezvous; its sender finds the proxy's instead. Over tcp the sender
dials in any case; over gloo the end with the greater address does. So decode workers live at 127.0.0.1, proxies at
127.0.0.2 and prefill workers at 127.0.0.3.
"""

import json
import os
import re
import socket
import struct
from dataclasses import replace
from datetime import timedelta
from functools import cache

from torch.distributed import Store  # type: ignore[attr-defined]  # its stub doesn't say that it is public

from kvrelay.transfer.links.endpoint_loop import HandoffSetup
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.base import Link, Rendezvous, Transport

DESK = "CHAOS_DESK"
HOSTS = {"prefill": "127.0.0.3", "decode": "127.0.0.1"}
ASK_SECONDS = 5.0

_SOCKADDR = re.compile(re.escape(struct.pack("=H", socket.AF_INET)) + rb"(..)(\x7f\x00\x00.)", re.DOTALL)
"""A sockaddr_in on loopback within what gloo publishes: family, port, host."""
_TEXT = re.compile(rb"(127\.[0-9.]+):([0-9]+)")
"""Pattern of all that tcp publishes: host, port."""


@cache
def ask(kind: str, worker: str, host: str, port: int) -> tuple[str, int]:
    """Asks the desk where to dial instead of an address (kind "way"), or tells it whose address that is ("name")."""
    desk, _, desk_port = os.environ[DESK].rpartition(":")
    question = {"kind": kind, "worker": worker, "host": host, "port": port}
    with socket.create_connection((desk, int(desk_port)), ASK_SECONDS) as connection:
        connection.sendall(json.dumps(question).encode() + b"\n")
        proxy_host, proxy_port = json.loads(connection.recv(4096))
    return proxy_host, proxy_port


class DetouredStore(Store):
    """A link's rendezvous in which the sender finds a proxy in the receiver's place."""

    def __init__(self, meeting: Rendezvous, rank: int, worker: str) -> None:
        super().__init__()
        self._meeting = meeting
        self.link = meeting.link
        self._rank = rank
        self._worker = worker
        self._own: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        self._own.add(key)
        data = value.encode() if isinstance(value, str) else bytes(value)
        address = _address(data)
        if self._rank == RECEIVER and address is not None:
            ask("name", self._worker, *address)
        self._meeting.set(key, data)

    def get(self, key: str) -> bytes:
        value = self._meeting.get(key)
        address = _address(value)
        if self._rank != SENDER or key in self._own or address is None:
            return value
        host, port = ask("way", self._worker, *address)
        if _TEXT.fullmatch(value):
            return f"{host}:{port}".encode()
        proxy = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
        return _SOCKADDR.sub(lambda _: proxy, value, count=1)

    def check(self, keys: list[str]) -> bool:
        return self._meeting.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._meeting.wait(keys, timeout)


class DetouredTransport:
    """Another transport, through the proxies."""

    def __init__(self, inner: Transport, worker: str) -> None:
        self.name, self.scope = inner.name, inner.scope
        self._inner = inner
        self._worker = worker

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        store = DetouredStore(meeting, rank, self._worker)
        return self._inner.connect(store, rank, timeout)  # type: ignore[arg-type]  # only its store's methods are used


def detoured(setup: HandoffSetup, name: str) -> HandoffSetup:
    """A worker's hand-off setup with its links through the proxies."""
    return replace(setup, transports={k: DetouredTransport(v, name) for k, v in setup.transports.items()})


def _address(value: bytes) -> tuple[str, int] | None:
    """The address in an entry of the rendezvous, if it has one."""
    text = _TEXT.fullmatch(value)
    if text is not None:
        return text[1].decode(), int(text[2])
    match = _SOCKADDR.search(value)
    return None if match is None else (socket.inet_ntoa(match[2]), struct.unpack("!H", match[1])[0])
