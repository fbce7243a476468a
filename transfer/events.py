"""What the two machines of `kvrelay.transfer.protocol` are told (events) and ask for (actions): frozen values.

Messages of the other end are events too, and are told as they came off the wire.
"""

import enum
from dataclasses import dataclass
from typing import Any

from kvrelay.transfer.messages import Abort, Ack, Code, Finish, Grant, Message, Nack, Offer, Push, Wait

Hold = Any
"""What keeps blocks alive. The machines carry holds and reservations; they never look inside."""


class State(enum.Enum):
    """Where an attempt stands at one end. The module's docstring is the table."""

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
    """Bounds of every stay, in seconds."""

    lease: float = 5.0
    grant: float = 30.0
    prefill: float = 120.0
    transfer: float = 60.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is to be transferred, and how it is cut into frames."""

    tokens: int
    digest: bytes
    """Of the token ids."""
    token_bytes: int
    block_size: int
    frame_tokens: int
    """Tokens of one frame of all layers at most: whole blocks."""
    layers: int = 1

    def whole(self, token: int) -> bool:
        """Whether frames may begin or end at `token`."""
        return token == self.tokens or (0 <= token < self.tokens and token % self.block_size == 0)

    def bytes_of(self, tokens: int, layers: int) -> int:
        """KV bytes of so many tokens in so many layers."""
        return tokens * layers * (self.token_bytes // self.layers)


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [first, first + tokens) of an attempt in layers [layer, layer + layers), on the link of `epoch`."""

    epoch: int
    index: int
    first: int
    tokens: int
    nbytes: int
    layer: int = 0
    layers: int = 1


class Outcome(enum.Enum):
    """How a frame ended at the receiver."""

    VERIFIED = "verified"
    """Its bytes are in the reserved blocks and are those that the sender read."""
    CORRUPT = "corrupt"
    LOST = "lost"
    """It did not arrive, or was stopped."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Sender: KV of the first `tokens` tokens is computed; `hold` keeps the blocks that are new."""

    tokens: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """Sender: of the tokens that are not computed yet, all up to the prompt's end are in layers [0, layers).

    `hold` keeps their blocks; it comes with the first of these events.
    """

    layers: int
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Sender: KV of all tokens is computed and `first_token` was sampled; `hold` keeps the blocks."""

    first_token: int
    hold: Hold


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Sender: the link of this epoch carries nothing any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FrameEnded:
    """The link won't touch the blocks of this frame any more. The sender's machine doesn't look at `outcome`."""

    frame: Frame
    outcome: Outcome = Outcome.VERIFIED


@dataclass(frozen=True, slots=True)
class Expected:
    """Receiver: the router announced the attempt, and its tokens hash to `digest`."""

    shape: Manifest


@dataclass(frozen=True, slots=True)
class Reserved:
    """Receiver: the answer to Reserve; None where there is no room. `have` tokens need not be transferred."""

    reservation: Hold | None
    have: int = 0


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Receiver: blocks may be free now."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Receiver: the link of this epoch is the one to use."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A sign of life of this attempt from the other end."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The other worker, or the way to it, is gone. It is told, in case it hears."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """This end doesn't want it any more."""


SendEvent = (
    Computed
    | LayersComputed
    | Finished
    | LinkLost
    | FrameEnded
    | Renewed
    | PeerLost
    | Cancel
    | Wait
    | Grant
    | Ack
    | Nack
)
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
    """Tell `message` once the frames asked for before it are announced; not at all where their link ends first."""

    message: Finish


@dataclass(frozen=True, slots=True)
class ReceiveFrame:
    """Receive and verify the announced frame, then write it to the reservation's blocks. FrameEnded follows."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class StopFrames:
    """Don't touch the blocks of these frames if that has not begun. FrameEnded still follows for each."""

    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    """The hold (or reservation) has no owner any more: release it."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class Reserve:
    """Try to reserve blocks. Reserved follows."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Receiver: the KV is complete and verified. The reservation is the taker's from here on."""

    reservation: Hold
    first_token: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Sender: the receiver has the KV."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off did not happen. Not said after a Cancel of this end."""

    code: Code
    message: str


SendAction = Tell | SendFrame | SendFinish | StopFrames | ReleaseHold | Committed | Failed
ReceiveAction = Tell | Reserve | ReceiveFrame | StopFrames | ReleaseHold | Commit | Failed
