"""By how many groups of layers a last chunk leaves: as few as pay, by what was measured."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.transfer.overlap import CHOICES, ComputeCost, LinkCost, Overlap, borders

MB = 1e6
small = st.floats(0, 1, allow_subnormal=False)


@pytest.mark.parametrize(("overhead", "rate"), [(0.0, 1e9), (2e-3, 3e9), (5e-4, 1e8)])
def test_the_line_through_what_frames_took_is_found(overhead: float, rate: float) -> None:
    rng, cost = random.Random(1), LinkCost()
    assert not cost.known
    for _ in range(200):
        nbytes = rng.randrange(1 << 16, 1 << 23)
        cost.observe(nbytes, (overhead + nbytes / rate) * rng.uniform(0.98, 1.02))
    found, per_byte = cost.fit()
    assert per_byte == pytest.approx(1 / rate, rel=0.05)
    assert found == pytest.approx(overhead, abs=2e-4 + 0.02 * (1 << 23) / rate)


def test_a_link_that_changes_is_learnt_anew() -> None:
    cost = LinkCost()
    for rate in (1e9, 1e8):
        for number in range(300):
            nbytes = 1 << (16 + number % 6)
            cost.observe(nbytes, nbytes / rate)
        assert cost.fit()[1] == pytest.approx(1 / rate, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 2**24), st.floats(0, 3)), max_size=40))
def test_no_cost_is_ever_negative(seen: list[tuple[int, float]]) -> None:
    cost, compute = LinkCost(), ComputeCost()
    for nbytes, seconds in seen:
        cost.observe(nbytes, seconds)
        compute.observe(nbytes, seconds)
    assert min(cost.fit()) >= 0
    assert (compute.per_token or 0) >= 0
    assert cost.known == bool(seen)


@given(small, st.integers(1, 2**30), small, st.floats(0, 1e-6), small)
def test_the_choice_is_never_worse_than_sending_the_chunk_whole(
    compute: float, nbytes: int, overhead: float, per_byte: float, contention: float
) -> None:
    overlap = Overlap(compute, nbytes, overhead, per_byte, contention)
    for layers in (1, 3, 30):
        groups = overlap.groups(layers)
        assert groups in CHOICES
        assert groups <= layers
        assert overlap.exposed(groups) <= overlap.exposed(1)


def test_groups_pay_where_the_link_is_slow_beside_the_frame_and_the_core_is_not_shared() -> None:
    def chosen(nbytes: float, contention: float = 0.5, compute: float = 0.4) -> int:
        return Overlap(compute, int(nbytes), 1e-3, 1 / 1e9, contention).groups(30)

    assert chosen(0.5 * MB) == 1, "half a millisecond of bytes does not pay for a frame that takes a millisecond"
    assert chosen(50 * MB) > 1
    assert chosen(50 * MB, 0) > chosen(50 * MB)
    assert chosen(50 * MB, 1) == 1, "what the link does on the only core can't be hidden behind that core's work"
    assert chosen(50 * MB, 0, compute=0.0) == 1, "there is nothing to hide behind"
    sizes = [chosen(each * MB) for each in (0.5, 1, 2, 5, 20, 100)]
    assert sizes == sorted(sizes)


def test_groups_cover_all_layers() -> None:
    assert borders(30, 1) == ()
    assert borders(30, 4) == (7, 15, 22)
    assert borders(3, 3) == (1, 2)
