"""Fuzzing of every port with any bytes: no process ends, nothing stays held, and the next request is served.

The longer variants (`-m slow`) try more of the same.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.internal.v1.supervisor_pb2 import ROLE_PREFILL, AttendRequest, GetStatusRequest, Member
from kvrelay.internal.v1.worker_pb2 import RelayRequest, RouterHello, Sampling, Submit
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Abort, CloseLink, Code, Dial, Finish, Meet, Offer, Push, Renew, encode
from kvrelay.v1.inference_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    GetModelInfoRequest,
    SamplingParams,
    TokenIds,
    TokenizeRequest,
)
from support.faults import Scene
from support.hash_runner import hash_spec
from support.hash_worker import MAX_CONTEXT, WORKER_LAYOUT
from support.secrets import METADATA

# Messages that no sound peer sends: any protobuf by its descriptor, and damaged bytes.

MessageT = TypeVar("MessageT", bound=Message)
DEPTH = 3
"""Levels of messages in messages."""

_NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 250, 251, 4096, 2**31, 2**32 - 1]) | st.integers(0, 300),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.floats(0, 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_TEXTS = st.sampled_from(["", "fuzz", "prefill-0", "decode-0"]) | st.text(max_size=20)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _fields(field.message_type, depth - 1)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.integers(0, 99)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS
    return _NUMBERS[field.cpp_type]


def _fields(descriptor: Any, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """The keyword arguments of a message."""
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if depth == 0 and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = (_values(entry.fields_by_name[name], depth) for name in ("key", "value"))
            optional[field.name] = st.dictionaries(key, value, max_size=6)
            continue
        value = _values(field, depth)
        optional[field.name] = st.lists(value, max_size=6) if field.is_repeated else value
    groups = [{field.name for field in oneof.fields} for oneof in descriptor.oneofs]

    def one_of_each(values: dict[str, Any]) -> dict[str, Any]:
        for group in groups:
            for name in sorted(group & values.keys())[1:]:
                del values[name]
        return values

    return st.fixed_dictionaries({}, optional=optional).map(one_of_each)


def protobufs(kind: type[MessageT]) -> st.SearchStrategy[MessageT]:
    """Messages of a type: every field may be set, to any value that it can have."""
    return _fields(kind.DESCRIPTOR, DEPTH).map(lambda values: kind(**values))


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were cut, flipped, repeated or extended, or that are only noise."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "repeat", "insert", "noise"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + 16]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "noise":
                data[:] = draw(st.binary(max_size=64))
    return bytes(data)


# What is fuzzed.

ANSWER_SECONDS = 2.0
FEW = settings(
    max_examples=25,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=2000)
AMOUNTS = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
REFUSALS = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
}

GENERATE = GenerateRequest(
    request_id="fuzz", token_ids=TokenIds(ids=[1, 2, 3]), sampling=SamplingParams(max_tokens=4, temperature=0.5, seed=7)
)
PUBLIC: dict[str, Message] = {
    "Generate": GENERATE,
    "Tokenize": TokenizeRequest(text="a text"),
    "Detokenize": DetokenizeRequest(token_ids=[1, 2, 3]),
    "GetModelInfo": GetModelInfoRequest(),
}
SUBMIT = Submit(
    request_id="fuzz",
    attempt=1,
    phase=3,
    token_ids=[1, 2, 3],
    prompt_tokens=3,
    sampling=Sampling(max_tokens=4, temperature=1.0, top_p=1.0, seed=7),
)


@pytest.fixture(autouse=True)
def whole(it: Scene) -> Iterator[None]:
    """Checks after each test that every process lives, a request works, and no block is held."""
    yield
    dead = [name for name, process in it.cluster.processes.items() if process.popen.poll() is not None]
    assert not dead, [it.cluster.processes[name].log.read_text()[-3000:] for name in dead]
    for number in range(3):
        it.ask(f"afterwards {number}")
    it.settle(10)


def call(address: str, path: str, requests: Sequence[bytes]) -> str:
    """Sends messages to a method, with the join token, and reads what comes, for a while; the status in the end."""
    with grpc.insecure_channel(address) as channel:
        answers = channel.stream_stream(path)(iter(requests), timeout=ANSWER_SECONDS, metadata=METADATA)
        try:
            for _ in zip(answers, range(20), strict=False):
                pass
        except grpc.RpcError as error:
            status = str(error.code().name)
            assert status not in ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"), "nothing is fuzzed"
            return status
        answers.cancel()
        return "OK"


def fuzzed(amount: settings, strategy: st.SearchStrategy[Any], send: Callable[[Any], None]) -> None:
    """Sends so many examples of a strategy."""
    amount(given(strategy)(send))()


def either(kind: type[Message], sound: Message) -> st.SearchStrategy[bytes]:
    """Bytes of any message of a type, and damaged ones of it and of a sound one."""
    built = protobufs(kind).map(lambda message: message.SerializeToString())
    return built | damaged(built) | damaged(st.just(sound.SerializeToString()))


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("method", PUBLIC)
@pytest.mark.some(2)
def test_the_public_api_answers_any_bytes(it: Scene, method: str, amount: settings) -> None:
    def send(request: bytes) -> None:
        status = call(it.cluster.addresses["router-0"], f"/kvrelay.v1.InferenceService/{method}", [request])
        assert status in REFUSALS | {"OK"}, (status, request)

    fuzzed(amount, either(type(PUBLIC[method]), PUBLIC[method]), send)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.some(1)
def test_a_worker_survives_any_relay(it: Scene, worker: str, amount: settings) -> None:
    member = it.cluster.member(worker).member
    hello = RouterHello(router="fuzz", worker_incarnation=member.incarnation)
    submits = protobufs(Submit).map(lambda submit: RelayRequest(submit=submit).SerializeToString())
    sampled = protobufs(Sampling).map(lambda sampling: RelayRequest(submit=changed(SUBMIT, sampling=sampling)))
    requests = st.lists(
        submits
        | sampled.map(lambda request: request.SerializeToString())
        | either(RelayRequest, RelayRequest(submit=SUBMIT)),
        max_size=6,
    )

    def send(following: list[bytes]) -> None:
        first = RelayRequest(hello=hello).SerializeToString()
        call(member.address, "/kvrelay.internal.v1.WorkerService/Relay", [first, *following])
        assert it.cluster.processes[worker].popen.poll() is None, following

    fuzzed(amount, requests, send)


def changed(message: Submit, **fields: Any) -> Submit:
    """A copy of the message with other fields."""
    copy = Submit()
    copy.CopyFrom(message)
    copy.MergeFrom(Submit(**fields))
    return copy


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_decode_worker_survives_any_control_stream(it: Scene, amount: settings) -> None:
    """The sender has the name and incarnation of a real one, so nothing is refused for that. That one is replaced in
    the end, since the epochs of its links are used up."""
    prefill, decode = it.cluster.member("prefill-0").member, it.cluster.member("decode-0").member
    local = LocalWorker(
        WorkerId(prefill.name, prefill.incarnation), CacheLayout.of(WORKER_LAYOUT), hash_spec(MAX_CONTEXT).fingerprint
    )
    hello = local.hello(WorkerId(decode.name, decode.incarnation), TransferConfig())
    key, numbers = ("fuzz", 1), st.integers(1, 2**31)
    messages = st.one_of(
        st.builds(Offer, st.just(key[0]), st.just(key[1]), numbers, st.binary(min_size=16, max_size=16)),
        st.builds(Dial, st.integers(1, 50), st.sampled_from(["shm", "tcp", "gloo", "smoke"])),
        st.builds(Meet, st.integers(1, 50), st.sampled_from(["address", "token", "x"]), st.binary(max_size=64)),
        st.builds(
            Push, st.just(key[0]), st.just(key[1]), st.integers(1, 9), numbers, numbers, numbers, st.integers(1, 2**20)
        ),
        st.builds(Finish, st.just(key[0]), st.just(key[1]), st.integers(1, 9), numbers, numbers, numbers),
        st.builds(Abort, st.just(key[0]), st.just(key[1]), st.sampled_from(Code), st.text(max_size=9)),
        st.builds(CloseLink, st.integers(1, 50), st.text(max_size=9)),
        st.just(Renew((key,))),
    )
    batches = messages.map(lambda message: encode([message]))
    sound = encode([hello])
    streams = st.tuples(
        st.just(sound) | damaged(st.just(sound)),
        st.lists(batches | damaged(batches) | st.binary(max_size=64), max_size=8),
    )

    def send(stream: tuple[bytes, list[bytes]]) -> None:
        first, following = stream
        call(decode.address, "/kvrelay.internal.v1.HandoffService/Control", [first, *following])
        assert it.cluster.processes["decode-0"].popen.poll() is None, stream

    fuzzed(amount, streams, send)
    it.restart("prefill-0")


@pytest.mark.parametrize("amount", AMOUNTS)
def test_the_supervisor_survives_any_heartbeat(it: Scene, amount: settings) -> None:
    sound = AttendRequest(member=Member(name="fuzz-0", role=ROLE_PREFILL, incarnation="f", address="127.0.0.1:1"))

    def renamed(request: AttendRequest) -> bytes:
        """Gives the heartbeat a name that nobody has: it is believed, and would fence the member of that name."""
        request.member.name = f"fuzz-{len(request.member.name) % 3}"
        return request.SerializeToString()

    beats = protobufs(AttendRequest).map(renamed) | damaged(st.just(sound.SerializeToString()))
    supervisor = it.cluster.supervisor

    def send(requests: list[bytes]) -> None:
        call(supervisor, "/kvrelay.internal.v1.SupervisorService/Attend", requests)
        call(supervisor, "/kvrelay.internal.v1.SupervisorService/GetStatus", requests[:1])
        assert it.cluster.processes["supervisor"].popen.poll() is None, requests

    fuzzed(amount, st.lists(beats, min_size=1, max_size=4), send)
    it.restart("supervisor")  # it has heard of members that nobody else knows


@pytest.mark.parametrize("amount", AMOUNTS)
def test_every_port_survives_any_bytes(it: Scene, amount: settings) -> None:
    """Ports of links are tested too: they listen while a link is dialled."""

    def listening() -> list[Any]:
        found = []
        for process in it.cluster.processes.values():
            with suppress(psutil.NoSuchProcess):
                found += [
                    connection.laddr
                    for connection in psutil.Process(process.pid).net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN
                ]
        return found

    def send(data: bytes) -> None:
        for address in listening():
            with suppress(OSError), socket.create_connection(tuple(address), ANSWER_SECONDS) as connection:
                connection.sendall(data)

    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + GetStatusRequest().SerializeToString()
    running = it.begin("beside it", count=400)
    fuzzed(amount, st.binary(max_size=200) | damaged(st.just(http2)), send)
    running.result()
