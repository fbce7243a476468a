"""Control messages of the hand-off and their form on the wire: strict, bounded msgpack.

The unit on the stream is a batch: an array of 1 to `MAX_MESSAGES` messages with a bounded size and a bounded number of
values. A message is a map of its fields plus `type`. Anything that doesn't match exactly (a missing, unknown or
duplicate key, another type, a number out of range, a float, an extension type, trailing bytes) raises `WireError`;
decoding raises nothing else.

    sender -> receiver    Hello, Dial, Meet, CloseLink, Offer, Push, Finish, Abort, Renew
    receiver -> sender    Hello, Refuse, Meet, CloseLink, Wait, Grant, Ack, Nack, Renew
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast, get_args, get_type_hints

from kvrelay.engine.kv.layout import DTYPE_BYTES, FloatDtype, KVLayout
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.packing import (
    MAX_REASON,
    MAX_VALUES,
    Choice,
    Flag,
    Many,
    Number,
    Raw,
    Rule,
    Text,
    WireError,
    pack,
    pack_joined,
    shown,
    unpack,
    values_in,
)

Key = tuple[str, int]
"""(request_id, attempt): identifies one hand-off."""

VERSION = 7
MAX_BATCH_BYTES = 512 * 2**10
MAX_MESSAGES = 64
"""Messages of one batch at most."""
MAX_KEYS = 128
"""Attempts that one Renew names at most."""
MAX_FRAME_BYTES = 256 * 2**20
"""KV bytes of one frame on a link at most."""
MAX_PARTS = 1024
MAX_STATE_LAYERS = 16
"""Layers whose inputs one worker asks another for at most."""


class KeyRule:
    def check(self, name: str, value: object) -> Key:
        if type(value) is not list or len(value) != 2:
            raise WireError(f"{name} is {shown(value)}; allowed: [request, attempt]")
        return REQUEST.check(name, value[0]), ATTEMPT.check(name, value[1])

    def plain(self, value: Key) -> object:
        return [REQUEST.check("request", value[0]), ATTEMPT.check("attempt", value[1])]


class LayoutRule:
    """A `KVLayout` as a map of its fields."""

    _NUMBERS = ("layers", "kv_heads", "head_dim", "block_size", "tp_rank", "tp_size")

    def check(self, name: str, value: object) -> KVLayout:
        fields = {field.name for field in dataclasses.fields(KVLayout)}
        if type(value) is not dict or set(value) != fields:
            raise WireError(f"{name} is {shown(value)}; allowed: a map of {', '.join(sorted(fields))}")
        for field in self._NUMBERS:
            Number(0, 2**20).check(f"{name}.{field}", value[field])
        for field, allowed in (("dtype", tuple(DTYPE_BYTES)), ("order", ("NHD", "HND"))):
            if type(value[field]) is not str or value[field] not in allowed:
                raise WireError(f"{name}.{field} is {shown(value[field])}; allowed: {', '.join(allowed)}")
        try:
            return KVLayout(**value)
        except ValueError as error:
            raise WireError(f"{name}: {error}") from None

    def plain(self, value: KVLayout) -> object:
        return dataclasses.asdict(value)


class StatesRule:
    """A `StatesLayout` as a map of its fields, or None."""

    _FIELDS = ("layers", "hidden_size", "dtype", "last")

    def check(self, name: str, value: object) -> StatesLayout | None:
        if value is None:
            return None
        if type(value) is not dict or set(value) != set(self._FIELDS):
            raise WireError(f"{name} is {shown(value)}; allowed: none, or a map of {', '.join(self._FIELDS)}")
        layers = Many(Number(0, 2**16), MAX_STATE_LAYERS).check(f"{name}.layers", value["layers"])
        if not layers or len(set(layers)) != len(layers):
            raise WireError(f"{name}.layers is {shown(layers)}; allowed: 1 to {MAX_STATE_LAYERS} different numbers")
        width = Number(1, 2**20).check(f"{name}.hidden_size", value["hidden_size"])
        dtype = value["dtype"]
        if type(dtype) is not str or dtype not in get_args(FloatDtype):
            raise WireError(f"{name}.dtype is {shown(dtype)}; allowed: {', '.join(get_args(FloatDtype))}")
        last = Flag().check(f"{name}.last", value["last"])
        return StatesLayout(layers, width, cast(FloatDtype, dtype), last)

    def plain(self, value: StatesLayout | None) -> object:
        return None if value is None else {**dataclasses.asdict(value), "layers": list(value.layers)}


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
Keys = Annotated[tuple[Key, ...], Many(KeyRule(), MAX_KEYS)]


class Code(enum.Enum):
    """Why a hand-off was given up."""

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


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of either end of a stream: its identity, the incarnation that it wants to reach, its KV layout."""

    version: Count
    worker: Name
    incarnation: Name
    peer_incarnation: Name
    """The incarnation that this message is meant for."""
    fingerprint: Reason
    """Of the model."""
    layout: Annotated[KVLayout, LayoutRule()]
    checksum: Annotated[bool, Flag()]
    encrypt: Annotated[str, Text(1, 16)]
    """`TransferConfig.encrypt`."""
    gpu: Annotated[bool, Flag()]
    """Whether its KV pool is in GPU memory. If both pools are, frames in GPU memory carry the GPU checksum."""
    frame_bytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    """KV bytes of the largest frame that it sends."""
    states: Annotated[StatesLayout | None, StatesRule()] = None
    """A receiver's: the hidden states of prompts that it wants beside their KV; None if it wants none."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The stream can't be used; no message follows."""

    code: Annotated[Code, Choice(Code)]
    message: Reason


@dataclass(frozen=True, slots=True)
class Dial:
    """The sender opens a link of this epoch, and the receiver must open its end. Older links of the pair are void."""

    epoch: Epoch
    transport: Name


@dataclass(frozen=True, slots=True)
class Meet:
    """An entry of the rendezvous store of a link that is being opened: how its two ends find each other."""

    epoch: Epoch
    entry: Name
    value: Annotated[bytes, Raw(0, 4096)]


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The end that says so has closed the link of this epoch."""

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
    """Blocks are reserved: frames may be sent on the link of `epoch`, from token `have` to the end of the prompt.

    A grant of a later epoch starts the frames again at its own `have`, and those of hidden states at its own `states`.
    """

    epoch: Epoch
    have: Tokens
    states: Tokens = 0
    """The first token whose hidden states are wanted, if the hello asked for any."""


@dataclass(frozen=True, slots=True)
class Push(ToAttempt):
    """Announces a frame: it follows on the link of `epoch`, behind the frames announced before it."""

    epoch: Epoch
    index: Count
    """Frames of this attempt before it in this epoch."""
    first: Tokens
    tokens: Annotated[int, Number(1, 2**31)]
    nbytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    part: Annotated[int, Number(0, MAX_PARTS - 1)] = 0
    """Which part of the layers it carries, of `parts` (see `LayerPart`); the parts of the same tokens come in order."""
    parts: Annotated[int, Number(1, MAX_PARTS)] = 1
    states: Annotated[bool, Flag()] = False
    """Whether it carries the tokens' hidden states, and not their KV."""


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

    code: Annotated[Code, Choice(Code)]
    message: Reason


@dataclass(frozen=True, slots=True)
class Abort(ToAttempt):
    """The sender has given the attempt up."""

    code: Annotated[Code, Choice(Code)]
    message: Reason


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews the leases of these attempts: the end that says so still has them."""

    keys: Keys


Message = Hello | Refuse | Dial | Meet | CloseLink | Offer | Wait | Grant | Push | Finish | Ack | Nack | Abort | Renew


class _Form:
    """The wire form of one class of message: its name and the rule of each field."""

    KINDS: ClassVar[tuple[type[Message], ...]] = get_args(Message)

    def __init__(self, kind: type[Message]) -> None:
        self.kind = kind
        self.name = kind.__name__
        hints = get_type_hints(kind, include_extras=True)
        self.rules: dict[str, Rule] = {
            field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(kind)
        }
        self.keys = {"type", *self.rules}

    def write(self, message: Message) -> dict[str, object]:
        plain: dict[str, object] = {"type": self.name}
        for name, rule in self.rules.items():
            try:
                plain[name] = rule.plain(getattr(message, name))
            except WireError as error:
                raise WireError(f"{self.name}.{name}: {error}") from None
        return plain

    def read(self, plain: dict[str, object]) -> Message:
        if set(plain) != self.keys:
            odd = sorted(set(plain) ^ self.keys)
            raise WireError(f"{self.name} has missing or unknown fields: {shown(', '.join(odd))}")
        fields = {name: rule.check(f"{self.name}.{name}", plain[name]) for name, rule in self.rules.items()}
        return self.kind(**fields)


_FORMS = {form.name: form for form in map(_Form, _Form.KINDS)}


def encode(messages: Sequence[Message]) -> bytes:
    """One batch of 1 to MAX_MESSAGES messages.

    Raises:
        WireError: a field is out of its limits, or the batch would be too large; a defect of the caller.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise WireError(f"{len(messages)} messages in a batch; allowed: 1 to {MAX_MESSAGES}")
    first, *more = batches(messages)
    if more:
        raise WireError(f"{len(messages)} messages that don't fit into one batch")
    return first


def batches(messages: Iterable[Message]) -> Iterator[bytes]:
    """`messages`, in order, in as few batches as possible.

    Raises:
        WireError: a field is out of its limits; a defect of the caller.
    """
    parts: list[bytes] = []
    size = values = 0
    for message in messages:
        plain = _FORMS[type(message).__name__].write(message)
        part, more = pack(plain), 1 + values_in(plain)
        fits = len(parts) < MAX_MESSAGES and size + len(part) < MAX_BATCH_BYTES - 8 and values + more < MAX_VALUES
        if parts and not fits:
            yield pack_joined(parts)
            parts, size, values = [], 0, 0
        parts.append(part)
        size += len(part)
        values += more
    if parts:
        yield pack_joined(parts)


def decode(batch: bytes) -> list[Message]:
    """The messages of one batch, in order.

    Raises:
        WireError: the bytes aren't exactly what `encode` makes.
    """
    if len(batch) > MAX_BATCH_BYTES:
        raise WireError(f"batch of {len(batch)} bytes; allowed: up to {MAX_BATCH_BYTES}")
    items = unpack(batch, max(MAX_MESSAGES, MAX_KEYS))
    if type(items) is not list or not 1 <= len(items) <= MAX_MESSAGES:
        raise WireError(f"a batch is an array of 1 to {MAX_MESSAGES} messages, not {shown(items)}")
    return [_read(item) for item in items]


def _read(item: object) -> Message:
    if type(item) is not dict:
        raise WireError(f"a message is a map, not {shown(item)}")
    name = item.get("type")
    form = _FORMS.get(name) if type(name) is str else None
    if form is None:
        raise WireError(f"type is {shown(name)}; allowed: {', '.join(_FORMS)}")
    return form.read(item)


def check_key(key: Key) -> None:
    """Checks that messages can carry `key`.

    Raises:
        WireError: they can't; the text names what is allowed.
    """
    KeyRule().check("request", list(key))
