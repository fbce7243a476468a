"""The interface between models, runners and attention backends.

A runner calls `Attention.plan` once a step, then the model calls `run` once per layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.kv.pool import KVPool
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


class LayerKV(NamedTuple):
    """Where a layer's KV is, and how much of it a token sees."""

    pool: KVPool
    layer: int
    """Index among the layers of the pool."""
    window: int
    """Number of tokens that a token sees, itself included; 0 for all."""


def layers_of(pools: Sequence[KVPool], windows: Sequence[int]) -> list[LayerKV]:
    """Where the KV of each layer of a model is.

    Args:
        pools: one of all layers, or one of each window, in ascending order, as `ModelConfig.cache_layout` has them.
        windows: of each layer; see `Traits`.
    """
    if len(pools) == 1:
        return [LayerKV(pools[0], layer, window) for layer, window in enumerate(windows)]
    of_window = dict(zip(sorted(set(windows)), pools, strict=True))
    counts = dict.fromkeys(of_window, 0)
    found = []
    for window in windows:
        found.append(LayerKV(of_window[window], counts[window], window))
        counts[window] += 1
    return found


class Places(NamedTuple):
    """Where the tokens of a step lie in one group of layers."""

    slots: Tensor
    """int64 [T] where each token's KV goes: block * block_size + position in the block; -1 keeps no KV."""
    block_tables: Tensor
    """int32 [R, W] pool block of each logical block."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Where the tokens of one step lie: R rows, T tokens. Tensors are on the pool's device, arrays on the host.

    A padding row, which fills a batch up to the size of a captured graph, has the start -1 and one token. Tokens past
    those of the rows are padding, too.
    """

    positions: Tensor
    """int64 [T] position of each token in its sequence."""
    slots: Tensor
    """As in `Places`, of the first group."""
    block_tables: Tensor
    """As in `Places`, of the first group."""
    contexts: Tensor
    """int32 [R] tokens of each row's sequence, including this step's; 0 for a padding row."""
    starts: NDArray[np.int64]
    """[R] tokens of each row's sequence that were computed before."""
    lengths: NDArray[np.int64]
    """[R] tokens of each row in this step."""
    windows: Mapping[int, Places] = field(default_factory=dict)
    """Places in the groups behind the first, by their windows."""

    @classmethod
    def from_plan(
        cls, plan: StepPlan, block_size: int, device: torch.device = CPU, windows: Sequence[int] = ()
    ) -> "AttentionInputs":
        """The inputs of a step, whose copies to the device are queued; shares no memory with the plan.

        Args:
            windows: of the groups behind the first, whose tables are the plan's `side_tables`.
        """
        positions, rows = token_rows(plan)
        first, *sides = (
            Places(
                to_device(slots_in(table, positions, rows, block_size), device),
                to_device(table.copy(), device),
            )
            for table in (plan.block_tables, *plan.side_tables)
        )
        return cls(
            positions=to_device(positions, device),
            slots=first.slots,
            block_tables=first.block_tables,
            contexts=to_device(plan.starts + plan.lengths, device),
            starts=plan.starts.astype(np.int64),
            lengths=plan.lengths.astype(np.int64),
            windows=dict(zip(windows, sides, strict=True)),
        )

    def of(self, window: int) -> Places:
        """Places in the group of layers with this window; they are in the first one unless there is one for it."""
        found = self.windows.get(window) if self.windows else None
        return Places(self.slots, self.block_tables) if found is None else found


def token_rows(plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [T] position of each token in its sequence, and [T] its row."""
    row_of = np.arange(plan.num_rows)
    positions = plan.starts.astype(np.int64)
    if plan.num_tokens > plan.num_rows:
        lengths = plan.lengths.astype(np.int64)
        first = np.cumsum(lengths) - lengths
        row_of = np.repeat(row_of, lengths)
        positions = np.arange(len(row_of)) + (positions - first)[row_of]
    return positions, row_of


def slots_in(
    table: NDArray[np.int32], positions: NDArray[np.int64], rows: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """int64 [T] slot of each token, as in `Places`.

    Args:
        table: [R, W] block tables of a group.
        positions, rows: of `token_rows`.
    """
    blocks = table[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


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
