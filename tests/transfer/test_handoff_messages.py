"""Control messages: decoded as they were encoded; all else is refused in little time, before anything is allocated.

`KVRELAY_SEED=n` runs only mutation n.
"""

import os
import random
import statistics
import time
import tracemalloc
from dataclasses import replace
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
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
    Abort,
    Ack,
    CloseLink,
    Code,
    Dial,
    Finish,
    Grant,
    Hello,
    Meet,
    Message,
    Nack,
    Offer,
    Push,
    Refuse,
    Renew,
    Wait,
    batches,
    decode,
    encode,
)
from kvrelay.transfer.protocol.outbox import MAX_PENDING, Outbox
from kvrelay.transfer.protocol.packing import WireError

MUTATIONS = 12_000
SEED = os.environ.get("KVRELAY_SEED")
LOOPS = 25_000
"""Times that a plain loop of Python runs in the CPU time that a batch may take: about 1 ms."""
PEAK_BYTES = 2 * 2**20
"""Bytes of memory for refusing a batch: a small multiple of the longest batch, whatever lengths it claims."""
CACHE = CacheLayout.of(KVLayout(2, 2, 8, 16, "float32"))
HELLO = Hello(VERSION, "p", "i", "j", "f", CACHE, True, "none", False, 65536)
OFFER: dict[str, Any] = {"request": "r", "attempt": 1, "tokens": 20, "digest": b"0123456789abcdef"}
SOUND = HandoffMessage.Offer(**OFFER).SerializeToString()
GIGABYTE = b"\x80\x80\x80\x80\x04"
"""Length of a gigabyte, as protobuf encodes it."""
KEY: dict[str, object] = {"request": "r", "attempt": 1}

# Any valid messages.

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
    planes=st.integers(1, 2),
)


@st.composite
def caches(draw: st.DrawFn) -> CacheLayout:
    """A first group, perhaps without tracks, and others behind it."""
    size = draw(st.sampled_from((8, 16, 128)))
    tracks = st.lists(LAYOUTS.map(lambda layout: replace(layout, block_size=size)), max_size=3).map(tuple)
    slots = LAYOUTS.map(lambda layout: replace(layout, block_size=1, dtype="raw", planes=1))
    first = st.builds(LayerGroup, st.sampled_from(("full", "latent")), tracks)
    window = st.builds(LayerGroup, st.just("window"), tracks, st.integers(1, 2**31))
    state = st.builds(LayerGroup, st.just("state"), st.tuples(slots))
    return CacheLayout((draw(first), *draw(st.lists(window | state, max_size=3))), size)


CACHES = caches()
DEGREES = st.builds(Degree, st.integers(1, 8), st.integers(1, 8))
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
        case wire.CACHE:
            return CACHES
        case wire.DEGREE:
            return DEGREES
        case wire.Many(packing.Number(low, high), most):
            return st.lists(st.integers(low, high), min_size=1, max_size=most).map(tuple)
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


@given(st.lists(MESSAGES, min_size=1, max_size=8))
@settings(max_examples=100)
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    """In one batch, unless they are too long for that."""
    assert [message for batch in batches(messages) for message in decode(batch)] == messages
    assert decode(encode(messages[:1])) == messages[:1]


PARTS = {
    "Layout": wire.LAYOUT,
    "States": wire.STATES,
    "Group": wire.GROUP,
    "Cache": wire.CACHE,
    "Degree": wire.DEGREE,
}


def test_the_proto_and_the_classes_have_the_same_messages_with_the_same_fields() -> None:
    assert set(get_args(Message)) == {form.kind for form in wire._FORMS.values()}
    for name, kind in HandoffMessage.DESCRIPTOR.nested_types_by_name.items():
        rule = PARTS.get(name) or wire._FORMS[name]
        assert [field.name for field in kind.fields] == list(rule.rules), name
    assert {code.name for code in Code} == {name.removeprefix("CODE_") for name in HandoffMessage.Code.keys()[1:]}


# Invalid ones.


def packed(*messages: HandoffMessage) -> bytes:
    return HandoffBatch(messages=messages).SerializeToString()


def record(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message, as protobuf writes it."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def offer(more: bytes = b"", **changes: object) -> bytes:
    """A batch of one Offer with some of its fields changed, or left out if they are None, and other bytes behind."""
    message = HandoffMessage.Offer(**(OFFER | changes))
    message.MergeFromString(more)
    return packed(HandoffMessage(offer=message))


def raw_offer(*content: bytes) -> bytes:
    """A batch of one Offer of these bytes."""
    return record(2, record(6, b"".join(content)))


def hello(part: str, **changes: object) -> bytes:
    """A batch of one Hello in whose part `part` some fields are changed, or left out if they are None."""
    batch = HandoffBatch.FromString(encode([replace(HELLO, states=StatesLayout((1, 4, 7), 64, "bfloat16"))]))
    start = batch.messages[0].hello
    message = start.cache.groups[0].tracks[0] if part == "layout" else getattr(start, part)
    for field in changes:
        message.ClearField(field)
    message.MergeFrom(type(message)(**{field: value for field, value in changes.items() if value is not None}))
    return batch.SerializeToString()


def renewals(*keys: dict[str, object]) -> HandoffMessage:
    return HandoffMessage(renew={"keys": keys})


UNKNOWN = f"unknown to version {VERSION}"
ONE = HandoffMessage(offer=OFFER)
INVALID: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", f"0 messages; allowed: 1 to 64 by version {VERSION}"),
    "no messages": (packed(), "0 messages"),
    "tokens: missing": (offer(tokens=None), "Offer.tokens is missing"),
    "tokens: text": (raw_offer(SOUND, b"\x1a\x0220"), "Offer"),
    "tokens: too many": (offer(tokens=2**31 + 1), "Offer.tokens is 2147483649; allowed: an integer from 0"),
    "tokens: twice": (raw_offer(SOUND, b"\x18\x14"), "twice"),
    "tokens: not the shortest form": (raw_offer(SOUND.replace(b"\x18\x14", b"\x18\x94\x00")), "malformed|shortest"),
    "request: missing": (offer(request=None), "Offer.request is missing"),
    "request: empty": (offer(request=""), "Offer.request"),
    "request: long": (offer(request="r" * 129), "Offer.request.*129 long.*allowed: text of 1 to 128"),
    "request: no UTF-8": (raw_offer(record(1, b"\xff")), "malformed"),
    "attempt: 0": (offer(attempt=0), "Offer.attempt"),
    "digest: short": (offer(digest=b"0123"), "Offer.digest"),
    "another field": (offer(more=record(9, b"more")), f"Offer has a field 9; version {VERSION}"),
    "another field, long": (offer(more=record(9, b"more") * 200), f"HandoffBatch: 1202 of .* bytes .*{UNKNOWN}"),
    "another type": (offer(tokens=None, more=record(3, b"10")), "Offer has a field 3"),
    "no kind": (packed(HandoffMessage()), "HandoffMessage is empty; allowed: .*Offer"),
    "two kinds": (record(2, ONE.SerializeToString() + b"\x3a\x00"), ""),
    "one kind twice": (record(2, ONE.SerializeToString() * 2), "there twice"),
    "behind the messages": (offer() + record(3, b"12345"), f"HandoffBatch: 7 of .* bytes .*{UNKNOWN}"),
    "in the message": (record(2, offer()[2:] + record(15, b"12345")), f"HandoffBatch: 7 of .* bytes .*{UNKNOWN}"),
    "trailing": (offer() + b"\x00", "malformed"),
    "Ack.request: missing": (packed(HandoffMessage(ack={}), ONE), "Ack.request is missing"),
    "Nack.code: 77": (packed(HandoffMessage(nack=KEY | {"code": 77, "message": ""})), "Nack.code is 77"),
    "Nack.code: 0": (packed(HandoffMessage(nack=KEY | {"code": 0, "message": ""})), "Nack.code is 0"),
    "Renew.keys: missing": (packed(HandoffMessage(renew={})), "Renew.keys is missing"),
    "Renew.keys: many": (packed(renewals(*[{}] * (MAX_KEYS + 1))), "33 keys in Renew.keys; allowed: up to 32"),
    "layers: missing": (hello("layout", layers=None), "Hello.cache.groups.tracks.layers is missing"),
    "layers: 0": (hello("layout", layers=0), "Hello.cache.groups.tracks.layers"),
    "dtype: int4": (hello("layout", dtype="int4"), "Hello.cache.groups.tracks.dtype is 'int4'; allowed: float32"),
    "order: DHN": (hello("layout", order="DHN"), "Hello.cache.groups.tracks.order"),
    "block size: 0": (hello("layout", block_size=0), "Hello.cache.groups.tracks.block_size"),
    "block size: 2**20 + 1": (hello("layout", block_size=2**20 + 1), "Hello.cache.groups.tracks.block_size"),
    "degree: 0": (hello("degree", tensor=0), "Hello.degree.tensor is 0; allowed: an integer from 1 to 64"),
    "degree: missing": (hello("degree", pipeline=None), "Hello.degree.pipeline is missing"),
    "degree: 65 ranks": (hello("degree", tensor=13, pipeline=5), "Hello.degree: .*65 ranks.*allowed: up to 64"),
    "states: none": (hello("states", layers=[]), "Hello.states.layers is missing"),
    "states: one twice": (hello("states", layers=[1, 1]), "Hello.states: .*twice"),
    "states: many": (hello("states", layers=range(MAX_STATE_LAYERS + 1)), "Hello.states.layers has 17 items"),
    "states: 2**16 + 1": (hello("states", layers=[2**16 + 1]), "Hello.states.layers"),
    "hidden size: 0": (hello("states", hidden_size=0), "Hello.states.hidden_size"),
    "states of int8": (hello("states", dtype="int8"), "Hello.states.dtype"),
    "last: missing": (hello("states", last=None), "Hello.states.last is missing"),
    "bytes of 1 GB": (raw_offer(SOUND[:9], b"\x22", GIGABYTE), "malformed"),
    "a message of 1 GB": (record(2, b"\x32" + GIGABYTE), "malformed"),
    "a batch of 1 GB": (b"\x12" + GIGABYTE, "malformed"),
    "groups to the end": (b"\x1b" * MAX_BATCH_BYTES, ""),
    "a group": (raw_offer(SOUND, b"\x2b\x2c"), ""),
    "a message of a version up to 6": (b"\x0a" + bytes(msgpack.packb(msgpack.packb([{"type": "Wait"}])))[1:], ""),
    "too many messages": (packed(*[HandoffMessage()] * (MAX_MESSAGES + 1)), "65 messages; allowed: 1 to 64"),
    "the longest of nothing": (b"\x12\x00" * (MAX_BATCH_BYTES // 2), "messages; allowed"),
    "the longest of unknown fields": (b"\x18\x00" * (MAX_BATCH_BYTES // 2), "0 messages"),
    "too long": (b"\x12\x00" * (MAX_BATCH_BYTES // 2 + 1), f"allowed: up to {MAX_BATCH_BYTES}"),
    "the longest list": (packed(renewals(*[{}] * (MAX_BATCH_BYTES // 2 - 8))), "keys in Renew.keys"),
    "many keys": (packed(*[renewals(*[KEY] * MAX_KEYS)] * MAX_MESSAGES), ""),
    "many keys, and what is wrong": (
        packed(renewals(*[KEY] * MAX_KEYS), *[ONE] * (MAX_MESSAGES - 2), HandoffMessage()),
        "HandoffMessage is empty",
    ),
    "all but the last message right": (
        packed(*[ONE] * (MAX_MESSAGES - 1), HandoffMessage(offer=OFFER | {"attempt": 0})),
        "Offer.attempt",
    ),
    "a long list of long texts": (packed(renewals(*[{"request": "r" * 900, "attempt": 1}] * MAX_KEYS)), ""),
} | {f"truncated to {length}": (offer()[:length], "") for length in range(1, len(offer()))}
"""Batches, and what the refusal says of each, if it has a reason of its own."""


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_batch_is_refused_with_the_reason(name: str) -> None:
    batch, reason = INVALID[name]
    with pytest.raises(WireError, match=reason or None):
        decode(batch)


def cpu_seconds(batch: bytes) -> float:
    """CPU seconds in which this thread refuses `batch`; the median of nine tries."""
    times = []
    for _ in range(9):
        started = time.thread_time()
        with pytest.raises(WireError):
            decode(batch)
        times.append(time.thread_time() - started)
    return statistics.median(times)


def most_seconds() -> float:
    """CPU seconds that a batch may take on this machine, at its present speed."""
    times = []
    for _ in range(9):
        started, total = time.thread_time(), 0
        for number in range(LOOPS):
            total += number
        times.append(time.thread_time() - started)
    return statistics.median(times)


def test_every_invalid_batch_is_refused_in_little_time() -> None:
    costs = {name: cpu_seconds(batch) for name, (batch, _) in INVALID.items()}
    worst = max(costs, key=costs.__getitem__)
    assert costs[worst] < most_seconds(), worst


def test_nothing_is_allocated_by_a_claimed_length() -> None:
    tracemalloc.start()
    try:
        for name, (batch, _) in INVALID.items():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(WireError):
                decode(batch)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < PEAK_BYTES, f"{name}: {peak} bytes"
    finally:
        tracemalloc.stop()


VALID: list[list[Message]] = [
    [HELLO],
    [Dial(1, "fake"), Meet(1, "wire", b"0123"), Offer("r", 1, 20, b"0123456789abcdef")],
    [Push("r", 1, 1, 0, 0, 16, 6144)] * 3 + [Finish("r", 1, 1, 7, 3, 20)],
    [Renew((("r", 1), ("s", 2)))],
    [Abort("r", 1, Code.CANCELLED, "cancelled by the sender"), CloseLink(1, "")],
    [Wait("r", 1), Grant("r", 1, 1, (0,)), Ack("r", 1, 1), Nack("r", 1, Code.NO_CAPACITY, "full")],
    [Refuse(Code.INCOMPATIBLE, "layout.layers: 4 here, 3 there")],
]


def mutated(number: int) -> bytes:
    """A valid batch with a few bytes changed, left out, doubled or inserted."""
    rng = random.Random(number)
    batch = bytearray(encode(VALID[number % len(VALID)]))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(batch))
        match rng.randrange(6):
            case 0:
                batch[at] = rng.randrange(256)
            case 1:
                batch[at] ^= 1 << rng.randrange(8)
            case 2:
                del batch[at : at + rng.randrange(1, 9)]
            case 3:
                batch[at:at] = batch[at : at + rng.randrange(1, 9)]
            case 4:
                batch[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 5:
                batch[at:at] = rng.choice((b"\x0a", b"\x12", b"\x22", b"\x32")) + GIGABYTE
        if not batch:
            break
    return bytes(batch)


def test_mutated_batches_are_messages_or_wire_errors_in_little_time() -> None:
    times = []
    for number in range(MUTATIONS) if SEED is None else [int(SEED)]:
        batch = mutated(number)
        started = time.thread_time()
        try:
            messages = decode(batch)
        except WireError:
            times.append(time.thread_time() - started)
            continue
        except BaseException as error:
            error.add_note(f"KVRELAY_SEED={number}: {batch!r}")
            raise
        assert decode(encode(messages)) == messages, f"KVRELAY_SEED={number}"
    if SEED is None:
        assert len(times) > MUTATIONS // 2
        most = most_seconds()
        assert statistics.median(times) < most / 4
        # One of thousands may include a garbage collection.
        assert statistics.quantiles(times, n=1000)[-1] < most


@given(st.binary(max_size=300))
@settings(max_examples=150)
def test_random_bytes_are_wire_errors(batch: bytes) -> None:
    with pytest.raises(WireError):
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


# What is sent.


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Offer("", 1, 10, b"0" * 16), "Offer.request"),
        (Push("r", 1, 1, 0, 0, 16, MAX_FRAME_BYTES + 1), "Push.nbytes"),
        (Grant("r", 1, 0, (0,)), "Grant.epoch"),
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
    many = [Renew((key,) * MAX_KEYS) for _ in range(9)]
    short = [Ack("r", number, 1) for number in range(1, 3 * MAX_MESSAGES)]
    messages: list[Message] = [*meets, *many, *short]
    split = list(batches(messages))
    assert [message for batch in split for message in decode(batch)] == messages
    assert max(map(len, split)) <= MAX_BATCH_BYTES
    assert len(split) < 36
    with pytest.raises(WireError, match="one batch"):
        encode(many)


@pytest.mark.anyio
async def test_queued_messages_leave_in_order_in_few_batches() -> None:
    outbox = Outbox()
    messages = [Ack("r", number + 1, 1) for number in range(MAX_MESSAGES + 5)]
    outbox.put(*messages)
    outbox.close()
    outbox.put(Ack("late", 1, 1))
    left = [decode(batch) async for batch in outbox.batches()]
    assert [len(batch) for batch in left] == [MAX_MESSAGES, 5]
    assert [message for batch in left for message in batch] == messages


@pytest.mark.anyio
async def test_a_peer_that_never_reads_loses_its_stream() -> None:
    outbox = Outbox()
    for _ in range(MAX_PENDING + 1):
        outbox.put(Wait("r", 1))
    assert outbox.closed
