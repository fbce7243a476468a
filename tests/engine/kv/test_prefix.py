"""The prefix index finds the longest known beginning, of the same tenant only, and forgets from the tail."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.prefix import PrefixIndex

SIZE = 4
# Few different tokens and lengths around block borders, so that beginnings are often alike.
token_lists = st.lists(st.integers(0, 1), max_size=5 * SIZE).map(tuple)
tenants = st.sampled_from(["", "a", "b"])


def match(index: PrefixIndex, tokens: tuple[int, ...], tenant: str, limit: int) -> Hold:
    """A hold of the longest known prefix."""
    chain: list[bytes] = []
    hold = index.allocate(tokens, tenant, chain, len(index.find(tokens, tenant, limit, chain)), limit)
    assert hold is not None
    return hold


def publish(pool: BlockPool, index: PrefixIndex, tokens: tuple[int, ...], tenant: str) -> Hold:
    """Does what a scheduler does for one prompt: match, compute the rest, publish. The hold is still alive."""
    hold = match(index, tokens, tenant, len(tokens))
    assert hold.extend(-(-len(tokens) // SIZE) - len(hold.blocks))
    index.publish(tokens, tenant, hold, len(tokens))
    return hold


@settings(max_examples=150, deadline=None)
@given(
    past=st.lists(st.tuples(token_lists, tenants, st.booleans()), max_size=8),
    tokens=token_lists,
    tenant=tenants,
    limit=st.integers(0, 6 * SIZE),
)
def test_the_longest_known_prefix_is_found(
    past: list[tuple[tuple[int, ...], str, bool]], tokens: tuple[int, ...], tenant: str, limit: int
) -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool, SIZE, b"model")
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    known = set()
    for old, owner, release in past:
        hold = publish(pool, index, old, owner)
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


@settings(max_examples=60, deadline=None)
@given(tokens=token_lists, cuts=st.lists(st.integers(0, 5 * SIZE), max_size=6))
def test_publishing_in_pieces_is_publishing_at_once(tokens: tuple[int, ...], cuts: list[int]) -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, SIZE, b"model")
    hold = match(index, tokens, "", 0)
    assert hold.extend(5)
    for computed in sorted(min(cut, len(tokens)) for cut in cuts):
        index.publish(tokens, "", hold, computed)
        assert len(index) == computed // SIZE
    index.publish(tokens, "", hold, len(tokens))
    assert match(index, tokens, "", len(tokens)).blocks == hold.blocks[: len(tokens) // SIZE]


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
