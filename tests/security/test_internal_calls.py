"""Internal calls without the join token, or of a part that has no business with them, are refused."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.internal.v1 import handoff_pb2, supervisor_pb2, worker_pb2
from kvrelay.internal.v1.handoff_pb2 import HandoffBatch
from kvrelay.internal.v1.handoff_pb2_grpc import HandoffServiceStub
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_PREFILL,
    ROLE_ROUTER,
    AttendRequest,
    Member,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import RelayRequest, RouterHello
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.rpc.credentials import TOKEN_KEY, Credentials
from kvrelay.rpc.security import CALLERS, Part, SecurityConfig
from support.faults import ENGINE
from support.processes import START_SECONDS, Process, wait_until
from support.secrets import Secrets, secrets_in

SECONDS = 30.0
WORKER = "decode-0"
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def member(name: str = "prefill-0", role: supervisor_pb2.Role = ROLE_PREFILL, incarnation: str = "real") -> Member:
    return Member(name=name, role=role, incarnation=incarnation, address="10.0.0.1:5", state=MEMBER_STATE_READY)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Supervisor"]:
    """A supervisor with a join token and no TLS."""
    yield from supervisor(tmp_path_factory.mktemp("plain"), "off")


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Supervisor"]:
    """A supervisor with mutual TLS, which has started a worker with its own options of security."""
    folder = tmp_path_factory.mktemp("mutual")
    options = {"role": "decode", "model": "pico", "engine": ENGINE}
    members = {WORKER: {"module": "support.hash_worker", "options": options}}
    for started in supervisor(folder, "mutual", state_path=str(folder / "record"), members=members):
        wait_until(lambda found=started: WORKER in found.members(ready=True), "the worker is a member", START_SECONDS)
        yield started


class Supervisor:
    """A supervisor's process, and the secrets of its cluster."""

    def __init__(self, address: str, secrets: Secrets) -> None:
        self.address = address
        self.secrets = secrets

    def members(self, ready: bool = False) -> dict[str, tuple[str, str]]:
        """Incarnation and address by name; with `ready`, of members that are."""
        members = [entry.member for entry in self.status(self.secrets.credentials("operator")).members]
        found = [member for member in members if not ready or member.state == MEMBER_STATE_READY]
        return {member.name: (member.incarnation, member.address) for member in found}

    def status(self, credentials: Credentials, **call: Any) -> Any:
        return self.ask("GetStatus", credentials, **call)

    def ask(self, method: str, credentials: Credentials, **call: Any) -> Any:
        """The answer to a question of the operator."""
        with credentials.blocking_channel(self.address, "supervisor") as channel:
            given = {"metadata": credentials.metadata, "timeout": SECONDS, **call}
            request = getattr(supervisor_pb2, f"{method}Request")()
            return getattr(SupervisorServiceStub(channel), method)(request, **given)

    def attend(self, credentials: Credentials, sent: Member, **call: Any) -> Any:
        """The answer to one heartbeat."""
        answered = threading.Event()

        def beats() -> Iterator[AttendRequest]:
            yield AttendRequest(member=sent)
            answered.wait(SECONDS)  # a member that ends its stream gets no answer

        with credentials.blocking_channel(self.address, "supervisor") as channel:
            given = {"metadata": credentials.metadata, "timeout": SECONDS, **call}
            try:
                return next(iter(SupervisorServiceStub(channel).Attend(beats(), **given)))
            finally:
                answered.set()


def supervisor(folder: Path, tls: str, **options: Any) -> Iterator[Supervisor]:
    secrets = secrets_in(folder, tls)
    path = folder / "supervisor.json"
    path.write_text(json.dumps({"security": secrets.options, "suspect_seconds": 60, "dead_seconds": 120, **options}))
    process = Process("kvrelay.cluster.supervisor", ["--config", str(path)], folder / "supervisor.log", forked=True)
    try:
        found = Supervisor(process.address(), secrets)
        worker = secrets.credentials("worker")
        assert found.attend(worker, member()).members[0].name == "prefill-0"
        yield found
    finally:
        process.stop()


def refusal(call: Any) -> grpc.RpcError:
    """The error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "metadata",
    [(), ((TOKEN_KEY, "wrong-wrong-wrong-wrong"),), ((TOKEN_KEY, ""),), "twice"],
    ids=["none", "wrong", "empty", "the right one twice"],
)
def test_a_stranger_can_not_take_a_workers_name(plain: Supervisor, metadata: Any) -> None:
    before = plain.members()
    stranger = Credentials("worker", "")
    if metadata == "twice":
        metadata = plain.secrets.credentials("worker").metadata * 2
    taking = member(incarnation="stranger")
    error = refusal(lambda: plain.attend(stranger, taking, metadata=metadata))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "join token" in error.details()
    assert refusal(lambda: plain.status(stranger, metadata=metadata)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert plain.members() == before == {"prefill-0": ("real", "10.0.0.1:5")}


def test_the_token_is_in_no_log(plain: Supervisor) -> None:
    refusal(lambda: plain.status(Credentials("operator", "another-wrong-token")))
    logged = (plain.secrets.folder / "supervisor.log").read_text()
    assert "call refused" in logged
    assert plain.secrets.token not in logged
    assert "another-wrong-token" not in logged


@pytest.mark.parametrize(
    ("part", "sent"),
    [
        ("supervisor", member(incarnation="no member")),
        ("operator", member(incarnation="no member")),
        ("router", member(incarnation="a router's")),
        ("worker", member("router-0", ROLE_ROUTER, "a worker's")),
    ],
)
@pytest.mark.some(2)
def test_a_member_attends_in_its_own_role_only(mutual: Supervisor, part: Part, sent: Member) -> None:
    before = mutual.members()
    error = refusal(lambda: mutual.attend(mutual.secrets.credentials(part), sent))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert part in error.details()
    assert mutual.members() == before


def test_only_the_operator_may_ask_and_a_certificate_needs_the_token_too(mutual: Supervisor) -> None:
    worker, operator = mutual.secrets.credentials("worker"), mutual.secrets.credentials("operator")
    for method in ("GetStatus", "Describe"):
        error = refusal(lambda method=method: mutual.ask(method, worker))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        error = refusal(lambda method=method: mutual.ask(method, operator, metadata=()))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_another_authority_and_plaintext_are_refused(mutual: Supervisor, tmp_path: Path) -> None:
    before = mutual.members()
    others = secrets_in(tmp_path, "mutual", token=mutual.secrets.token)
    for credentials in (others.credentials("worker"), Credentials("worker", mutual.secrets.token)):
        error = refusal(lambda credentials=credentials: mutual.attend(credentials, member(incarnation="foreign")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert mutual.members() == before


def test_a_client_refuses_a_server_of_another_part(mutual: Supervisor) -> None:
    credentials = mutual.secrets.credentials("router")
    with credentials.blocking_channel(mutual.address, "worker") as channel:
        call = WorkerServiceStub(channel).Relay(
            iter([RelayRequest(hello=RouterHello())]), metadata=credentials.metadata, timeout=SECONDS
        )
        error = refusal(lambda: next(iter(call)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


def test_every_internal_method_says_who_may_call_it() -> None:
    files = (handoff_pb2, supervisor_pb2, worker_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == CALLERS.keys()


@pytest.mark.parametrize(
    ("part", "with_token", "allowed"),
    [
        ("router", True, {"Relay"}),
        ("worker", True, {"Control"}),
        ("supervisor", True, set()),
        ("operator", True, set()),
        ("router", False, set()),
        ("worker", False, set()),
    ],
)
def test_a_workers_services_refuse_the_wrong_part(
    mutual: Supervisor, part: Part, with_token: bool, allowed: set[str]
) -> None:
    _, address = mutual.members()[WORKER]
    credentials = mutual.secrets.credentials(part)
    call: dict[str, Any] = {"metadata": credentials.metadata if with_token else (), "timeout": SECONDS}
    with credentials.blocking_channel(address, "worker") as channel:
        calls = {
            "Relay": WorkerServiceStub(channel).Relay(iter([RelayRequest(hello=RouterHello())]), **call),
            "Control": HandoffServiceStub(channel).Control(iter([HandoffBatch()]), **call),
        }
        # What is allowed fails too, by what the messages say.
        codes = {name: refusal(lambda answers=answers: next(iter(answers))).code() for name, answers in calls.items()}
    assert {name for name, code in codes.items() if code not in REFUSED} == allowed
    expected = grpc.StatusCode.PERMISSION_DENIED if with_token else grpc.StatusCode.UNAUTHENTICATED
    assert {code for code in codes.values() if code in REFUSED} == {expected}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"join_token_path": "missing"}, "join_token_path missing: No such file"),
        ({"tls": "mutual"}, "security.certificates is ''"),
        ({"tls": "mutual", "certificates": "nowhere"}, "nowhere/supervisor.crt: No such file"),
        ({"tls": "on"}, "tls is 'on'; allowed: off, mutual"),
    ],
)
def test_a_process_without_its_secrets_says_what_is_missing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Credentials.of("supervisor", SecurityConfig(**options))


@pytest.mark.parametrize("token", ["", "short", "with a space in the middle", "ü" * 20])
def test_a_file_without_a_token_is_named_without_what_it_says(tmp_path: Path, token: str) -> None:
    path = tmp_path / "token"
    path.write_text(token)
    with pytest.raises(ValueError, match="token") as caught:
        SecurityConfig(join_token_path=str(path)).token()
    assert not token or token not in str(caught.value)
