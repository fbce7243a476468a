"""What the two ends of a hand-off ask of the workers they serve."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvrelay.transfer.control import TransferStats
from kvrelay.transfer.events import Hold
from kvrelay.transfer.messages import Code, Key


class ExportHost(Protocol):
    """The prefill worker, as its exporter sees it. All of it is called on the event loop."""

    def release(self, hold: Hold) -> None:
        """Nobody needs the hold any more: release it, on the thread that owns the block pool."""

    def exported(self, key: Key, stats: TransferStats) -> None:
        """The decode worker has the KV."""

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        """The hand-off did not happen, or its end isn't known: the decode worker's word on that counts."""


class BlockHold(Protocol):
    """What keeps the reserved blocks alive."""

    @property
    def blocks(self) -> Sequence[int]:
        """The block table, from the first token on."""


class Reservation(Protocol):
    """Blocks for all tokens of an attempt."""

    @property
    def hold(self) -> BlockHold: ...

    @property
    def have_tokens(self) -> int:
        """Tokens whose KV is there already: whole blocks, or all of the tokens."""


ReservationT = TypeVar("ReservationT", bound=Reservation)


class ImportHost(Protocol[ReservationT]):
    """The decode worker, as its importer sees it. All of it is called on the event loop."""

    async def reserve(self, key: Key) -> ReservationT | None:
        """Reserves blocks for the attempt's tokens; None where there is no room now."""

    def release(self, reservation: ReservationT) -> None:
        """Nobody needs the reservation any more: release it, on the thread that owns the block pool."""

    def imported(self, key: Key, reservation: ReservationT, first_token: int, stats: TransferStats) -> None:
        """The KV of all tokens is in the reservation's blocks; the reservation is the host's from here on."""

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        """The hand-off of an expected attempt did not happen."""
