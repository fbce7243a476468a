"""Hundreds of clients that begin what they don't finish: the router lives, stays small, and is rid of them in time."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from kvrelay.client import AsyncClient
from kvrelay.router.doors.sockets import raise_limit
from support.hostile import CHECK, GENERATE, client_tls, half_a_body, half_a_call
from support.processes import free_port
from support.router_fakes import FakeWorker, colocated_of, key_file, router_process, run
from support.secrets import secrets_in

MIB = 2**20
CLIENTS = 400
LIMIT_BYTES = 64 * MIB
DEADLINES = {"header_timeout_seconds": 3.0, "request_timeout_seconds": 4.0}
CLOSED_SECONDS = 30.0
"""Seconds until connections are closed: far more than the deadlines together, for a busy machine."""


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "secured"),
    [
        pytest.param(kind, secured, marks=() if (kind, secured) == ("Generate", True) else pytest.mark.more)
        for kind in ("Generate", "health", "http")
        for secured in (False, True)
    ],
)
def test_unfinished_requests_hold_little_memory_and_end(tmp_path: Path, kind: str, secured: bool) -> None:
    """The clients have no key."""
    raise_limit()
    folder = secrets_in(tmp_path, "mutual").folder / "certificates"
    files = {"tls_certificate": folder / "router.crt", "tls_key": folder / "router.key"}
    files["api_keys"] = key_file(tmp_path, a="")
    options: dict[str, object] = {name: str(path) for name, path in files.items()} if secured else {}
    options |= {**DEADLINES, "http_port": free_port()}
    tls = client_tls(str(folder / "ca.crt"), "http/1.1" if kind == "http" else "h2") if secured else None
    methods = {"Generate": GENERATE, "health": CHECK}

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of())
        async with router_process(tmp_path, worker, **options) as (address, pid):

            async def one() -> None:
                try:
                    if kind == "http":
                        await half_a_body(f"127.0.0.1:{options['http_port']}", tls)
                    else:
                        await half_a_call(address, methods[kind], tls)
                except (OSError, asyncio.IncompleteReadError):
                    pass  # it was one too many

            process = psutil.Process(pid)
            before, most = process.memory_info().rss, 0
            started = time.monotonic()
            clients = asyncio.gather(*(one() for _ in range(CLIENTS)))
            while not clients.done():
                most = max(most, process.memory_info().rss - before)
                assert time.monotonic() - started < CLOSED_SECONDS
                await asyncio.wait([clients], timeout=0.05)
            clients.result()
            print(f"+{most / MIB:.0f} MiB, closed after {time.monotonic() - started:.1f} s")
            assert most < LIMIT_BYTES
            if not secured:
                async with AsyncClient(address, timeout=30) as client:
                    assert (await client.complete([5, 6], max_tokens=2)).token_ids == (40, 41)

    run(test, 120)


@pytest.mark.more
def test_many_handshakes_at_once_do_not_end_a_router(tmp_path: Path) -> None:
    raise_limit()
    folder = secrets_in(tmp_path, "mutual").folder / "certificates"
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")}
    tls = client_tls(str(folder / "ca.crt"), "h2")

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of())
        many = {"max_connections_per_address": 10_000}
        async with router_process(tmp_path, worker, **files, **many) as (address, pid):
            host, _, port = address.rpartition(":")
            for _ in range(3):
                made = await asyncio.gather(
                    *(asyncio.open_connection(host, int(port), ssl=tls) for _ in range(CLIENTS)), return_exceptions=True
                )
                for each in made:
                    if not isinstance(each, BaseException):
                        each[1].transport.abort()
                assert psutil.pid_exists(pid)
                assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    run(test, 120)
