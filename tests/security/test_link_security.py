"""Links: strangers at their ports, what is on the wire, and what a change on the wire does."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tap import Strangers, Tap, WatchedTransport

from kvrelay.rpc.certificates import CertificateFiles
from kvrelay.rpc.security import Part
from kvrelay.transfer.config import Encrypt, TransferConfig
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.link_key import LinkKey
from kvrelay.transfer.transports.registry import available_transports
from support.handoff import HOST, Pair, blocks_of, pair, prompt, raw
from support.link_process import beside
from support.secrets import secrets_in

WAIT = 30.0
COUNT = 300
"""Tokens of a prompt."""
MARKER = b"the KV of a prompt that nobody else may read, sixty-four bytes.."
KEY = LinkKey(b"s" * 32, "a b 1")


def listening(key: LinkKey, seconds: float = WAIT) -> tuple[tuple[str, int], Callable[[], None], list[socket.socket]]:
    """A listener that admits one caller: its address, what waits for its end, and the admitted connection."""
    admitted: list[socket.socket] = []
    listener = socket.create_server((HOST, 0), backlog=128)

    def admit() -> None:
        with listener:
            admitted.append(key.admit(listener, time.monotonic() + seconds, lambda: None))

    return listener.getsockname(), beside(admit), admitted


@pytest.mark.parametrize(
    "other", [LinkKey(b"t" * 32, "a b 1"), LinkKey(b"s" * 32, "a b 2"), LinkKey(b"s" * 32, "c b 1")]
)
def test_another_secret_epoch_or_incarnation_is_refused(other: LinkKey) -> None:
    address, done, _ = listening(KEY, 0.5)
    with socket.create_connection(address) as caller, pytest.raises((LinkError, OSError)):
        other.introduce(caller, time.monotonic() + WAIT)
    with pytest.raises(LinkError, match="did not come"):
        done()


def test_a_recorded_handshake_is_refused_and_the_one_who_knows_the_key_is_admitted() -> None:
    tap = Tap()
    address, done, admitted = listening(KEY)
    host, port = tap.change(f"{address[0]}:{address[1]}".encode()).decode().split(":")
    with socket.create_connection((host, int(port))) as caller:
        KEY.introduce(caller, time.monotonic() + WAIT)
        done()
        recorded = bytes(tap.forth)
    admitted[0].close()
    tap.close()
    assert len(recorded) == 48
    address, done, admitted = listening(KEY)
    with socket.create_connection(address) as thief:
        thief.sendall(recorded)
        thief.settimeout(WAIT)
        assert len(thief.recv(64)) == 16
        assert thief.recv(64) == b"", "closed, and no proof was given"
    with socket.create_connection(address) as caller:
        LinkKey(b"s" * 32, "a b 1").introduce(caller, time.monotonic() + WAIT)
        done()
        caller.sendall(b"frame")
        assert admitted[0].recv(16) == b"frame"
    admitted[0].close()


def test_a_listener_without_the_key_learns_nothing_to_use() -> None:
    with socket.create_server((HOST, 0)) as listener:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"c" * 16)
                assert len(connection.recv(64)) == 48
                connection.sendall(b"p" * 32)

        done = beside(impostor)
        with socket.create_connection(listener.getsockname()) as caller:
            with pytest.raises(LinkError, match="does not know the link's key"):
                KEY.introduce(caller, time.monotonic() + WAIT)
            done()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_strangers_at_a_links_port_are_refused_and_cost_no_hand_off(kind: str) -> None:
    strangers = Strangers(kind, 90)
    ends = [available_transports(HOST, kind) for _ in range(2)]
    watched = [{kind: WatchedTransport(end[kind], strangers.change)} for end in ends]
    async with pair(transports=(watched[0], watched[1])) as world:
        raw(world.source).random_(0, 256)
        await hand_over(world)
        assert world.sender.epoch("d-incarnation") == 1, "the first link came up"
        assert len(strangers.callers) == 90
        assert await asyncio.to_thread(strangers.all_refused, WAIT)


def test_a_link_that_is_given_up_stops_listening_at_once() -> None:
    stop = threading.Event()

    def look() -> None:
        if stop.is_set():
            raise LinkError("given up")

    with socket.create_server((HOST, 0)) as listener:

        def admit() -> None:
            with pytest.raises(LinkError, match="given up"):
                KEY.admit(listener, time.monotonic() + 60, look)

        done = beside(admit)
        stop.set()
        done()


async def hand_over(world: Pair, chunk_blocks: int = 4) -> None:
    """One hand-off, which must arrive whole."""
    world.announce(("r", 1), prompt(COUNT))
    world.compute(("r", 1), blocks_of(COUNT), chunk_blocks)
    await world.settled(("r", 1))
    world.check_equal(("r", 1), blocks_of(COUNT), COUNT)


async def marked(
    encrypt: Encrypt, kind: str, certificates: Sequence[CertificateFiles | None], tap: Tap | None = None
) -> None:
    """One hand-off of KV that is full of MARKER."""
    ends = [available_transports(HOST, kind, encrypt=encrypt, certificates=mine) for mine in certificates]
    if tap is not None:
        ends[1] = {kind: WatchedTransport(ends[1][kind], tap.change)}
    async with pair(TransferConfig(encrypt=encrypt), transports=(ends[0], ends[1])) as world:
        source = raw(world.source).reshape(-1)
        source.copy_(torch.frombuffer(bytearray(MARKER * (len(source) // len(MARKER))), dtype=torch.uint8))
        await hand_over(world, chunk_blocks=7)


def certificates_in(folder: Path, part: Part = "worker") -> CertificateFiles | None:
    """Certificates of one part, by the authority of this folder."""
    folder.mkdir(exist_ok=True)
    return secrets_in(folder, "mutual").credentials(part).certificates


@pytest.mark.parametrize(("encrypt", "readable"), [("none", True), ("integrity", True), ("full", False)])
async def test_only_full_encryption_hides_kv_on_the_wire(encrypt: Encrypt, readable: bool, tmp_path: Path) -> None:
    certificates = certificates_in(tmp_path) if encrypt == "full" else None
    tap = Tap()
    try:
        await marked(encrypt, "tcp", [certificates, certificates], tap)
    finally:
        tap.close()
    assert len(tap.forth) > COUNT * 384, "all of the KV went by"
    assert (MARKER in tap.forth) == readable


@pytest.mark.parametrize("kind", ["shm", "gloo"])
async def test_other_transports_carry_macs_too(kind: str) -> None:
    await marked("integrity", kind, [None, None])


@pytest.mark.parametrize(("authority", "part"), [("other", "worker"), ("same", "router")])
async def test_a_worker_of_another_authority_and_a_router_get_no_encrypted_link(
    tmp_path: Path, authority: str, part: Part
) -> None:
    ends = certificates_in(tmp_path / "same"), certificates_in(tmp_path / authority, part)
    with pytest.raises(AssertionError, match=r"(?i)certificate|has closed|alert"):
        await marked("full", "tcp", ends)


@pytest.mark.parametrize(("mac_key", "caught"), [(None, False), (b"k" * 32, True)], ids=["none", "integrity"])
def test_a_change_with_a_recomputed_checksum_is_caught_by_a_mac(mac_key: bytes | None, caught: bool) -> None:
    """Somebody on the wire knows the announcement, changes the bytes, and puts a fitting checksum behind them."""
    key, frame = ("r", 1), Frame(epoch=1, index=0, first=0, tokens=4, nbytes=64)
    sent = torch.arange(64, dtype=torch.uint8)
    there = FrameCheck(ChecksumKind.XXH3, mac_key, key, frame)
    assert there.same(there.of(sent), there.of(sent.clone()))
    changed = sent.clone()
    changed[5] ^= 1
    forged = FrameCheck(ChecksumKind.XXH3, None, key, frame).of(changed)
    assert there.same(there.of(changed), forged) == (not caught)
    for guessed in (b"", bytes(32), b"s" * 32):
        forged = FrameCheck(ChecksumKind.XXH3, guessed.ljust(32), key, frame).of(changed)
        assert not there.same(there.of(changed), forged)


@pytest.mark.parametrize(
    ("name", "encrypt", "said"),
    [(name, "full", "'full', but it can't encrypt; allowed: auto, shm, tcp") for name in ("gloo", "nixl", "nccl")]
    + [(name, "integrity", "'integrity', but it") for name in ("nccl", "nixl")],
)
def test_transports_that_can_not_protect_enough_say_so(name: str, encrypt: Encrypt, said: str, tmp_path: Path) -> None:
    certificates = certificates_in(tmp_path) if encrypt == "full" else None
    with pytest.raises(ValueError, match=rf"'{name}', .*transfer.encrypt is {said}"):
        available_transports(HOST, name, gpu=True, encrypt=encrypt, certificates=certificates)


@pytest.mark.parametrize(("encrypt", "left_out"), [("none", set()), ("integrity", set()), ("full", {"gloo", "nixl"})])
def test_auto_offers_only_transports_that_protect_enough(encrypt: Encrypt, left_out: set[str], tmp_path: Path) -> None:
    everything = set(available_transports(HOST))
    offered = set(available_transports(HOST, encrypt=encrypt, certificates=certificates_in(tmp_path)))
    assert offered == everything - left_out
    with pytest.raises(ValueError, match=r"security\.tls mutual"):
        available_transports(HOST, encrypt="full")


async def test_workers_that_protect_differently_are_not_paired() -> None:
    async with pair(TransferConfig(encrypt="integrity"), receiver_config=TransferConfig()) as world:
        world.announce(("r", 1), prompt(COUNT))
        world.compute(("r", 1), blocks_of(COUNT))
        await world.ends.until(lambda: ("r", 1) in world.ends.export_failed)
        code, text = world.ends.export_failed["r", 1]
        assert code is Code.INCOMPATIBLE
        assert "encrypt" in text
