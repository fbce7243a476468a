"""Interfaces that the `KVReceiver` calls: its worker, and the maker of its links' jobs. Tests simulate both."""

from collections.abc import Callable
from typing import Any, Protocol

from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.events import Outcome
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.ports import FrameTask
from kvrelay.transfer.protocol.routes import Route


class ReceiverHost(Protocol):
    """The decode worker, as its `KVReceiver` calls it on the event loop."""

    def reserve(self, key: Key, answer: Callable[[Any], None], *, passing: bool) -> None:
        """Tries to reserve blocks for the attempt's tokens.

        Calls `answer` exactly once, later, on the event loop: with the scheduler's `Reservation`; with None if no
        blocks are free now; or with an exception if this worker serves no attempt any more.

        Args:
            passing: whether earlier offers wait for blocks. It gets some only if that delays none of them for long.
        """

    def waits(self, key: Key) -> None:
        """Notes that the attempt waits for free blocks. May be called again."""

    def release(self, reservation: Any) -> None:
        """Releases a reservation that the receiver gives up, on the thread that owns the block pool."""

    def imported(self, key: Key, reservation: Any, first_token: int, stats: TransferStats, states: Any) -> None:
        """Takes over the reservation, whose blocks have the KV of all tokens.

        Args:
            states: [n, layers, hidden] hidden states of the last n tokens, in memory of `ReceiveJobs.make_states`;
                None if none came.
        """

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        """Notes that the hand-off of an expected attempt failed."""


class ReceiveJobs(Protocol):
    """Makes the jobs that receive frames into this worker's KV pool; `PoolFrames` does."""

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> Any: ...

    def make_states(self, layout: StatesLayout, tokens: int) -> Any:
        """Host memory for the hidden states of so many tokens, whose slices are views."""

    def drain(self, nbytes: int, route: Route) -> Any:
        """Receives and discards a frame on the route's link."""
