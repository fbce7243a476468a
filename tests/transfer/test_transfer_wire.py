"""Control messages: they are decoded as they were encoded, and nothing else is taken for a message."""

from dataclasses import replace
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.states import StatesLayout
from kvrelay.internal.v1.handoff_pb2 import HandoffBatch, HandoffMessage
from kvrelay.transfer.protocol import messages as wire
from kvrelay.transfer.protocol import packing
from kvrelay.transfer.protocol.messages import (
    MAX_BATCH_BYTES,
    MAX_FRAME_BYTES,
    MAX_KEYS,
    MAX_MESSAGES,
    MAX_STATE_LAYERS,
    VERSION,
    Ack,
    Code,
    Grant,
    Hello,
    Meet,
    Message,
    Nack,
    Offer,
    Push,
    Renew,
    batches,
    decode,
    encode,
)
from kvrelay.transfer.protocol.packing import WireError

REQUESTS = st.text(min_size=1, max_size=128)
ATTEMPTS = st.integers(1, 2**32 - 1)
LAYOUTS = st.builds(
    KVLayout,
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    block_size=st.sampled_from((8, 16, 128)),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    order=st.sampled_from(("NHD", "HND")),
)
STATES = st.builds(
    StatesLayout,
    layers=st.lists(st.integers(0, 2**16), min_size=1, max_size=MAX_STATE_LAYERS, unique=True).map(tuple),
    hidden_size=st.integers(1, 2**20),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    last=st.booleans(),
)


def _values(rule: packing.Rule) -> st.SearchStrategy[Any]:
    match rule:
        case packing.Number(low, high):
            return st.integers(low, high)
        case packing.Text(shortest, longest):
            return st.text(min_size=shortest, max_size=longest)
        case packing.Raw(shortest, longest):
            return st.binary(min_size=shortest, max_size=longest)
        case packing.Flag():
            return st.booleans()
        case wire.Choice(values):
            return st.sampled_from(list(values.values()))
        case wire.LAYOUT:
            return LAYOUTS
        case wire.STATES:
            return st.none() | STATES
        case wire.Many():
            return st.lists(st.tuples(REQUESTS, ATTEMPTS), min_size=1, max_size=20).map(tuple)
    raise AssertionError(rule)


MESSAGES = st.one_of(
    [
        st.builds(form.kind, **{name: _values(rule) for name, rule in form.rules.items()})
        for form in wire._FORMS.values()
    ]
)
OFFER: dict[str, Any] = {"request": "request", "attempt": 1, "tokens": 10, "digest": b"0123456789abcdef"}
HELLO = Hello(VERSION, "p", "i", "j", "f", KVLayout(2, 2, 8, 16, "float32"), True, "none", False, 65536)


def packed(*messages: HandoffMessage) -> bytes:
    return HandoffBatch(messages=messages).SerializeToString()


def offer(more: bytes = b"", **changes: object) -> bytes:
    """A batch of one Offer with some of its fields changed, or left out if they are None, and other bytes behind."""
    message = HandoffMessage.Offer(**(OFFER | changes))
    message.MergeFromString(more)
    return packed(HandoffMessage(offer=message))


def hello(part: str, **changes: object) -> bytes:
    """A batch of one Hello in whose part `part` some fields are changed, or left out if they are None."""
    batch = HandoffBatch.FromString(encode([replace(HELLO, states=StatesLayout((1, 4, 7), 64, "bfloat16"))]))
    message = getattr(batch.messages[0].hello, part)
    for field in changes:
        message.ClearField(field)
    message.MergeFrom(type(message)(**changes))
    return batch.SerializeToString()


def record(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message, as protobuf writes it."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


@given(st.lists(MESSAGES, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    assert decode(encode(messages)) == messages


def test_the_proto_and_the_classes_have_the_same_messages_with_the_same_fields() -> None:
    assert set(get_args(Message)) == {form.kind for form in wire._FORMS.values()}
    for name, kind in HandoffMessage.DESCRIPTOR.nested_types_by_name.items():
        rule = {"Layout": wire.LAYOUT, "States": wire.STATES}.get(name) or wire._FORMS[name]
        assert [field.name for field in kind.fields] == list(rule.rules), name
    assert {code.name for code in Code} == {name.removeprefix("CODE_") for name in HandoffMessage.Code.keys()[1:]}


@given(st.binary(max_size=300))
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_wire_errors(batch: bytes) -> None:
    with pytest.raises(WireError):
        decode(batch)


@given(MESSAGES, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_batches_are_messages_or_wire_errors(message: Message, data: st.DataObject) -> None:
    batch = bytearray(encode([message]))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(0, len(batch) - 1))] = data.draw(st.integers(0, 255))
    batch = batch[: data.draw(st.integers(0, len(batch)))] if data.draw(st.booleans()) else batch
    try:
        decoded = decode(bytes(batch))
    except WireError:
        return
    assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (b"", f"0 messages; allowed: 1 to 64 by version {VERSION}"),
        (offer(tokens=None), "Offer.tokens is missing"),
        (offer(request=None), "Offer.request is missing"),
        (offer(tokens=2**31 + 1), "Offer.tokens is 2147483649; allowed: an integer from 0"),
        (offer(request=""), "Offer.request"),
        (offer(request="r" * 129), "Offer.request.*129 long.*allowed: text of 1 to 128"),
        (offer(attempt=0), "Offer.attempt"),
        (offer(digest=b"short"), "Offer.digest"),
        (offer(more=record(9, b"more")), f"Offer has a field 9; version {VERSION}"),
        (offer(tokens=None, more=record(3, b"10")), "Offer has a field 3"),
        (packed(HandoffMessage()), "HandoffMessage is empty; allowed: .*Offer"),
        (offer() + record(3, b"12345"), f"HandoffBatch: 7 of 42 bytes .*unknown to version {VERSION}"),
        (record(2, offer()[2:] + record(15, b"12345")), f"HandoffBatch: 7 of 42 bytes .*unknown to version {VERSION}"),
        (offer(more=record(9, b"more") * 200), f"HandoffBatch: 1202 of .* bytes .*unknown to version {VERSION}"),
        (record(2, record(6, record(1, b"\xff"))), "malformed"),
        (record(2, offer()[2:] * 2), "there twice"),
        (offer() + b"\x01", "malformed"),
        (offer()[:-1], "malformed"),
        (offer()[:2] + offer()[2:].replace(b"\x18\x0a", b"\x18\x8a\x00"), "malformed|shortest"),
        (packed(HandoffMessage(ack={}), HandoffMessage(offer=OFFER)), "Ack.request is missing"),
        (packed(HandoffMessage(nack={"request": "r", "attempt": 1, "code": 77, "message": ""})), "Nack.code is 77"),
        (packed(HandoffMessage(nack={"request": "r", "attempt": 1, "code": 0, "message": ""})), "Nack.code is 0"),
        (packed(HandoffMessage(renew={})), "Renew.keys is missing"),
        (packed(HandoffMessage(renew={"keys": [{}] * (MAX_KEYS + 1)})), "33 keys in Renew.keys; allowed: up to 32"),
        (packed(*[HandoffMessage()] * (MAX_MESSAGES + 1)), "65 messages; allowed: 1 to 64"),
        (b"\x12\x00" * (MAX_BATCH_BYTES // 2 + 1), f"allowed: up to {MAX_BATCH_BYTES}"),
        (hello("layout", layers=None), "Hello.layout.layers is missing"),
        (hello("layout", layers=0), "Hello.layout.layers"),
        (hello("layout", block_size=2**20 + 1), "Hello.layout.block_size"),
        (hello("layout", dtype="int4"), "Hello.layout.dtype is 'int4'; allowed: float32"),
        (hello("layout", order="DHN"), "Hello.layout.order"),
        (hello("layout", tp_rank=1), "Hello.layout: .*tp_rank"),
        (hello("states", layers=[]), "Hello.states.layers is missing"),
        (hello("states", layers=[1, 1]), "Hello.states: .*twice"),
        (hello("states", layers=range(MAX_STATE_LAYERS + 1)), "Hello.states.layers has 17 items"),
        (hello("states", layers=[2**16 + 1]), "Hello.states.layers"),
        (hello("states", hidden_size=0), "Hello.states.hidden_size"),
        (hello("states", dtype="int8"), "Hello.states.dtype"),
        (hello("states", last=None), "Hello.states.last is missing"),
    ],
)
def test_strictness(batch: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(batch)


def test_a_hello_of_another_version_that_lacks_a_field_or_has_one_more_is_refused_for_its_version() -> None:
    sound = HandoffBatch.FromString(encode([replace(HELLO, version=VERSION + 1)])).messages[0].hello
    fewer, more = HandoffMessage.Hello.FromString(sound.SerializeToString()), sound
    fewer.ClearField("gpu")
    more.MergeFromString(record(15, b"more"))
    for message in (fewer, more):
        with pytest.raises(WireError, match=rf"Hello\.version: {VERSION} here, {VERSION + 1} there"):
            decode(packed(HandoffMessage(hello=message)))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb(["taken"]),
        msgpack.packb(["taken", 1, 2]),
        msgpack.packb(["other", 1]),
        msgpack.packb([1, 1]),
        msgpack.packb({"taken": 1}),
        msgpack.packb("taken"),
        msgpack.packb(["taken", 9]),
        msgpack.packb(["taken", 1.0]),
        msgpack.packb(["taken", float("nan")]),
        msgpack.packb(["taken", True]),
        msgpack.packb(["taken", [1]]),
        msgpack.packb(["taken", {}]),
        msgpack.packb(["taken", {"a": 1}]),
        msgpack.packb(["taken", msgpack.ExtType(4, b"")]),
        msgpack.packb(["taken", msgpack.ExtType(4, b"abcd")]),
        msgpack.packb(["taken", msgpack.Timestamp(1, 2)]),
        msgpack.packb(["taken", 1]) + b"\x01",
        msgpack.packb(["taken", 1])[:-1],
        b"\x92\xa5take\xff\x01",
        b"\x91" * 5000,
        b"\xdd\x40\x00\x00\x00",
        b"\x92\xdb\x40\x00\x00\x00",
    ],
)
def test_a_links_message_has_exactly_its_form(message: bytes) -> None:
    forms = {"taken": (packing.Number(1, 8),)}
    assert packing.unpack_named(packing.pack(["taken", 1]), forms) == ("taken", (1,))
    with pytest.raises(WireError):
        packing.unpack_named(message, forms)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Offer("", 1, 10, b"0" * 16), "Offer.request"),
        (Push("r", 1, 1, 0, 0, 16, MAX_FRAME_BYTES + 1), "Push.nbytes"),
        (Grant("r", 1, 0, 0), "Grant.epoch"),
        (Renew((("r", 1),) * (MAX_KEYS + 1)), "Renew.keys"),
        (Renew((("r", 1), ("s", 0))), "Renew.keys.attempt"),
        (Renew(()), "Renew.keys"),
        (Nack("r", 1, Code.CORRUPT, "x" * 513), "Nack.message"),
        (Ack("r", True, 1), "Ack.attempt"),
    ],
)
def test_a_message_that_could_not_be_decoded_is_not_encoded(message: Message, field: str) -> None:
    with pytest.raises(WireError, match=field):
        encode([message])


def test_messages_are_split_into_batches_of_bounded_size() -> None:
    key = ("r" * 128, 1)
    meets = [Meet(1, "entry", bytes([number]) * 4096) for number in range(MAX_MESSAGES)] * 2
    renewals = [Renew((key,) * MAX_KEYS) for _ in range(9)]
    short = [Ack("r", number, 1) for number in range(1, 3 * MAX_MESSAGES)]
    messages: list[Message] = [*meets, *renewals, *short]
    split = list(batches(messages))
    assert [message for batch in split for message in decode(batch)] == messages
    assert max(map(len, split)) <= MAX_BATCH_BYTES
    assert len(split) < 36
    with pytest.raises(WireError, match="one batch"):
        encode(renewals)
