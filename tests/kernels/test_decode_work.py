"""The work list of decode attention has every key once, in equal shares, and fits the memory of a captured graph."""

from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_kv import make_work

from kvrelay.kernels.triton.decode_work import (
    MIN_STEPS,
    RESIDENT,
    STEP,
    DecodeParts,
    DecodeWork,
    count_programs,
    plan_decode,
)

CONTEXTS = st.lists(st.integers(0, 40_000), min_size=1, max_size=64)


def plan(contexts: list[int], programs: int, window: int = 0, spare: int = 0) -> DecodeWork:
    # What the step before has left must not matter.
    work = make_work(len(contexts) + spare, programs, fill=77)
    plan_decode(np.array(contexts), window, work)
    return work


def shares(work: DecodeWork) -> list[int]:
    """Steps of each program that has any."""
    first, end = work.entries.numpy().T[1:3]
    steps = np.maximum(-(-end // STEP) - first // STEP, 1)
    starts = work.starts.tolist()
    return [int(steps[a:b].sum()) for a, b in pairwise(starts) if b > a]


@given(contexts=CONTEXTS, programs=st.integers(1, 300), window=st.integers(0, 5000), spare=st.integers(0, 3))
def test_every_key_is_in_one_entry_of_one_program(contexts: list[int], programs: int, window: int, spare: int) -> None:
    work = plan(contexts, programs, window, spare)
    starts = work.starts.tolist()
    assert starts[0] == 0
    assert all(a <= b for a, b in pairwise(starts))
    reached = [max(context - window, 0) if window else 0 for context in contexts]
    seen_rows = set()
    for row, first, end, *_ in work.entries[: starts[-1]].tolist():
        assert first == reached[row]
        assert end % STEP == 0 or end == contexts[row]
        assert end > first or contexts[row] == 0
        reached[row] = end
        seen_rows.add(row)
    assert reached == contexts
    # Also of rows without keys, whose results are 0.
    assert seen_rows == set(range(len(contexts)))


@given(contexts=CONTEXTS, programs=st.integers(1, 300), window=st.integers(0, 5000))
def test_parts_are_those_of_the_rows_that_are_cut_and_fit(contexts: list[int], programs: int, window: int) -> None:
    work = plan(contexts, programs, window)
    entries = work.entries[: int(work.starts[-1])].tolist()
    used = []
    for _, of_row in groupby(entries, itemgetter(0)):
        parts, firsts, counts = zip(*(entry[3:] for entry in of_row), strict=True)
        assert len(parts) <= programs
        if len(parts) == 1:
            assert (parts, firsts, counts) == ((-1,), (-1,), (0,))
            continue
        assert parts == tuple(range(firsts[0], firsts[0] + counts[0]))
        assert set(firsts) == {parts[0]}
        assert set(counts) == {len(parts)}
        used += parts
    assert used == list(range(len(used)))
    assert len(used) <= len(DecodeParts.empty(programs, 1, 1, 16, torch.device("cpu")).weights)


@given(contexts=CONTEXTS, programs=st.integers(1, 300), window=st.integers(0, 5000))
def test_shares_are_about_equal_and_none_is_tiny(contexts: list[int], programs: int, window: int) -> None:
    steps = shares(plan(contexts, programs, window))
    mean = sum(steps) / len(steps)
    assert max(steps) <= 1.25 * mean + 1
    assert len(steps) == 1 or min(steps) >= MIN_STEPS // 2
    assert len(steps) == max(1, min(programs, sum(steps) // MIN_STEPS))


@pytest.mark.parametrize(("rows", "context"), [(16, 4096), (64, 4096), (256, 1024), (1, 131_072)])
def test_equal_rows_are_cut_only_where_programs_are_left(rows: int, context: int) -> None:
    programs = count_programs(kv_heads=8, processors=132)
    work = plan([context] * rows, programs)
    steps = shares(work)
    assert len(steps) == programs
    assert max(steps) <= 1.3 * sum(steps) / len(steps)
    if rows > 4 * programs:
        assert not work.entries[: work.starts[-1], 5].any()


@given(
    contexts=CONTEXTS, others=CONTEXTS, programs=st.integers(1, 300), windows=st.tuples(st.integers(0), st.integers(0))
)
def test_a_work_list_has_the_same_place_whatever_it_says(
    contexts: list[int], others: list[int], programs: int, windows: tuple[int, int]
) -> None:
    work = make_work(max(len(contexts), len(others)), programs)
    plan_decode(np.array(contexts), windows[0] % 2**31, work)
    plan_decode(np.array(others), windows[1] % 2**31, work)
    fresh = plan(others, programs, windows[1] % 2**31)
    count = int(fresh.starts[-1])
    assert torch.equal(work.starts, fresh.starts)
    assert torch.equal(work.entries[:count], fresh.entries[:count])


@given(kv_heads=st.integers(1, 400), processors=st.integers(1, 160))
def test_programs_fill_the_device_once(kv_heads: int, processors: int) -> None:
    programs = count_programs(kv_heads, processors)
    assert programs >= 1
    assert programs * kv_heads <= max(RESIDENT * processors, kv_heads)
    assert (programs + 1) * kv_heads > RESIDENT * processors
