"""The seam between models, runners and attention backends.

A runner calls `Attention.plan` once a step, then the model calls `run` once per layer.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import StepPlan

CPU = torch.device("cpu")


class HeadNorm(NamedTuple):
    """RMS norm of each head's query and key, applied before the rotation."""

    weight: Tensor
    """[H + Hkv, D]: one row per query head, then one per key head."""
    eps: float


class Rotation(NamedTuple):
    """The angles of a step's tokens, as `kernels.reference.rope` takes them; the same in every layer."""

    cos: Tensor
    """float32 [T, 1, D]."""
    sin: Tensor
    """float32 [T, 1, D], its first half negated."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Where the tokens of one step lie: R rows, T tokens. Tensors are on the pool's device, arrays on the host.

    A padding row, which fills a batch up to the size of a captured graph, has the start -1 and one token. Tokens past
    those of the rows are padding, too.
    """

    positions: Tensor
    """int64 [T] position of each token in its sequence."""
    slots: Tensor
    """int64 [T] where each token's KV goes: block * block_size + position in the block; -1 keeps no KV."""
    block_tables: Tensor
    """int32 [R, W] pool block of each logical block."""
    contexts: Tensor
    """int32 [R] tokens of each row's sequence, including this step's; 0 for a padding row."""
    starts: NDArray[np.int64]
    """[R] tokens of each row's sequence that were computed before."""
    lengths: NDArray[np.int64]
    """[R] tokens of each row in this step."""

    @classmethod
    def from_plan(cls, plan: StepPlan, block_size: int, device: torch.device = CPU) -> "AttentionInputs":
        """The inputs of a step, whose copies to the device are queued; shares no memory with the plan."""
        positions, slots = token_places(plan, block_size)
        return cls(
            positions=to_device(positions, device),
            slots=to_device(slots, device),
            block_tables=to_device(plan.block_tables.copy(), device),
            contexts=to_device(plan.starts + plan.lengths, device),
            starts=plan.starts.astype(np.int64),
            lengths=plan.lengths.astype(np.int64),
        )


def token_places(plan: StepPlan, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [T] position and int64 [T] slot of each token, as in `AttentionInputs`."""
    row_of = np.arange(plan.num_rows)
    positions = plan.starts.astype(np.int64)
    if plan.num_tokens > plan.num_rows:
        lengths = plan.lengths.astype(np.int64)
        first = np.cumsum(lengths) - lengths
        row_of = np.repeat(row_of, lengths)
        positions = np.arange(len(row_of)) + (positions - first)[row_of]
    blocks = plan.block_tables[row_of, positions // block_size].astype(np.int64)
    return positions, blocks * block_size + positions % block_size


def to_device(array: NDArray[np.integer], device: torch.device) -> Tensor:
    """Queues a copy to the device; the array itself on the CPU."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory uses it again when the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


class Attention(Protocol):
    """Attention over paged KV."""

    def plan(self, inputs: AttentionInputs) -> None:
        """Prepares a step: which KV each of its tokens sees, in all layers."""
        ...

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values into the pool, then attends.

        It is one call so that a backend can fuse the work that comes before attention.

        Args:
            qkv: [T, H + 2 Hkv, D], the projection's output: all queries, then all keys, then all values. May be
                overwritten.

        Returns:
            [T, H * D].
        """
        ...
