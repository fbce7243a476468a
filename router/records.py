"""What is known of a request when it is over: for the client's last message, for metrics, for the log."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.internal.v1.worker_pb2 import DecodeReport, PrefillReport, TransferReport
from kvrelay.v1.inference_pb2 import Timeline

Outcome = Literal["stop", "length", "cancelled", "invalid", "exhausted", "unavailable", "deadline", "internal"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that is over. Seconds; None for what it never came to."""

    request_id: str
    outcome: Outcome
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    ttft_seconds: float | None = None
    """Received to first token sent."""
    tpot_seconds: float | None = None
    """Between two tokens, on average after the first."""
    total_seconds: float = 0.0
    route_seconds: float = 0.0
    router_queue_seconds: float = 0.0
    """Of `route_seconds`, waited for room on a decode worker."""
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    transfer_seconds: float | None = None
    handoff_seconds: float | None = None
    transfer_bytes: int = 0
    decode_queue_seconds: float | None = None
    recomputed_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""


Observer = Callable[[RequestRecord], None]


@dataclass(slots=True)
class RequestTrace:
    """Timestamps on the router's monotonic clock, and the workers' reports, as a request goes on."""

    received: float
    router_queue_seconds: float = 0.0
    submitted: float | None = None
    first_sent: float | None = None
    last_sent: float | None = None
    retries: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill: PrefillReport | None = None
    """Of the attempt that yielded the first token."""
    transfers: dict[int, TransferReport] = field(default_factory=dict)
    """By attempt."""
    decode: DecodeReport | None = None
    """The latest."""

    @property
    def transfer_bytes(self) -> int:
        return sum(transfer.transfer_bytes for transfer in self.transfers.values())

    @property
    def last_transfer(self) -> TransferReport | None:
        return self.transfers[max(self.transfers)] if self.transfers else None

    def timeline(self, now: float) -> Timeline:
        """For the client; a part that never was is 0."""
        first = now if self.first_sent is None else self.first_sent
        timeline = Timeline(
            route_seconds=(now if self.submitted is None else self.submitted) - self.received,
            first_token_seconds=first - self.received,
            decode_seconds=(first if self.last_sent is None else self.last_sent) - first,
            total_seconds=now - self.received,
            transfer_bytes=self.transfer_bytes,
            retries=self.retries,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
        )
        if self.prefill is not None:
            timeline.queue_seconds = self.prefill.queue_seconds
            timeline.prefill_seconds = self.prefill.prefill_seconds
        transfer = self.last_transfer
        if transfer is not None:
            timeline.transfer_seconds = transfer.transfer_seconds
            timeline.handoff_seconds = transfer.handoff_seconds
        if self.decode is not None:
            timeline.decode_queue_seconds = self.decode.queue_seconds
        return timeline

    def record(
        self, request_id: str, outcome: Outcome, prompt_tokens: int, completion_tokens: int, now: float
    ) -> RequestRecord:
        """For the observer and the log."""
        tpot = None
        if self.first_sent is not None and self.last_sent is not None and completion_tokens > 1:
            tpot = (self.last_sent - self.first_sent) / (completion_tokens - 1)
        transfer = self.last_transfer
        return RequestRecord(
            request_id=request_id,
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=0 if self.prefill is None else min(self.prefill.cached_tokens, prompt_tokens),
            retries=self.retries,
            ttft_seconds=None if self.first_sent is None else self.first_sent - self.received,
            tpot_seconds=tpot,
            total_seconds=now - self.received,
            route_seconds=(now if self.submitted is None else self.submitted) - self.received,
            router_queue_seconds=self.router_queue_seconds,
            queue_seconds=None if self.prefill is None else self.prefill.queue_seconds,
            prefill_seconds=None if self.prefill is None else self.prefill.prefill_seconds,
            transfer_seconds=None if transfer is None else transfer.transfer_seconds,
            handoff_seconds=None if transfer is None else transfer.handoff_seconds,
            transfer_bytes=self.transfer_bytes,
            decode_queue_seconds=None if self.decode is None else self.decode.queue_seconds,
            recomputed_tokens=0 if self.decode is None else self.decode.recomputed_tokens,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
        )
