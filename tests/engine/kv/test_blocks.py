"""Blocks are free, cached or held, never two of these, and only holds keep them alive."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a model that only knows which holds and which index entries there are."""

    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.holds: list[Hold] = []
        self.known: set[int] = set()
        self.pool.on_evict = self.known.remove

    @property
    def referenced(self) -> set[int]:
        return {block for hold in self.holds for block in hold.blocks}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        before, available = self.referenced, self.pool.available
        hold = self.pool.allocate(count, "test")
        assert (hold is None) == (count > available)
        if hold is not None:
            assert len(set(hold.blocks)) == count
            assert not before & set(hold.blocks)
            self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), count=st.integers(0, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        before, blocks, available = self.referenced, list(hold.blocks), self.pool.available
        assert hold.extend(count) == (count <= available)
        assert hold.blocks[: len(blocks)] == blocks
        assert not before & set(hold.blocks[len(blocks) :])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        alive = sorted(self.referenced | self.known)
        blocks = data.draw(st.lists(st.sampled_from(alive), unique=True) if alive else st.just([]))
        self.holds.append(self.pool.share(blocks, "test"))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ended = data.draw(st.lists(st.sampled_from(self.holds), min_size=1, max_size=3, unique=True))
        available = self.pool.available + self.pool.only_in(ended)
        for hold in ended:
            self.holds.remove(hold)
            hold.release()
            hold.release()
            assert hold.blocks == []
        assert self.pool.available == available

    @precondition(lambda self: self.holds and self.known - self.referenced)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.known - self.referenced)))
        self.known.remove(block)
        data.draw(st.sampled_from(self.holds)).take_over(block)

    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        unknown = sorted(self.referenced - self.known)
        if unknown:
            block = data.draw(st.sampled_from(unknown))
            self.pool.remember(block)
            self.known.add(block)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.known)))
        self.known.remove(block)
        self.pool.forget(block)

    @invariant()
    def counts_are_explained(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.held == len(self.referenced)
            assert self.pool.cached == len(self.known - self.referenced)
            assert self.pool.free == self.pool.total - self.pool.held - self.pool.cached
            assert self.pool.indexed == self.known


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def cache(pool: BlockPool, count: int) -> list[int]:
    """Blocks that nobody holds and the index knows, of one hold."""
    hold = pool.allocate(count, "past")
    blocks = list(hold.blocks)
    for block in blocks:
        pool.remember(block)
    hold.release()
    return blocks


def test_the_tail_of_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(6)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    first, second = cache(pool, 3), cache(pool, 3)
    pool.share(first, "touch").release()
    pool.allocate(4, "new")
    assert evicted == [*reversed(second), first[-1]]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    kept = cache(pool, 2)
    hold = pool.allocate(2, "new")
    assert not set(kept) & set(hold.blocks)
    assert (pool.free, pool.cached, pool.held) == (0, 2, 2)


def test_misuse_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
    pool = BlockPool(3)
    hold = pool.allocate(1, "owner")
    stray = next(block for block in range(3) if block not in hold.blocks)
    with pytest.raises(IntegrityError, match=rf"'thief' .*\[{stray}\]"):
        pool.share([hold.blocks[0], stray], "thief")
    pool.check_integrity()
    assert pool.owners() == {"owner": 1}
    hold.release()
    with pytest.raises(IntegrityError, match="owner"):
        hold.extend(1)


DAMAGES: dict[str, Callable[[BlockPool, Hold], object]] = {
    "a lost block": lambda pool, hold: hold.blocks.pop(),
    "a missing reference": lambda pool, hold: pool.share(hold.blocks, "other").blocks.pop(),
    "a free block in a hold": lambda pool, hold: hold.blocks.__setitem__(0, max(hold.blocks) + 1),
    "a block twice in a hold": lambda pool, hold: hold.blocks.append(hold.blocks[0]),
    "a cached block that nobody knows": lambda pool, hold: pool.indexed.difference_update(cache(pool, 1)),
    "a free block in the index": lambda pool, hold: pool.indexed.add(max(hold.blocks) + 1),
}
"""Ways to break the bookkeeping from within, as only a mistake in the pool itself could."""


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_every_kind_of_damage_is_named(damage: Callable[[BlockPool, Hold], object]) -> None:
    pool = BlockPool(5)
    hold = pool.allocate(2, "victim")
    pool.check_integrity()
    damage(pool, hold)
    with pytest.raises(IntegrityError, match=r"block \d|victim"):
        pool.check_integrity()
