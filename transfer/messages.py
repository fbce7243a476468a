"""Control messages of the hand-off and their form on the wire: strict, bounded msgpack.

A frame is an array of 1 to `MAX_MESSAGES` messages, its size and number of values bounded; a message is a map of its
fields plus `type`. What doesn't match exactly (a missing, unknown or duplicate key, another type, a number out of
range, a float, an extension type, bytes left over) is a `WireError`, and decoding raises nothing else.

    sender -> receiver    Hello, Dial, Meet, CloseLink, Offer, Push, Finish, Abort, Renew
    receiver -> sender    Hello, Refuse, Meet, CloseLink, Wait, Grant, Ack, Nack, Renew
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args, get_type_hints

from kvrelay.engine.kv.layout import DTYPE_BYTES, KVLayout
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
"""(request_id, attempt): what a hand-off is known by."""

VERSION = 2
MAX_CONTROL_BYTES = 512 * 2**10
MAX_MESSAGES = 64
MAX_KEYS = 128
MAX_FRAME_BYTES = 16 * 2**20


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
    INCOMPATIBLE = "incompatible"
    """The two workers' KV or models differ, or no transport fits both; trying again can't help."""
    INTERNAL = "internal"
    """A defect of the worker that says so."""
    LINK = "link"
    MANIFEST = "manifest"
    """The offer isn't for what the router announced."""
    NO_ROOM = "no_room"
    PROTOCOL = "protocol"
    """A message that the other end's state doesn't allow: a defect, fenced off."""
    TIMEOUT = "timeout"
    UNKNOWN_PEER = "unknown_peer"

    @property
    def retryable(self) -> bool:
        """Whether another placement may succeed."""
        return self not in (Code.INCOMPATIBLE, Code.INTERNAL)


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of either end of a stream: who speaks, to which incarnation, and what its KV looks like."""

    version: Count
    worker: Name
    incarnation: Name
    peer_incarnation: Name
    """The incarnation that the speaker means to reach."""
    fingerprint: Reason
    """Of the model."""
    layout: Annotated[KVLayout, LayoutRule()]
    checksum: Annotated[bool, Flag()]
    gpu: Annotated[bool, Flag()]
    """Whether its KV lies on a GPU. Where both ends' does, frames in GPU memory carry the GPU's checksum."""
    frame_bytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    """Of the frames that it sends, at most."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The stream can't be used; nothing else follows."""

    code: Annotated[Code, Choice(Code)]
    message: Reason


@dataclass(frozen=True, slots=True)
class Dial:
    """The sender dials a link of this epoch; the receiver dials it too. Any older link of the pair is void."""

    epoch: Epoch
    transport: Name


@dataclass(frozen=True, slots=True)
class Meet:
    """An entry of the rendezvous store of the link that is being dialled: how its ends find each other."""

    epoch: Epoch
    entry: Name
    value: Annotated[bytes, Raw(0, 4096)]


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The speaker has closed its end of the link of this epoch."""

    epoch: Epoch
    message: Reason


@dataclass(frozen=True, slots=True)
class ToAttempt:
    """What every message about one attempt carries."""

    request: Request
    attempt: Attempt

    @property
    def key(self) -> Key:
        return self.request, self.attempt


@dataclass(frozen=True, slots=True)
class Offer(ToAttempt):
    """The manifest: KV of `tokens` tokens, which hash to `digest`, is being computed for the receiver."""

    tokens: Tokens
    digest: Annotated[bytes, Raw(16, 16)]


@dataclass(frozen=True, slots=True)
class Wait(ToAttempt):
    """The receiver has no room yet; it grants as soon as it has, or gives up by itself."""


@dataclass(frozen=True, slots=True)
class Grant(ToAttempt):
    """Blocks are reserved. Frames may be sent on the link of `epoch`, for tokens from `have` up to `limit`.

    A grant of a later epoch starts the frames anew at `have`; one of the same epoch only raises `limit` (more credit).
    """

    epoch: Epoch
    have: Tokens
    limit: Tokens


@dataclass(frozen=True, slots=True)
class Push(ToAttempt):
    """One frame follows on the link of `epoch`, after the frames announced before it."""

    epoch: Epoch
    index: Count
    """Frames of this attempt before it in this epoch."""
    first: Tokens
    tokens: Annotated[int, Number(1, 2**31)]
    nbytes: Annotated[int, Number(1, MAX_FRAME_BYTES)]
    layer: Count
    layers: Annotated[int, Number(1, 2**20)]
    """KV of layers [layer, layer + layers)."""


@dataclass(frozen=True, slots=True)
class Finish(ToAttempt):
    """The prompt is computed; `first_token` was sampled. `frames` and `nbytes` count this epoch's."""

    epoch: Epoch
    first_token: Tokens
    frames: Count
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Ack(ToAttempt):
    """Every frame has verified and the receiver owns the KV."""

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
    """Sign of life: the speaker still has these attempts."""

    keys: Keys


Message = Hello | Refuse | Dial | Meet | CloseLink | Offer | Wait | Grant | Push | Finish | Ack | Nack | Abort | Renew


class _Form:
    """How one class of message is written: its name and the rule of each field."""

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
    """A frame of 1 to MAX_MESSAGES messages.

    Raises:
        WireError: a field is out of its limits, or there is too much for a frame; a defect of the caller's.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise WireError(f"{len(messages)} messages in a frame; allowed: 1 to {MAX_MESSAGES}")
    first, *more = in_frames(messages)
    if more:
        raise WireError(f"{len(messages)} messages that don't fit into one frame")
    return first


def in_frames(messages: Iterable[Message]) -> Iterator[bytes]:
    """`messages`, in order, in as few frames as they fit into.

    Raises:
        WireError: a field is out of its limits; a defect of the caller's.
    """
    parts: list[bytes] = []
    size = values = 0
    for message in messages:
        plain = _FORMS[type(message).__name__].write(message)
        part, more = pack(plain), 1 + values_in(plain)
        room = len(parts) < MAX_MESSAGES and size + len(part) < MAX_CONTROL_BYTES - 8 and values + more < MAX_VALUES
        if parts and not room:
            yield pack_joined(parts)
            parts, size, values = [], 0, 0
        parts.append(part)
        size += len(part)
        values += more
    if parts:
        yield pack_joined(parts)


def decode(frame: bytes) -> list[Message]:
    """The messages of one frame, in order.

    Raises:
        WireError: they aren't exactly what `encode` makes.
    """
    if len(frame) > MAX_CONTROL_BYTES:
        raise WireError(f"frame of {len(frame)} bytes; allowed: up to {MAX_CONTROL_BYTES}")
    items = unpack(frame, max(MAX_MESSAGES, MAX_KEYS))
    if type(items) is not list or not 1 <= len(items) <= MAX_MESSAGES:
        raise WireError(f"a frame is an array of 1 to {MAX_MESSAGES} messages, not {shown(items)}")
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
    """
    Raises:
        WireError: no message can carry `key`.
    """
    KeyRule().check("request", list(key))
