"""Events and actions of the two state machines of `kvrelay.transfer.protocol.table`, as frozen values.

A message of the other end is an event too, exactly as it was decoded.
"""

import enum
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvrelay.engine.kv.layout import ALL_LAYERS, LayerPart
from kvrelay.transfer.protocol.messages import Abort, Ack, Code, Finish, Grant, Message, Nack, Offer, Push, Wait

Hold = Any
"""Keeps blocks allocated. The machines pass holds and reservations on; they never look inside."""


class State(enum.Enum):
    """State of an attempt at one end; `kvrelay.transfer.protocol.table` has the table of transitions."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    EXPORTED = "exported"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __init__(self, name: str) -> None:
        self.over = name in ("committed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds of the states of an attempt, in seconds; `transfer/protocol/table.py` says which holds where."""

    lease: float = 5.0
    """Seconds without any message of the other end."""
    grant: float = 30.0
    prefill: float = 120.0
    transfer: float = 60.0


@dataclass(frozen=True, slots=True)
class Track:
    """The part of an attempt that goes one route (`kvrelay.transfer.protocol.routes`), and how it is cut into frames.
    Between workers of one rank that is one track of the model (`kvrelay.engine.kv.layout`)."""

    tokens: int
    """The end of the tokens whose KV is handed over; 1 for a state."""
    token_bytes: int
    block_size: int
    frame_tokens: int
    """Largest number of tokens of one frame: a multiple of `block_size`."""
    layers: int = 1
    parts: int = 1
    """Number of frames, by layers, in which the same tokens are sent; more than one only if a block is too large for a
    frame."""
    first: int = 0
    """The first token whose KV is handed over: a block's border."""
    late: bool = False
    """Whether it is complete only when the whole prompt is computed, as a state is."""
    link: int = 0
    """Index of the link that its frames take, among those of the epoch."""

    def is_border(self, token: int) -> bool:
        """Whether a frame may begin or end at `token`: at a block border, or at the end."""
        return token == self.tokens or (self.first <= token < self.tokens and token % self.block_size == 0)

    def nbytes(self, tokens: int, part: LayerPart = ALL_LAYERS) -> int:
        """KV bytes of so many tokens."""
        return tokens * self.token_bytes // self.layers * len(part.layers(self.layers))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of one attempt, and how it is cut into frames."""

    tokens: int
    digest: bytes
    """Digest of the prompt, by `tokens_digest`."""
    tracks: tuple[Track, ...]
    """One for each route."""
    state_bytes: int = 0
    """Bytes of a token's hidden states; 0 if none are handed over."""
    state_tokens: int = 0
    """Largest number of tokens whose hidden states one frame carries."""

    def nbytes(self, have: Sequence[int]) -> int:
        """KV bytes that are to be handed over where the receiver has those before the tokens `have`, by track."""
        pairs = zip(self.tracks, have, strict=True)
        return sum(track.nbytes(track.tokens - max(track.first, first)) for track, first in pairs)


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes (xxh3) that are equal for equal token ids."""
    return xxhash.xxh3_128_digest(array("I", tokens).tobytes() + struct.pack("<Q", len(tokens)))


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [first, first + tokens) of an attempt, sent over a link of `epoch`: their KV, in some or all layers, or
    their hidden states, which take the first link.
    """

    epoch: int
    index: int
    """Number of frames of this attempt before this one on its link."""
    first: int
    tokens: int
    nbytes: int
    part: LayerPart = ALL_LAYERS
    states: bool = False
    track: int = 0
    """Index of the manifest's track that the KV is of, and so of its route."""


class Outcome(enum.Enum):
    """How a frame ended at the receiver."""

    VERIFIED = "verified"
    """The frame's bytes are in the reserved blocks, and the checksum says that they are those that the sender read."""
    CORRUPT = "corrupt"
    LOST = "lost"
    """The frame did not arrive, or was stopped."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Sender: KV of the first `tokens` tokens is computed, or a launched step computes it, and a link waits for that
    step. `hold` keeps the blocks that are new.
    """

    tokens: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class Finished:
    """Sender: KV of all tokens is computed and `first_token` was sampled; `hold` keeps the blocks."""

    first_token: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Sender: the links of this epoch carry nothing any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FrameEnded:
    """The link no longer touches the blocks of this frame. The sender's machine ignores `outcome`."""

    frame: Frame
    outcome: Outcome = Outcome.VERIFIED


@dataclass(frozen=True, slots=True)
class Expected:
    """Receiver: the router announced the attempt with this manifest."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Reserved:
    """Receiver: the answer to Reserve; None where no blocks are free. Of each track, the tokens before those in `have`
    need not be transferred, and hidden states are wanted of the tokens from `states` on.
    """

    reservation: Hold | None
    have: tuple[int, ...] = ()
    states: int = 0


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Receiver: blocks may be free now."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Receiver: the links of this epoch are those to use."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The other end says that it still has this attempt."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The other worker, or the connection to it, is lost. The machine still tells it, in case the message arrives."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """This end no longer wants the hand-off, for the reason that the other end is told."""

    code: Code = Code.CANCELLED
    message: str = "cancelled"


SendEvent = Computed | Finished | LinkLost | FrameEnded | Renewed | PeerLost | Cancel | Wait | Grant | Ack | Nack
ReceiveEvent = (
    Expected
    | Offer
    | Reserved
    | BlocksFreed
    | LinkUp
    | FrameEnded
    | Renewed
    | PeerLost
    | Cancel
    | Push
    | Finish
    | Abort
)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this message to the other end."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Read the frame's bytes, announce and send them. FrameEnded follows, whatever happens."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class SendFinish:
    """Send `message` after the announcements of all earlier frames; never, if their link ends first."""

    message: Finish


@dataclass(frozen=True, slots=True)
class ReceiveFrame:
    """Receive and verify the announced frame, then write it to the reservation's blocks. FrameEnded follows."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class StopFrames:
    """Don't start to touch the blocks of these frames. FrameEnded still follows for each."""

    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    """The machine gives the hold (or reservation) up: release it."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class Reserve:
    """Try to reserve blocks. Reserved follows."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Receiver: the KV is complete and verified. Whoever performs this action owns the reservation from here on."""

    reservation: Hold
    first_token: int
    states: int | None = None
    """First token whose hidden states are there, as are those of all tokens behind it; None if none are."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Sender: the receiver has the KV."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off failed. Never reported after this end's own Cancel."""

    code: Code
    message: str


SendAction = Tell | SendFrame | SendFinish | StopFrames | ReleaseHold | Committed | Failed
ReceiveAction = Tell | Reserve | ReceiveFrame | StopFrames | ReleaseHold | Commit | Failed
