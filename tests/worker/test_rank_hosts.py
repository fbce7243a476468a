"""How the agent of another machine and rank 0 make themselves known to each other."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvrelay.worker.ranks import hosts
from kvrelay.worker.ranks.hosts import CONTROL, HELLO, NONCE_BYTES, PROOF_BYTES, STEPS, HostListener

HOST, TOKEN, SECONDS = "127.0.0.1", "the-token-of-this-test", 10.0


@pytest.fixture
def listener() -> Iterator[HostListener]:
    listener = HostListener(HOST, 0, TOKEN, hosts=2)
    yield listener
    listener.close()


def test_an_agent_with_the_token_is_known_by_its_number_and_others_are_told(listener: HostListener) -> None:
    with pytest.raises(ConnectionError, match="the join token there is another one"):
        hosts._dial(listener.address, 1, CONTROL, "another-token-than-this")
    assert listener.wait(1, 0.0) is None
    with (
        hosts._dial(listener.address, 1, STEPS, TOKEN) as steps,
        hosts._dial(listener.address, 1, CONTROL, TOKEN) as control,
    ):
        found = listener.wait(1, SECONDS)
        assert found is not None
        assert [end.getpeername() for end in found] == [control.getsockname(), steps.getsockname()]
        for end in found:
            end.close()


def test_an_agent_waits_no_longer_for_ranks_to_start_than_rank_0_for_its_hosts(
    listener: HostListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MEET_SECONDS", 0.5)
    with pytest.raises(ConnectionError, match=r"rank 0 has started no ranks within 0\.5 s"):
        hosts.join(listener.address, 1, TOKEN)


def test_what_an_agent_says_is_no_proof_of_rank_0() -> None:
    """Whoever listens in place of rank 0 without the token could else send an agent's own proof back to it."""
    with socket.create_server((HOST, 0)) as impostor:

        def reflect() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                said = connection.recv(NONCE_BYTES + HELLO.size + PROOF_BYTES, socket.MSG_WAITALL)
                connection.sendall(said[-PROOF_BYTES:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(ConnectionError, match="the join token there is another one"):
            hosts._dial(f"{HOST}:{impostor.getsockname()[1]}", 1, CONTROL, TOKEN)
        thread.join(SECONDS)


@pytest.mark.parametrize("said", [b"", b"x" * 500], ids=["silent", "garbage"])
def test_a_caller_that_says_something_else_is_turned_away(
    listener: HostListener, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "HELLO_SECONDS", 0.3)
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as caller:
        assert len(caller.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        caller.sendall(said)
        answer = b""
        try:
            while part := caller.recv(PROOF_BYTES):
                answer += part
        except ConnectionResetError:
            pass
        assert answer in (b"", bytes(PROOF_BYTES)), "no proof"
    assert listener.wait(1, 0.0) is None
