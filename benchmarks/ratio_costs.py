"""Durations of a worker's steps on GPUs, from measurements by others."""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 16
"""Tokens in a block of KV."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of a step on one worker, in seconds, and sizes of the worker."""

    prefill_fixed: float
    """Seconds of any prefill step."""
    prefill_token: float
    prefill_square: float
    """Seconds for each square of a prompt's tokens in the step."""
    decode_fixed: float
    decode_context: float
    """Seconds for each token of context."""
    decode_stream: float
    kv_tokens: int
    """Size of a worker's KV pool in tokens."""
    max_streams: int
    """Streams that one worker runs."""
    max_chunk: int = 512
    """Tokens in one step."""
    handoff: float = 0.05
    """Seconds from a prompt's last step to its stream on decode."""
    switch: float = 2.0
    """Seconds that a worker takes to change its role."""
    start: float = 20.0
    """Seconds until a new worker serves."""

    def prefill(self, lengths: Sequence[int]) -> float:
        """Seconds of a step with these chunks."""
        squares = sum(length * length for length in lengths)
        return self.prefill_fixed + self.prefill_token * sum(lengths) + self.prefill_square * squares

    def decode(self, streams: int, context: int) -> float:
        """Seconds of a step with so many streams, and tokens of all their contexts."""
        return self.decode_fixed + self.decode_context * context + self.decode_stream * streams


A100_OPT_66B = CostTable(
    # DistServe (OSDI 2024), simdistserve/estimators/profile_data at commit 82831f16, Apache-2.0: OPT-66B on two
    # A100-80GB, its own engine; decode with fewer than 95 streams; 11,600 tokens of KV.
    prefill_fixed=43.05881e-3,
    prefill_token=0.27422929e-3,
    prefill_square=2.2478e-8,
    decode_fixed=48.288015e-3,
    decode_context=0.94243e-6,
    decode_stream=0.1275502e-3,
    kv_tokens=11_600,
    max_streams=16,
)
A100_OPT_13B = CostTable(
    # The same source: OPT-13B on one A100-80GB, 66,144 tokens of KV.
    prefill_fixed=18.102546e-3,
    prefill_token=0.10191226e-3,
    prefill_square=7.122264e-9,
    decode_fixed=19.934703e-3,
    decode_context=0.62693565e-6,
    decode_stream=0.0385069774e-3,
    kv_tokens=66_144,
    max_streams=94,
)
