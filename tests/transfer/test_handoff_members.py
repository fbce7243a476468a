"""Partners of a hand-off: members of this incarnation, with the same model, within the cap on links."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from support.handoff import LAYOUT, RECEIVER, SENDER, blocks_of, pair, prompt

CONFIG = TransferConfig(frame_timeout_seconds=5.0)
KEY = ("r", 1)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_heads": 1}, "layout.kv_heads: 1 here, 2 there"),
        ({"dtype": "bfloat16"}, "layout.dtype: bfloat16 here, float32 there; transfer.convert_dtype is off"),
    ],
)
async def test_workers_that_differ_are_refused_with_the_field(change: dict[str, object], field: str) -> None:
    layout = replace(LAYOUT, **change)  # type: ignore[arg-type]  # the fields named by the parameters
    receiver = replace(CONFIG, convert_dtype=False)
    async with pair(CONFIG, receiver_layout=layout, receiver_config=receiver) as world:
        code, message = await world.fails(KEY, prompt(20))
        assert code is Code.INCOMPATIBLE
        assert not code.retryable
        assert field in message


@pytest.mark.anyio
async def test_only_members_hand_over() -> None:
    async with pair(CONFIG) as world:
        ends = world.ends
        world.sender.begin(("to a stranger", 1), WorkerId("decode-9", "x"), prompt(5))
        world.sender.begin(("to an old incarnation", 1), WorkerId(RECEIVER.name, "x"), prompt(5))
        world.receiver.expect(("from a stranger", 1), WorkerId("prefill-9", "x"), prompt(5))
        await ends.until(lambda: len(ends.export_failed) == 2 and len(ends.import_failed) == 1)
        world.receiver.peers.update([], dead=[SENDER])
        world.sender.begin(("as a stranger", 1), RECEIVER, prompt(5))
        await ends.until(lambda: ("as a stranger", 1) in ends.export_failed)
        codes = {code for code, _ in (ends.export_failed | ends.import_failed).values()}
        assert codes == {Code.UNKNOWN_PEER}


@pytest.mark.anyio
async def test_a_restarted_decode_worker_is_not_taken_for_the_old_one() -> None:
    async with pair(CONFIG) as world:
        peer = world.sender.peers.get(RECEIVER)
        assert peer is not None
        older = WorkerId(RECEIVER.name, "an older one")
        world.sender.peers.update([replace(peer, id=older)])
        world.sender.begin(KEY, older, prompt(5))
        assert not await world.sent(KEY)
        code, message = world.ends.export_failed[KEY]
        assert code is Code.UNKNOWN_PEER
        assert RECEIVER.incarnation in message


@pytest.mark.anyio
async def test_a_membership_that_lacks_a_peer_says_nothing_of_it() -> None:
    async with pair(CONFIG) as world:
        world.announce(KEY, prompt(100))
        for endpoint in (world.sender, world.receiver):
            endpoint.peers.update([])
            endpoint.peers_changed()
        world.compute(KEY, blocks_of(100))
        await world.settled(KEY)
        assert KEY in world.ends.imported
        assert world.sender.epoch(RECEIVER.incarnation) == 1, "the link was kept"


@pytest.mark.anyio
async def test_links_are_capped_and_the_idle_one_goes_first() -> None:
    async with pair(replace(CONFIG, max_links=1)) as world, pair(CONFIG) as other:
        second = replace(next(iter(other.sender.peers)), id=WorkerId("decode-1", "d1"))
        await other.service.close()
        world.sender.peers.update([*world.sender.peers, second])
        world.announce(KEY, prompt(20))
        world.sender.begin(("s", 1), second.id, prompt(20))
        await world.ends.until(lambda: ("s", 1) in world.ends.export_failed)
        code, message = world.ends.export_failed["s", 1]
        assert code is Code.NO_CAPACITY
        assert "transfer.max_links" in message
        world.compute(KEY, blocks_of(20))
        await world.settled(KEY)
        world.sender.begin(("s", 2), second.id, prompt(20))
        await asyncio.sleep(0)
        assert ("s", 2) not in world.ends.export_failed


def test_a_name_has_one_incarnation_at_a_time() -> None:
    table = PeerTable([Peer(WorkerId("decode-0", "a"), "host:1")])
    assert table.get(WorkerId("decode-0", "a")) == Peer(WorkerId("decode-0", "a"), "host:1")
    assert table.get(WorkerId("decode-0", "b")) is None
    table.update([Peer(WorkerId("decode-0", "b"), "host:2"), Peer(WorkerId("decode-1", "c"), "host:3")])
    assert table.get(WorkerId("decode-0", "a")) is None
    assert Peer(WorkerId("decode-0", "a"), "host:1") not in table
    assert [peer.address for peer in table] == ["host:2", "host:3"]
    assert len(table) == 2


# The digest in the membership says what the hand-shake will say.

layouts = st.builds(
    KVLayout,
    layers=st.sampled_from((2, 4)),
    kv_heads=st.sampled_from((2, 4)),
    head_dim=st.sampled_from((8, 16)),
    block_size=st.sampled_from((16, 32)),
    dtype=st.sampled_from(("float32", "bfloat16", "int8")),
    order=st.sampled_from(("NHD", "HND")),
)
caches = st.builds(
    lambda layout, window: CacheLayout(
        (LayerGroup("full", (layout,)), *([LayerGroup("window", (layout,), window)] if window else [])),
        layout.block_size,
    ),
    layouts,
    st.sampled_from((0, 0, 20, 30)),
)
workers = st.builds(LocalWorker, st.just(WorkerId("w", "1")), caches, st.sampled_from(("model", "other")))
configs = st.builds(TransferConfig, checksum=st.booleans(), convert_dtype=st.just(True))


@given(workers, workers, configs, configs)
def test_digests_are_equal_exactly_where_neither_side_objects(
    one: LocalWorker, other: LocalWorker, config: TransferConfig, others: TransferConfig
) -> None:
    objection = one.objection(other.hello(one.id, others), config)
    assert (one.digest(config) == other.digest(others)) == (objection is None), objection


def test_without_conversion_the_dtype_is_part_of_the_digest() -> None:
    strict = TransferConfig(convert_dtype=False)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    one = LocalWorker(WorkerId("w", "1"), CacheLayout.of(layout), "model")
    other = replace(one, cache=CacheLayout.of(replace(layout, dtype="bfloat16")))
    assert one.digest(strict) != other.digest(strict)
    assert one.digest(TransferConfig()) == other.digest(TransferConfig())
