"""Control messages: they are decoded as they were encoded, and nothing else is taken for a message."""

import dataclasses
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.protocol.messages import (
    MAX_BATCH_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGES,
    MAX_STATE_LAYERS,
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
from kvrelay.transfer.protocol.table import messages as wire
from kvrelay.transfer.protocol.table import packing

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
        case packing.Choice(kind):
            return st.sampled_from(list(kind))
        case wire.LayoutRule():
            return LAYOUTS
        case wire.StatesRule():
            return st.none() | STATES
        case packing.Many():
            return st.lists(st.tuples(REQUESTS, ATTEMPTS), max_size=20).map(tuple)
    raise AssertionError(rule)


MESSAGES = st.one_of(
    [
        st.builds(form.kind, **{name: _values(rule) for name, rule in form.rules.items()})
        for form in wire._FORMS.values()
    ]
)
OFFER = Offer("request", 1, 10, b"0123456789abcdef")


def packed(**changes: object) -> bytes:
    """A batch of one Offer, with some of its fields changed."""
    plain = {"type": "Offer", "request": "request", "attempt": 1, "tokens": 10, "digest": b"0123456789abcdef"}
    return bytes(msgpack.packb([plain | changes]))


@given(st.lists(MESSAGES, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    assert decode(encode(messages)) == messages


def test_every_message_is_covered() -> None:
    assert set(wire._FORMS) == {kind.__name__ for kind in wire._Form.KINDS}
    for form in wire._FORMS.values():
        assert list(form.rules) == [field.name for field in dataclasses.fields(form.kind)]


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


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats()
        | st.integers(-(2**63), 2**64 - 1)
        | st.text(max_size=9)
        | st.binary(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | st.just("type"), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
@settings(max_examples=300, deadline=None)
def test_other_msgpack_is_a_wire_error(value: object) -> None:
    with pytest.raises(WireError):
        decode(msgpack.packb(value))
    with pytest.raises(WireError):
        decode(msgpack.packb([{"type": value}]))


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (b"", "not msgpack"),
        (packed(tokens="10"), "Offer.tokens"),
        (packed(tokens=10.0), "Offer.tokens"),
        (packed(tokens=float("nan")), "Offer.tokens"),
        (packed(tokens=True), "Offer.tokens"),
        (packed(tokens=-1), "Offer.tokens"),
        (packed(tokens=2**40), "Offer.tokens"),
        (packed(tokens=None), "Offer.tokens"),
        (packed(request=b"request"), "Offer.request"),
        (packed(request=""), "Offer.request"),
        (packed(request="r" * 129), "Offer.request"),
        (packed(attempt=0), "Offer.attempt"),
        (packed(digest="0123456789abcdef"), "Offer.digest"),
        (packed(digest=b"short"), "Offer.digest"),
        (packed(more=1), "missing or unknown fields: 'more'"),
        (packed(type="Order"), "type is 'Order'"),
        (packed(type=3), "type is 3"),
        (packed(tokens=msgpack.ExtType(4, b"")), "not msgpack|extension"),
        (packed(tokens=msgpack.ExtType(4, b"abcd")), "not msgpack|extension"),
        (packed(tokens=msgpack.Timestamp(1, 2)), "not msgpack|extension|Offer.tokens"),
        (packed() + b"\x01", "not msgpack"),
        (packed()[:-1], "not msgpack"),
        (bytes(msgpack.packb([{"type": "Offer", "request": "r", "attempt": 1, "tokens": 1}])), "digest"),
        (bytes(msgpack.packb([])), "array of 1 to"),
        (bytes(msgpack.packb({"type": "Offer"})), "array of 1 to"),
        (bytes(msgpack.packb([[1]])), "a message is a map"),
        (bytes(msgpack.packb([{1: 2}])), "not msgpack|key is 1"),
        (b"\x91\x82\xa1a\x01\xa1a\x02", "each key once"),
        (b"\x91\x81\xa1\xff\x01", "not msgpack"),
        (b"\x91" * 5000, "not msgpack"),
        (b"\xdd\x40\x00\x00\x00", "not msgpack"),
        (b"\xc6\x40\x00\x00\x00", "not msgpack"),
        (b"\xdf\x40\x00\x00\x00", "not msgpack"),
        (b"\xdb\x40\x00\x00\x00", "not msgpack"),
        (b"\x90" * (MAX_BATCH_BYTES + 1), "allowed: up to"),
        (bytes(msgpack.packb([{"type": "Ack"}] * (MAX_MESSAGES + 1))), "array of 1 to|fields"),
    ],
)
def test_strictness(batch: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(batch)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Offer("", 1, 10, b"0" * 16), "Offer.request"),
        (Push("r", 1, 1, 0, 0, 16, MAX_FRAME_BYTES + 1), "Push.nbytes"),
        (Grant("r", 1, 0, 0), "Grant.epoch"),
        (Renew((("r", 1),) * 1025), "Renew.keys"),
        (Nack("r", 1, Code.CORRUPT, "x" * 513), "Nack.message"),
        (Ack("r", True, 1), "Ack.attempt"),
    ],
)
def test_a_message_that_could_not_be_decoded_is_not_encoded(message: Message, field: str) -> None:
    with pytest.raises(WireError, match=field):
        encode([message])


HELLO = Hello(1, "p", "i", "j", "f", KVLayout(2, 2, 8, 16, "float32"), True, "none", False, 65536)


def test_an_impossible_layout_is_refused() -> None:
    batch = encode([HELLO])
    plain = msgpack.unpackb(batch)
    for field, value in (("layers", 0), ("dtype", "int4"), ("order", "DHN"), ("tp_rank", 1), ("block_size", "16")):
        changed = [plain[0] | {"layout": plain[0]["layout"] | {field: value}}]
        with pytest.raises(WireError, match="layout"):
            decode(msgpack.packb(changed))


def test_impossible_hidden_states_are_refused() -> None:
    states = StatesLayout((1, 4, 7), 64, "bfloat16")
    plain = msgpack.unpackb(encode([replace(HELLO, states=states)]))
    for field, value in (
        ("layers", []),
        ("layers", [1, 1]),
        ("layers", list(range(MAX_STATE_LAYERS + 1))),
        ("layers", [-1]),
        ("hidden_size", 0),
        ("dtype", "int8"),
        ("last", 1),
        ("more", 1),
    ):
        changed = [plain[0] | {"states": plain[0]["states"] | {field: value}}]
        with pytest.raises(WireError, match=r"Hello\.states"):
            decode(msgpack.packb(changed))


def test_an_invalid_batch_costs_less_than_a_millisecond() -> None:
    invalid = [
        b"\x91" * MAX_BATCH_BYTES,
        packed(request=b"x" * (MAX_BATCH_BYTES - 200)),
        b"\xdd\x40\x00\x00\x00" * 9,
    ]
    invalid.append(bytes(msgpack.packb([{"type": "Renew", "keys": [[1]] * 1024}])))
    for batch in invalid:
        best = float("inf")
        for _ in range(5):
            started = time.process_time()
            with pytest.raises(WireError):
                decode(batch)
            best = min(best, time.process_time() - started)
        assert best < 1e-3


def test_messages_are_split_into_batches_of_bounded_size() -> None:
    key = ("r" * 128, 1)
    meets = [Meet(1, "entry", bytes([number]) * 4096) for number in range(wire.MAX_MESSAGES)] * 2
    renewals = [Renew((key,) * wire.MAX_KEYS) for _ in range(9)]
    short = [Ack("r", number, 1) for number in range(1, 3 * wire.MAX_MESSAGES)]
    messages: list[Message] = [*meets, *renewals, *short]
    split = list(batches(messages))
    assert [message for batch in split for message in decode(batch)] == messages
    assert len(split) < 20
    with pytest.raises(WireError, match="one batch"):
        encode(renewals)
