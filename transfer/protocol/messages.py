"""Control messages of the hand-off, and their form on the wire: `proto/kvrelay/internal/v1/handoff.proto`.

A stream carries batches: 1 to `MAX_MESSAGES` messages, whose size is bounded before anything is parsed. What doesn't
match exactly (a missing, unknown or doubled field, a number out of range, a long text or list) raises `WireError`, and
decoding raises nothing else.

    sender -> receiver    Hello, Dial, Meet, CloseLink, Offer, Push, Finish, Abort, Renew
    receiver -> sender    Hello, Refuse, Meet, CloseLink, Wait, Grant, Ack, Nack, Renew
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from kvrelay.engine.degree import MAX_RANKS, ONE, Degree
from kvrelay.engine.kv.layout import DTYPE_BYTES, CacheLayout, FloatDtype, GroupKind, KVLayout, LayerGroup, Order
from kvrelay.engine.states import StatesLayout
from kvrelay.internal.v1.handoff_pb2 import DESCRIPTOR, HandoffBatch, HandoffMessage
from kvrelay.transfer.protocol.packing import MAX_REASON, Flag, Number, Raw, Rule, Text, WireError, shown

Key = tuple[str, int]
"""(request_id, attempt): identifies one hand-off."""

VERSION = 9
SERVICE = DESCRIPTOR.services_by_name["HandoffService"].full_name
"""Name of the service. Both ends of its method `Control` take and give the bytes of batches: gRPC itself would parse
any size."""
MAX_BATCH_BYTES = 32 * 2**10
"""Size limit of a batch; it bounds the time that parsing takes, whatever is in it, to less than half a millisecond."""
SMALL_BYTES = 1024
"""Size in bytes up to which a message is searched for an unknown field by its number; `decode` refuses those of any
size."""
MAX_MESSAGES = 64
"""Largest number of messages in one batch."""
MAX_KEYS = 32
"""Largest number of attempts that one Renew, and all of one batch, name."""
MAX_FRAME_BYTES = 256 * 2**20
"""Largest size in KV bytes of one frame on a link."""
MAX_PARTS = 1024
MAX_GROUPS = 32
MAX_ROUTES = 1024
"""Largest number of routes between two workers (`kvrelay.transfer.protocol.routes`)."""
MAX_TRACKS = 64
"""Largest number of tracks in one group."""
MAX_STATE_LAYERS = 16
"""Largest number of layers whose inputs one worker asks another for."""


@dataclass(frozen=True, slots=True)
class Choice(Rule):
    """Rule of a field that has one of several values, each with its form on the wire."""

    values: Mapping[Any, object]
    """Values by their form."""

    def check(self, name: str, value: object) -> object:
        if value not in self.values:
            raise WireError(f"{name} is {shown(value)}; allowed: {', '.join(map(str, self.values))}")
        return self.values[value]

    def plain(self, name: str, value: object) -> object:
        forms = {allowed: form for form, allowed in self.values.items()}
        if value not in forms:
            raise WireError(f"{name} is {shown(value)}; allowed: {', '.join(map(str, forms))}")
        return forms[value]


@dataclass(frozen=True, slots=True)
class Many(Rule):
    """Rule of a list of at least `least` items, and at most `most`."""

    item: Rule
    most: int
    least: int = 1

    def _sized(self, name: str, value: Sequence[Any]) -> Sequence[Any]:
        if not self.least <= len(value) <= self.most:
            raise WireError(f"{name} has {len(value)} items; allowed: {self.least} to {self.most}")
        return value

    def check(self, name: str, value: Any) -> tuple[Any, ...]:
        return tuple(self.item.check(name, item) for item in self._sized(name, value))

    def plain(self, name: str, value: tuple[Any, ...]) -> object:
        return [self.item.plain(name, item) for item in self._sized(name, value)]


@dataclass(frozen=True, slots=True)
class Fields(Rule):
    """Rule of a value whose fields are those of a protobuf message, in the order of their numbers."""

    kind: Callable[..., Any]
    rules: Mapping[str, Rule]
    optional: bool = False
    """Whether the message may be absent; the value is None then."""

    def check(self, name: str, value: Any) -> Any:
        if value.ByteSize() <= SMALL_BYTES and len(unknown := UnknownFieldSet(value)):
            number = unknown[0].field_number
            raise WireError(f"{name} has a field {number}; version {VERSION} of the protocol has none such")
        found, rules, fields = value.ListFields(), self.rules, {}
        if len(found) < len(rules):
            names = {descriptor.name for descriptor, _ in found}
            for field, rule in rules.items():
                if field in names:
                    continue
                if isinstance(rule, Many) and not rule.least:
                    fields[field] = ()
                elif not (isinstance(rule, Fields) and rule.optional):
                    raise WireError(f"{name}.{field} is missing")
            rules = {field: rule for field, rule in rules.items() if field in names}
        fields |= {
            field: rule.check(f"{name}.{field}", item)
            for (field, rule), (_, item) in zip(rules.items(), found, strict=True)
        }
        try:
            return self.kind(**fields)
        except ValueError as error:
            raise WireError(f"{name}: {error}") from None

    def plain(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        return {field: rule.plain(f"{name}.{field}", getattr(value, field)) for field, rule in self.rules.items()}


def _fields(kind: type) -> Fields:
    """The rule of a class whose annotations have the rules of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return Fields(kind, {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(kind)})


def _names(names: Iterable[str]) -> Choice:
    return Choice({name: name for name in names})


_SIZE = Number(1, 2**20)
LAYOUT = Fields(
    KVLayout,
    {
        **dict.fromkeys(("layers", "kv_heads", "head_dim", "block_size"), _SIZE),
        "dtype": _names(DTYPE_BYTES),
        "order": _names(get_args(Order)),
        "planes": Number(1, 2),
        "replicated": Flag(),
    },
)
GROUP = Fields(
    LayerGroup,
    {
        "kind": _names(get_args(GroupKind)),
        "tracks": Many(LAYOUT, MAX_TRACKS, least=0),
        "window": Number(0, 2**31),
    },
)
CACHE = Fields(CacheLayout, {"groups": Many(GROUP, MAX_GROUPS), "block_size": _SIZE})
DEGREE = Fields(Degree, dict.fromkeys(("tensor", "pipeline"), Number(1, MAX_RANKS)))
STATES = Fields(
    StatesLayout,
    {
        "layers": Many(Number(0, 2**16), MAX_STATE_LAYERS),
        "hidden_size": _SIZE,
        "dtype": _names(get_args(FloatDtype)),
        "last": Flag(),
    },
    optional=True,
)

REQUEST = Text(1, 128)
ATTEMPT = Number(1, 2**32 - 1)

Request = Annotated[str, REQUEST]
Attempt = Annotated[int, ATTEMPT]
Name = Annotated[str, Text(1, 128)]
Reason = Annotated[str, Text(0, MAX_REASON)]
Epoch = Annotated[int, Number(1, 2**48)]
Tokens = Annotated[int, Number(0, 2**31)]
Count = Annotated[int, Number(0, 2**31)]
Bytes = Annotated[int, Number(0, 2**53)]
Rank = Annotated[int, Number(0, MAX_RANKS - 1)]


class Code(enum.Enum):
    """Reason why a hand-off was given up."""

    CANCELLED = "cancelled"
    CLOSED = "closed"
    """The other worker is shutting down, or gone."""
    CORRUPT = "corrupt"
    DRAINING = "draining"
    """The other worker is about to stop, and returns its requests."""
    INCOMPATIBLE = "incompatible"
    """The two workers' KV or models differ, or no transport suits both; a retry between these two can't help."""
    INTERNAL = "internal"
    """A defect of the worker that reports it."""
    LINK = "link"
    MANIFEST = "manifest"
    """The offer differs from what the router announced."""
    NO_CAPACITY = "no_capacity"
    """No blocks, or no link, became free in time."""
    PROTOCOL = "protocol"
    """A message that the state of its receiver doesn't allow: a defect of the other end."""
    TIMEOUT = "timeout"
    UNKNOWN_PEER = "unknown_peer"

    @property
    def retryable(self) -> bool:
        """Whether another placement may succeed."""
        return self not in (Code.INCOMPATIBLE, Code.INTERNAL)


CODE = Choice({HandoffMessage.Code.Value(f"CODE_{code.name}"): code for code in Code})


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of either end of a stream: its identity, the incarnation that it wants to reach, what it keeps of a
    sequence."""

    version: Count
    worker: Name
    incarnation: Name
    peer_incarnation: Name
    """Incarnation that this message is meant for."""
    fingerprint: Reason
    """Fingerprint of the model."""
    cache: Annotated[CacheLayout, CACHE]
    checksum: Annotated[bool, Flag()]
    encrypt: Annotated[str, Text(1, 16)]
    """Value of `TransferConfig.encrypt`."""
    gpu: Annotated[bool, Flag()]
    """Whether the worker's KV pool is in GPU memory. If both pools are, frames in GPU memory carry the GPU checksum."""
    frame_bytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    """KV bytes of the largest frame that the worker sends."""
    states: Annotated[StatesLayout | None, STATES] = None
    """Hidden states of prompts that a receiver wants beside their KV; None if it wants none."""
    degree: Annotated[Degree, DEGREE] = ONE
    """Ranks that hold the cache, which is that of the whole model."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The stream can't be used; no message follows."""

    code: Annotated[Code, CODE]
    message: Reason


@dataclass(frozen=True, slots=True)
class Dial:
    """The sender opens the links of this epoch, one for each pair of ranks that share a route, and the receiver must
    open its ends. Older links of the pair are void."""

    epoch: Epoch
    transport: Name


@dataclass(frozen=True, slots=True)
class Meet:
    """One entry of the rendezvous store of a link that is being opened: how its two ends find each other."""

    epoch: Epoch
    entry: Name
    value: Annotated[bytes, Raw(0, 4096)]
    sender: Rank = 0
    receiver: Rank = 0
    """Ranks of the link's ends, at the sending and the receiving worker."""


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The end that says so has closed the links of this epoch."""

    epoch: Epoch
    message: Reason


@dataclass(frozen=True, slots=True)
class ToAttempt:
    """Base of every message about one attempt."""

    request: Request
    attempt: Attempt

    @property
    def key(self) -> Key:
        return self.request, self.attempt


@dataclass(frozen=True, slots=True)
class Offer(ToAttempt):
    """The sender computes the KV of `tokens` tokens, whose ids hash to `digest`, for the receiver."""

    tokens: Tokens
    digest: Annotated[bytes, Raw(16, 16)]


@dataclass(frozen=True, slots=True)
class Wait(ToAttempt):
    """The receiver has no free blocks yet; it sends Grant once it has, or Nack at its deadline."""


@dataclass(frozen=True, slots=True)
class Grant(ToAttempt):
    """Blocks are reserved: frames may be sent on the links of `epoch`, of each route from its token in `have` on.

    A grant of a later epoch starts the frames again at its own `have`, and those of hidden states at its own `states`.
    """

    epoch: Epoch
    have: Annotated[tuple[int, ...], Many(Number(0, 2**31), MAX_ROUTES)]
    states: Tokens = 0
    """First token whose hidden states are wanted, if the hello asked for any."""


@dataclass(frozen=True, slots=True)
class Push(ToAttempt):
    """Announces a frame: it follows on a link of `epoch`, behind the frames announced before it for that link."""

    epoch: Epoch
    index: Count
    """Number of frames of this attempt before this one on the same link."""
    first: Tokens
    tokens: Annotated[int, Number(1, 2**31)]
    nbytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    part: Annotated[int, Number(0, MAX_PARTS - 1)] = 0
    """Number of the part of the layers that the frame carries, of `parts` (see `LayerPart`); the parts of the same
    tokens come in order."""
    parts: Annotated[int, Number(1, MAX_PARTS)] = 1
    states: Annotated[bool, Flag()] = False
    """Whether the frame carries the tokens' hidden states, and not their KV."""
    track: Annotated[int, Number(0, MAX_ROUTES - 1)] = 0
    """Index of the route that the KV goes, and so of its track in the attempt's manifest. Hidden states go with the
    first."""


@dataclass(frozen=True, slots=True)
class Finish(ToAttempt):
    """The prompt is computed and `first_token` sampled. `frames` and `nbytes` count what this epoch sent."""

    epoch: Epoch
    first_token: Tokens
    frames: Count
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Ack(ToAttempt):
    """Every frame has verified, and the receiver owns the KV."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Nack(ToAttempt):
    """The receiver has given the attempt up."""

    code: Annotated[Code, CODE]
    message: Reason


@dataclass(frozen=True, slots=True)
class Abort(ToAttempt):
    """The sender has given the attempt up."""

    code: Annotated[Code, CODE]
    message: Reason


class KeyRule(Rule):
    """Rule of a `Key`, which is one message with both of its values."""

    def check(self, name: str, value: Any) -> Key:
        return REQUEST.check(f"{name}.request", value.request), ATTEMPT.check(f"{name}.attempt", value.attempt)

    def plain(self, name: str, value: Key) -> object:
        request, attempt = value
        return {
            "request": REQUEST.plain(f"{name}.request", request),
            "attempt": ATTEMPT.plain(f"{name}.attempt", attempt),
        }


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews the leases of these attempts: the end that says so still has them."""

    keys: Annotated[tuple[Key, ...], Many(KeyRule(), MAX_KEYS)]


Message = Hello | Refuse | Dial | Meet | CloseLink | Offer | Wait | Grant | Push | Finish | Ack | Nack | Abort | Renew


_FORMS: dict[str, Fields] = {kind.__name__: _fields(kind) for kind in get_args(Message)}
_ONEOF = {type(getattr(HandoffMessage(), name)).__name__: name for name in HandoffMessage.DESCRIPTOR.fields_by_name}
"""Fields of the oneof by the names of their messages."""


def encode(messages: Sequence[Message]) -> bytes:
    """One batch of 1 to MAX_MESSAGES messages.

    Raises:
        WireError: a field is out of its limits, or the batch would be too large; a defect of the caller.
    """
    found = list(batches(messages))
    if len(found) != 1:
        raise WireError(f"{len(messages)} messages that don't make one batch")
    return found[0]


def batches(messages: Iterable[Message]) -> Iterator[bytes]:
    """`messages`, in order, in as few batches as possible.

    Raises:
        WireError: a field is out of its limits; a defect of the caller.
    """
    batch, size, keys = HandoffBatch(), 0, 0
    for message in messages:
        kind = type(message).__name__
        part = HandoffMessage(**{_ONEOF[kind]: _FORMS[kind].plain(kind, message)})
        more = part.ByteSize() + 4  # with its tag and length
        size, keys = size + more, keys + len(part.renew.keys)
        if len(batch.messages) == MAX_MESSAGES or size > MAX_BATCH_BYTES or keys > MAX_KEYS:
            yield batch.SerializeToString()
            batch, size, keys = HandoffBatch(), more, len(part.renew.keys)
        batch.messages.append(part)
    if batch.messages:
        yield batch.SerializeToString()


def decode(packed: bytes) -> list[Message]:
    """The messages of one batch, in order.

    Raises:
        WireError: the bytes aren't what `encode` makes.
    """
    if len(packed) > MAX_BATCH_BYTES:
        raise WireError(f"batch of {len(packed)} bytes; allowed: up to {MAX_BATCH_BYTES}")
    try:
        batch = HandoffBatch.FromString(packed)
    except DecodeError:
        raise WireError("not a HandoffBatch: malformed, or a text is not UTF-8") from None
    if not 1 <= len(batch.messages) <= MAX_MESSAGES:
        allowed = f"1 to {MAX_MESSAGES} by version {VERSION} of the protocol"
        raise WireError(f"HandoffBatch has {len(batch.messages)} messages; allowed: {allowed}")
    keys = sum(len(message.renew.keys) for message in batch.messages)
    if keys > MAX_KEYS:
        raise WireError(f"HandoffBatch has {keys} keys in Renew.keys; allowed: up to {MAX_KEYS}")
    messages = [_read(message) for message in batch.messages]
    batch.DiscardUnknownFields()
    odd = len(packed) - batch.ByteSize()
    if odd:
        why = f"unknown to version {VERSION} of the protocol, there twice, or not in the shortest form"
        raise WireError(f"HandoffBatch: {odd} of {len(packed)} bytes are of fields that are {why}")
    return messages


def _read(message: HandoffMessage) -> Message:
    field = message.WhichOneof("kind")
    if field is None:
        raise WireError(f"HandoffMessage is empty; allowed: one of {', '.join(_ONEOF)}")
    part = getattr(message, field)
    kind = type(part).__name__
    try:
        read: Message = _FORMS[kind].check(kind, part)
    except WireError:
        if field == "hello" and message.hello.version != VERSION:
            raise WireError(f"Hello.version: {VERSION} here, {message.hello.version} there") from None
        raise
    return read


def check_key(key: Key) -> None:
    """Checks that messages can carry `key`.

    Raises:
        WireError: they can't; the text names what is allowed.
    """
    KeyRule().plain("key", key)
