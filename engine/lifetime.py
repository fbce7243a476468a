"""The timestamps of one request on one worker, from which every latency metric is derived."""

import time
from dataclasses import dataclass, field

now = time.monotonic


@dataclass(slots=True)
class Lifetime:
    """Seconds on this machine's monotonic clock; None before the event. Never compared across machines.

    submitted -> scheduled -> first_token -> finished
    submitted -> committed -> scheduled ...               (if the KV came from another worker)
    """

    submitted: float = field(default_factory=now)
    scheduled: float | None = None
    first_token: float | None = None
    committed: float | None = None
    finished: float | None = None

    @staticmethod
    def between(start: float | None, end: float | None) -> float:
        """Seconds from `start` to `end`; 0 if one of them never happened."""
        return 0.0 if start is None or end is None else max(0.0, end - start)

    @property
    def queue_seconds(self) -> float:
        return self.between(self.submitted if self.committed is None else self.committed, self.scheduled)

    @property
    def prefill_seconds(self) -> float:
        return self.between(self.scheduled, self.first_token)
