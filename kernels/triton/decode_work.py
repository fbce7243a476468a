"""The work list that says which program of a decode step attends to which keys: the host plans it, and it has a fixed
place on the device.

The keys of all rows, one row after the other, are cut into equal shares, one for each of P programs a KV head. A share
may end within a row, whose parts are added up by the program that is done last, and may have several rows:

    rows       |---- 0 ----|-- 1 --|- 2 -|-------------- 3 ---------------|
    shares     |-- 0 --|-- 1 ---|-- 2 ---|---- 3 ---|---- 4 ---|---- 5 ---|
    entries    |---0---|-1-|-2--|3-|--4--|----5-----|----6-----|----7-----|
    parts      |   0   | 1 | 2  |3 |     |    4     |    5     |    6     |
    of a row   row 0: parts 0 to 1, row 1: parts 2 to 3, row 3: parts 4 to 6

A cut close to the end of a row is moved there. So the shares of P programs are as long as each other, or up to a
quarter longer or shorter, whatever the lengths of the rows are.

Sizes depend on R and P only, and so do a launch and a captured CUDA graph: programs without work end at once.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP = 64
"""Number of keys of a step; cuts are multiples of it."""
MIN_STEPS = 4
"""Fewest steps of a share, if there are several: a smaller share costs more to start than it saves."""
RESIDENT = 2
"""Number of programs wanted for each multiprocessor, so that the loads of one hide behind the arithmetic of the
other."""
ENTRY_FIELDS = 6
SNAP = 8
"""Divisor of a share that yields the distance from a row's end within which a cut moves to that end."""


class DecodeWork(NamedTuple):
    """A work list in fixed memory, for R rows and P programs a KV head at most."""

    entries: Tensor
    """int32 [R + P - 1, 6]: row, first key, end of the keys, part that the result goes to, the row's first part, number
    of the row's parts; -1, -1 and 0 if the row isn't cut. In the order of rows and keys."""
    starts: Tensor
    """int32 [P + 1]: entries starts[p] to starts[p + 1] are those of program p."""

    @classmethod
    def sizes(cls, rows: int, programs: int) -> tuple[int, int]:
        """int32 values that the tensors have."""
        return ENTRY_FIELDS * (rows + programs - 1), programs + 1

    @classmethod
    def view(cls, words: Tensor, rows: int, programs: int) -> "DecodeWork":
        """The work list that lies in `words`, int32 [sum(sizes(rows, programs))]; it has no work if they are 0."""
        entries, _ = cls.sizes(rows, programs)
        return cls(words[:entries].view(-1, ENTRY_FIELDS), words[entries:])


def count_programs(kv_heads: int, processors: int) -> int:
    """P, the programs for each KV head that fill a device of so many multiprocessors."""
    return max(1, RESIDENT * processors // kv_heads)


def plan_decode(contexts: NDArray[np.int64], window: int, work: DecodeWork) -> None:
    """Plans a step, for all layers with the same window.

    Args:
        contexts: [R] tokens of each row's sequence, the new one included; 0 for a row whose result is 0. R is 1 or
            more.
        window: keys that a query sees, itself included; 0 for all.
        work: in host memory.
    """
    programs = len(work.starts) - 1
    first = origin = np.zeros_like(contexts)
    if window:
        first = np.maximum(contexts - window, 0)
        origin = first // STEP * STEP
    # A row without keys is an entry too: its result is written.
    steps = np.maximum((contexts - origin + (STEP - 1)) // STEP, 1)
    row_ends = steps.cumsum()
    total = int(row_ends[-1])
    used = max(1, min(programs, total // MIN_STEPS))
    cuts = np.arange(total, total * used, total) // used
    row = row_ends.searchsorted(cuts)
    after = row_ends[row] - cuts
    before = steps[row] - after
    reach = total // (SNAP * used)
    back, forth = before <= reach, after <= reach
    within = ~(back | forth)
    cuts += np.where(back, -before, after * forth)
    parts = np.bincount(row[within], minlength=len(contexts))

    ends = np.concatenate((row_ends, cuts[within]))
    ends.sort()
    count = len(ends)
    row = row_ends.searchsorted(ends)
    begins = np.empty_like(ends)
    begins[0], begins[1:] = 0, ends[:-1]
    # From steps of all rows to keys of one.
    shift = (origin - (row_ends - steps) * STEP)[row]
    partial = parts[row] > 0
    entries = work.entries.numpy()[:count].T
    entries[0] = row
    entries[1] = np.maximum(begins * STEP + shift, first[row]) if window else begins * STEP + shift
    entries[2] = np.minimum(ends * STEP + shift, contexts[row])
    entries[3] = partial.cumsum() * partial - 1
    # A row that was cut in n places has n + 1 parts.
    sizes = parts + (parts > 0)
    entries[4] = np.where(partial, (sizes.cumsum() - sizes)[row], -1)
    entries[5] = sizes[row]
    starts = work.starts.numpy()
    starts[0] = 0
    starts[1:used] = ends.searchsorted(cuts) + 1
    starts[used:] = count


class DecodeParts(NamedTuple):
    """Results of the parts of rows that were cut: 2 (P - 1) at most, if each of P - 1 cuts is in another row."""

    sums: Tensor
    """float32 [2 (P - 1), H, D]: weighted sum of values."""
    weights: Tensor
    """float32 [2 (P - 1), H]: binary logarithm of the weight."""
    arrivals: Tensor
    """int32 [2 (P - 1), Hkv]: at a row's first part, how many of its parts are written. 0 between launches."""

    @classmethod
    def empty(cls, programs: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> "DecodeParts":
        """Empty parts for the work lists of so many programs a KV head."""
        count = 2 * (programs - 1)
        return cls(
            torch.empty(count, heads, dim, dtype=torch.float32, device=device),
            torch.empty(count, heads, dtype=torch.float32, device=device),
            torch.zeros(count, kv_heads, dtype=torch.int32, device=device),
        )
