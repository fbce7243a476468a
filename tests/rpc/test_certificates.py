"""Certificates: made for each role, refused if they can't be used, read again when they change, announced in time."""

import asyncio
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvrelay.cluster import certificates
from kvrelay.cluster.errors import UsageError
from kvrelay.rpc.certificates import part_files, parts_of
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.security import PARTS, Part
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports.tcp import secure

SECONDS = 30.0


def made(folder: Path, days: int = 365) -> Path:
    certificates.make(folder, days, keep_authority=True)
    return folder


def replaced(folder: Path, by: Path, *names: str) -> None:
    """Replaces files, in one step each, with a time of their own."""
    for number, name in enumerate(names):
        fresh = folder / f"{name}.fresh"
        fresh.write_bytes((by / name).read_bytes())
        os.utime(fresh, ns=(number, 10**18 + number))
        fresh.replace(folder / name)


def test_each_role_gets_a_certificate_that_names_it_and_no_other(tmp_path: Path) -> None:
    folder = made(tmp_path / "new")
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    for part in PARTS:
        pair = part_files(folder, part).current()
        leaf = x509.load_pem_x509_certificate(pair.certificate)
        leaf.verify_directly_issued_by(authority)
        assert parts_of(leaf) == {part}
        assert pair.ca == (folder / "ca.crt").read_bytes()
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, "only its user can read it"


def test_made_again_they_are_of_the_same_authority_if_its_key_was_kept_and_can_be_read(tmp_path: Path) -> None:
    folder = made(tmp_path / "kept")
    before = (folder / "ca.crt").read_bytes(), (folder / "worker.crt").read_bytes()
    made(folder)
    assert (folder / "ca.crt").read_bytes() == before[0]
    assert (folder / "worker.crt").read_bytes() != before[1]
    for name in ("ca.key", "ca.crt"):
        (folder / name).write_text("nonsense")
    with pytest.raises(UsageError, match=r"ca\.crt and ca\.key"):
        made(folder)
    assert (folder / "ca.key").read_text() == "nonsense"
    certificates.make(tmp_path / "not kept", 1, keep_authority=False)
    assert not (tmp_path / "not kept" / "ca.key").exists()


@pytest.mark.parametrize("first", ["old", "new"])
def test_both_authorities_are_known_while_one_takes_the_others_place(tmp_path: Path, first: str) -> None:
    """Python's TLS carries links, gRPC's the calls."""
    folders = [made(tmp_path / name) for name in ("old", "new")]
    both = b"".join((made_in / "ca.crt").read_bytes() for made_in in (folders if first == "old" else folders[::-1]))
    for folder in folders:
        (folder / "ca.crt").write_bytes(both)
    here, there = socket.socketpair()
    pairs = [part_files(folder, "worker").current() for folder in folders]
    with ThreadPoolExecutor(1) as thread:
        listening = thread.submit(secure, there, pairs[1], RECEIVER, time.monotonic() + SECONDS)
        with secure(here, pairs[0], SENDER, time.monotonic() + SECONDS), listening.result():
            pass

    async def call() -> None:
        parties: list[tuple[Part, Path]] = [("worker", folders[0]), ("router", folders[1])]
        serving, calling = (Credentials(part, "t" * 16, part_files(folder, part)) for part, folder in parties)
        server = serving.server()
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
        port = serving.bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with calling.channel(f"127.0.0.1:{port}", "worker") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS, metadata=calling.metadata)
        finally:
            await server.stop(0)

    asyncio.run(call())


def test_new_files_are_read_and_broken_ones_leave_the_last_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, foreign = made(tmp_path / "old"), made(tmp_path / "new"), made(tmp_path / "foreign")
    files = part_files(old, "worker")
    first = files.current()
    replaced(old, new, "worker.key", "worker.crt", "ca.crt")
    second = files.current()
    assert second.certificate == (new / "worker.crt").read_bytes() != first.certificate
    replaced(old, foreign, "worker.key")
    caplog.clear()
    for _ in range(3):
        assert files.current() == second, "the key isn't the certificate's"
    assert len(caplog.records) == 1, "a broken file is named once, not for each connection"
    replaced(old, foreign, "worker.crt")
    assert files.current().certificate == (foreign / "worker.crt").read_bytes()
    (old / "worker.crt").unlink()
    assert files.current().certificate == (foreign / "worker.crt").read_bytes()


def test_what_can_not_be_used_is_named_at_start(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "a"), made(tmp_path / "b")
    replaced(folder, other, "worker.key")
    with pytest.raises(ValueError, match=r"worker\.key: not the key of the certificate"):
        part_files(folder, "worker")
    (folder / "router.crt").write_text("nonsense")
    with pytest.raises(ValueError, match=r"router\.crt: not certificates in PEM"):
        part_files(folder, "router")
    (folder / "operator.crt").write_bytes((folder / "supervisor.crt").read_bytes())
    (folder / "operator.key").write_bytes((folder / "supervisor.key").read_bytes())
    with pytest.raises(ValueError, match=r"names \['supervisor\.kvrelay\.internal'\]; allowed: operator"):
        part_files(folder, "operator")
    with pytest.raises(ValueError, match="expired at"):
        part_files(made(tmp_path / "expired", 0), "worker")


def test_the_end_of_a_certificate_is_announced_well_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for days, warned in ((365, False), (29, True)):
            caplog.clear()
            files = part_files(made(tmp_path / str(days), days), "worker")
            files.current()
            files.check()
            lines = [record for record in caplog.records if record.message == "certificate ends soon"]
            assert len(lines) == warned, "once a day"
