"""The prefix index finds the longest known beginning, of the same tenant only, and forgets from the tail. A partly
filled block has one owner who writes to it.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.kv.sides import SidePool
from support.hash_runner import STATE, window_of

SIZE = 4
# Few different tokens and lengths around block borders, so that beginnings are often alike.
token_lists = st.lists(st.integers(0, 1), max_size=5 * SIZE).map(tuple)
tenants = st.sampled_from(["", "a", "b"])


def match(index: PrefixIndex, tokens: tuple[int, ...], tenant: str, limit: int) -> Hold:
    """A hold of the longest known prefix."""
    chain: list[bytes] = []
    return index.allocate(tokens, tenant, chain, len(index.find(tokens, tenant, limit, chain)), limit)


def publish(pool: BlockPool, index: PrefixIndex, tokens: tuple[int, ...], tenant: str, first: int = 0) -> Hold:
    """Does what a scheduler does for one prompt: match, compute the rest, publish, after the first tokens and at the
    end. The hold is still alive."""
    hold = match(index, tokens, tenant, len(tokens))
    assert hold.extend(-(-len(tokens) // SIZE) - len(hold.blocks))
    for computed in (min(first, len(tokens)), len(tokens)):
        index.publish(tokens, tenant, hold, computed)
    return hold


@settings(max_examples=80, deadline=None)
@given(
    past=st.lists(st.tuples(token_lists, tenants, st.integers(0, 5 * SIZE), st.booleans()), max_size=8),
    tokens=token_lists,
    tenant=tenants,
    limit=st.integers(0, 6 * SIZE),
)
def test_the_longest_known_prefix_is_found(
    past: list[tuple[tuple[int, ...], str, int, bool]], tokens: tuple[int, ...], tenant: str, limit: int
) -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool, SIZE, b"model")
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    known = set()
    for old, owner, first, release in past:
        hold = publish(pool, index, old, owner, first)
        for end in range(SIZE, len(old) + 1, SIZE):
            known.add((owner, old[:end]))
            # A block's content is the same for all who ever share it.
            block = hold.blocks[end // SIZE - 1]
            assert content.setdefault(block, (owner, old[:end])) == (owner, old[:end])
        if release:
            hold.release()
        pool.check_integrity()
        index.check_integrity()
    assert len(index) == len(known)

    longest = 0
    while longest + SIZE <= min(limit, len(tokens)) and (tenant, tokens[: longest + SIZE]) in known:
        longest += SIZE
    hold = match(index, tokens, tenant, limit)
    assert len(hold.blocks) * SIZE == longest
    for number, block in enumerate(hold.blocks, start=1):
        assert content[block] == (tenant, tokens[: number * SIZE])
    pool.check_integrity()


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=SIZE, max_size=6 * SIZE).map(tuple), taken=st.integers(0, 8))
def test_eviction_leaves_a_beginning(tokens: tuple[int, ...], taken: int) -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, SIZE, b"model")
    hold = publish(pool, index, tokens, "")
    blocks = hold.blocks[: len(tokens) // SIZE]
    hold.release()
    assert pool.allocate(taken, "other") is not None
    left = min(len(blocks), 8 - taken)
    assert match(index, tokens, "", len(tokens)).blocks == blocks[:left]
    pool.check_integrity()
    index.check_integrity()


def test_the_first_block_with_a_content_is_kept() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, SIZE, b"model")
    tokens = tuple(range(2 * SIZE))
    twins = [match(index, tokens, "", len(tokens)) for name in ("first", "second")]
    for hold in twins:
        assert hold.extend(2)
    for hold in twins:
        index.publish(tokens, "", hold, len(tokens))
    assert match(index, tokens, "", len(tokens)).blocks == twins[0].blocks
    twins[1].release()
    pool.check_integrity()
    index.check_integrity()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"model", "a"), (b"model", "b")),
        ((b"model", "a"), (b"ledom", "a")),
        # A boundary that moves between the two is another name, too.
        ((b"model", "a"), (b"modela", "")),
        ((b"", "modela"), (b"model", "a")),
    ],
)
def test_nothing_is_shared_across_tenants_or_models(one: tuple[bytes, str], other: tuple[bytes, str]) -> None:
    digests = []
    for namespace, tenant in (one, other):
        chain: list[bytes] = []
        index = PrefixIndex(BlockPool(1), SIZE, namespace)
        index.find((1,) * SIZE, tenant, SIZE, chain)
        digests.append(chain[0])
    assert digests[0] != digests[1]


def test_withdrawn_blocks_are_not_found_again() -> None:
    pool = BlockPool(6)
    index = PrefixIndex(pool, SIZE, b"model")
    tokens = tuple(range(2 * SIZE))
    held = publish(pool, index, tokens, "")
    shared = match(index, tokens + tokens, "", len(tokens))
    index.withdraw(shared)
    assert match(index, tokens, "", len(tokens)).blocks == []
    held.release()
    shared.release()
    pool.check_integrity()
    index.check_integrity()
    assert pool.free == pool.total


def test_a_block_has_one_content_and_a_pool_has_one_index() -> None:
    pool = BlockPool(2)
    index = PrefixIndex(pool, SIZE, b"model")
    hold = publish(pool, index, (1,) * SIZE, "")
    other = pool.share(hold.blocks, "liar")
    with pytest.raises(IntegrityError, match="liar"):
        index.publish((2,) * SIZE, "", other, SIZE)
    with pytest.raises(ValueError, match="already"):
        PrefixIndex(pool, SIZE, b"model")


Prefix = tuple[str, tuple[int, ...]]
"""Tenant and tokens: all that the KV of the last of these tokens depends on."""


def test_a_sequence_whose_first_step_has_not_run_leaves_no_state() -> None:
    pool, side = BlockPool(8), SidePool(STATE, 8, SIZE)
    index, tokens = PrefixIndex(pool, SIZE, b"model", sides=(side,)), (0,) * (SIZE + 1)

    def begin() -> Hold:
        return index.allocate(tokens, "", [], 2, SIZE)

    first = begin()
    index.leave(tokens, "", first, SIZE, states=True)
    first.release()
    unwell, cancelled = begin(), begin()
    assert unwell.sides[0].snapshot.blocks == cancelled.sides[0].snapshot.blocks
    index.withdraw(unwell)
    index.leave(tokens, "", cancelled, SIZE, states=True)
    assert not len(side.contents)


@dataclass(eq=False)
class Owner:
    """A sequence, as a worker has it."""

    tenant: str
    tokens: tuple[int, ...]
    hold: Hold
    computed: int
    ahead: bool = False
    """Whether a step that doesn't count has gone on with its states."""
    sure: bool = True
    """Whether the index still knows the blocks that it began with."""
    reads: bool = False
    """Whether it only reads what another one has left."""


@dataclass
class Memory:
    """The slots of each group's blocks, with the prefix that each was written for."""

    slots: dict[tuple[int, int, int], Prefix] = field(default_factory=dict)
    """By group, block and place in the block; a state is in place 0."""

    def compute(self, sides: tuple[SidePool, ...], one: Owner, end: int) -> None:
        """Writes the KV of the tokens from `computed` to `end`, as a step does, which first copies snapshots."""
        tables = one.hold.tables()
        for group, own in enumerate(one.hold.sides, start=1):
            if own.snapshot is not None:
                self.slots[group, own.hold.blocks[0], 0] = self.slots[group, own.snapshot.blocks[0], 0]
        for at in range(one.computed, end):
            prefix = one.tenant, one.tokens[: at + 1]
            for group, table in enumerate(tables):
                if group and sides[group - 1].is_state:
                    before = one.tenant, one.tokens[:at]
                    assert not at or self.slots[group, table[0], 0] == before, "a state goes on from where it is"
                    self.slots[group, table[0], 0] = prefix
                elif table[at // SIZE] >= 0:
                    self.slots[group, table[at // SIZE], at % SIZE] = prefix

    def check(self, sides: tuple[SidePool, ...], one: Owner) -> None:
        """Everything that the sequence's next token needs is there."""
        for group, table in enumerate(one.hold.tables()):
            if group and sides[group - 1].is_state:
                snapshot = one.hold.sides[group - 1].snapshot
                slot = table[0] if snapshot is None else snapshot.blocks[0]
                wanted = one.tenant, one.tokens[: one.computed]
                assert one.ahead or not one.computed or self.slots[group, slot, 0] == wanted
                continue
            first = sides[group - 1].group.first_needed(one.computed) if group else 0
            for at in range(first, one.computed):
                assert self.slots[group, table[at // SIZE], at % SIZE] == (one.tenant, one.tokens[: at + 1])


class PartialMachine(RuleBasedStateMachine):
    """Sequences begin, compute, and leave what they have, or fail; most go on where others ended."""

    @initialize(
        blocks=st.sampled_from([8, 400]),
        groups=st.sampled_from([(), (), (window_of(3),), (window_of(2 * SIZE + 1),), (STATE,), (window_of(7), STATE)]),
    )
    def start(self, blocks: int, groups: tuple[LayerGroup, ...]) -> None:
        self.pool = BlockPool(blocks)
        self.roomy = blocks == 400
        self.sides = tuple([SidePool(group, blocks, SIZE) for group in groups])
        self.index = PrefixIndex(self.pool, SIZE, b"model", sides=self.sides)
        self.memory, self.owners, self.past = Memory(), list[Owner](), list[Prefix]()
        self.left: set[Prefix] = set()
        """Prefixes that a sequence with the same tokens would find, to the last token."""
        self.queried = self.hit = 0

    @rule(data=st.data(), tenant=tenants, more=st.lists(st.integers(0, 1), min_size=1, max_size=SIZE + 2))
    def begin(self, data: st.DataObject, tenant: str, more: list[int]) -> None:
        before: tuple[int, ...] = ()
        if self.past and data.draw(st.booleans()):
            tenant, before = data.draw(st.sampled_from(self.past))
            before = before[: data.draw(st.sampled_from([len(before), len(before) - 1, len(before) // 2]))]
        tokens = (*before, *more)[: 5 * SIZE]
        limit = len(tokens) - 1
        hold = self.index.allocate(tokens, tenant, [], -(-len(tokens) // SIZE), limit)
        if hold is None:
            assert not self.roomy
            return
        found = hold.published * SIZE + hold.partial
        self.queried, self.hit = self.queried + limit, self.hit + found
        assert (self.index.queried_tokens, self.index.hit_tokens) == (self.queried, self.hit)
        assert hold.shared == hold.published
        assert found <= limit
        assert hold.partial < SIZE
        if self.roomy:
            known = [end for end in range(limit + 1) if (tenant, tokens[:end]) in self.left]
            assert found >= max(known, default=0)
        one = Owner(tenant, tokens, hold, found)
        self.memory.check(self.sides, one)
        if hold.partial:
            # What others left there is gone for them, unless this one leaves it again.
            start = found - hold.partial
            self.left = {
                left
                for left in self.left
                if not (left[0] == tenant and start < len(left[1]) < start + SIZE and left[1][:found] == tokens[:found])
            }
        self.owners.append(one)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 2 * SIZE))
    def compute(self, data: st.DataObject, count: int) -> None:
        one = data.draw(st.sampled_from(self.owners))
        end = min(one.computed + count, len(one.tokens))
        if one.ahead or not one.hold.cover(end):
            return
        self.memory.compute(self.sides, one, end)
        one.computed = end
        self.index.publish(one.tokens, one.tenant, one.hold, end)
        one.hold.slide(end)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def step_in_vain(self, data: st.DataObject) -> None:
        """A step in flight computes more, and the sequence ends meanwhile."""
        one = data.draw(st.sampled_from(self.owners))
        if not one.ahead and one.computed < len(one.tokens) and one.hold.cover(one.computed + 1):
            self.memory.compute(self.sides, one, one.computed + 1)
            one.ahead = True

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(), how=st.sampled_from(["leaves", "leaves", "leaves", "leaves to a reader", "fails", "is unwell"])
    )
    def end(self, data: st.DataObject, how: str) -> None:
        one = data.draw(st.sampled_from(self.owners))
        self.owners.remove(one)
        if one.reads or how == "fails":
            pass
        elif how == "is unwell":
            self.index.withdraw(one.hold)
            self.left.clear()
            for other in self.owners:
                other.sure = False
        else:
            self.index.leave(one.tokens, one.tenant, one.hold, one.computed, states=not one.ahead)
            prefix = one.tenant, one.tokens[: one.computed]
            self.past.append(prefix)
            if how == "leaves to a reader":
                # It reads what was left, which nobody changes meanwhile.
                shared = self.pool.share(one.hold.blocks, "reader")
                self.owners.append(Owner(*prefix, shared, one.computed, ahead=True, reads=True))
            elif one.sure and not (one.ahead and any(side.is_state for side in self.sides)):
                self.left.add(prefix)
        one.hold.release()

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.index.check_integrity()
        for one in self.owners:
            self.memory.check(self.sides, one)
            if not one.reads:
                assert not self.pool.indexed & set(one.hold.blocks[one.computed // SIZE :])


TestPartials = PartialMachine.TestCase
TestPartials.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
