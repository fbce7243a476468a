"""Partners of a hand-off: members of this incarnation, with the same model, within the cap on links."""

import asyncio
from dataclasses import replace

import pytest

from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.peers import Peer
from support.handoff import LAYOUT, RECEIVER, SENDER, blocks_of, pair, prompt

CONFIG = TransferConfig(frame_timeout_seconds=5.0)


def test_another_prompt_under_the_same_key_is_refused_before_any_allocation() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            for number, there in enumerate((prompt(41), [*prompt(39), 1])):
                key = (f"r{number}", 1)
                world.expect(key, prompt(40))
                world.sender.begin(key, RECEIVER, there)
                world.compute(key, blocks_of(len(there)))
                await world.ends.until(lambda key=key: key in world.ends.export_failed)
                assert world.ends.export_failed[key][0] is Code.MANIFEST
                assert not world.receiving.reservations

    asyncio.run(test())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 4}, "layout.layers: 4 here, 3 there"),
        ({"kv_heads": 1, "tp_size": 2}, "layout.tp_size: 2 here, 1 there"),
        ({"dtype": "bfloat16"}, "layout.dtype: bfloat16 here, float32 there; transfer.convert_dtype is off"),
        ({}, "checksum"),
    ],
)
def test_workers_that_differ_are_refused_with_the_field(change: dict[str, object], field: str) -> None:
    async def test() -> None:
        layout = replace(LAYOUT, **change)  # type: ignore[arg-type]  # the fields named by the parameters
        receiver = replace(CONFIG, checksum=bool(change), convert_dtype=False)
        async with pair(CONFIG, receiver_layout=layout, receiver_config=receiver) as world:
            world.announce(("r", 1), prompt(20))
            world.compute(("r", 1), blocks_of(20))
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["r", 1]
            assert code is Code.INCOMPATIBLE
            assert not code.retryable
            assert field in message
            assert not world.receiving.reservations

    asyncio.run(test())


def test_only_members_hand_over() -> None:
    async def test() -> None:
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

    asyncio.run(test())


def test_a_restarted_decode_worker_is_not_taken_for_the_old_one() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            peer = world.sender.peers.get(RECEIVER)
            assert peer is not None
            older = WorkerId(RECEIVER.name, "an older one")
            world.sender.peers.update([replace(peer, id=older)])
            world.sender.begin(("r", 1), older, prompt(5))
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["r", 1]
            assert code is Code.UNKNOWN_PEER
            assert RECEIVER.incarnation in message

    asyncio.run(test())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_that_is_dead_or_replaced_frees_everything(side: str) -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, lease_seconds=60)) as world:
            key = ("r", 1)
            world.announce(key, prompt(100))
            world.sender.progress(key, world.sending.hold(blocks_of(48)))
            await world.ends.until(lambda: key in world.receiving.reservations)
            if side == "prefill":
                world.sender.peers.update([], dead=[RECEIVER])
                world.sender.peers_changed()
            else:
                world.receiver.peers.update([Peer(WorkerId(SENDER.name, "another incarnation"), "")])
                world.receiver.peers_changed()
            await world.settled(key)
            assert not world.ends.imported

    asyncio.run(test())


def test_a_membership_that_lacks_a_peer_says_nothing_of_it() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.announce(("r", 1), prompt(100))
            for endpoint in (world.sender, world.receiver):
                endpoint.peers.update([])
                endpoint.peers_changed()
            world.compute(("r", 1), blocks_of(100))
            await world.settled(("r", 1))
            assert ("r", 1) in world.ends.imported
            assert world.sender.epoch(RECEIVER.incarnation) == 1, "the link was kept"

    asyncio.run(test())


def test_a_lost_decode_worker_frees_the_prefill_worker_and_the_next_attempt_finds_another() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world, pair(CONFIG) as other:
            key = ("r", 1)
            world.announce(key, prompt(100))
            world.sender.progress(key, world.sending.hold(blocks_of(48)))
            await world.server.stop(None)
            await world.ends.until(lambda: key in world.ends.export_failed)
            await world.ends.until(lambda: not world.sending.leaked)
            assert world.ends.export_failed[key][0].retryable
            other.announce(("r", 2), prompt(100))
            other.compute(("r", 2), blocks_of(100))
            await other.settled(("r", 2))
            assert ("r", 2) in other.ends.imported

    asyncio.run(test())


def test_closing_one_end_fails_its_hand_offs_at_both() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.announce(("r", 1), prompt(100))
            world.sender.progress(("r", 1), world.sending.hold(blocks_of(48)))
            await world.ends.until(lambda: ("r", 1) in world.receiving.reservations)
            await world.client.close()
            await world.settled(("r", 1))

    asyncio.run(test())


def test_a_stream_that_ends_before_it_has_begun_fails_its_hand_off() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.sender.begin(("r", 1), RECEIVER, prompt(20))
            world.compute(("r", 1), blocks_of(20))
            world.sender.peers.update([], dead=[RECEIVER])
            world.sender.peers_changed()
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed and not world.sending.leaked)

    asyncio.run(test())


def test_links_are_capped_and_the_idle_one_goes_first() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, max_links=1)) as world, pair(CONFIG) as other:
            second = next(iter(other.sender.peers))
            second = replace(second, id=WorkerId("decode-1", "d1"))
            await other.service.close()
            peers = [*world.sender.peers, second]
            world.sender.peers.update(peers)
            world.announce(("r", 1), prompt(20))
            world.sender.begin(("s", 1), second.id, prompt(20))
            await world.ends.until(lambda: ("s", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["s", 1]
            assert code is Code.NO_CAPACITY
            assert "transfer.max_links" in message
            world.compute(("r", 1), blocks_of(20))
            await world.settled(("r", 1))
            world.sender.begin(("s", 2), second.id, prompt(20))
            await asyncio.sleep(0)
            assert ("s", 2) not in world.ends.export_failed

    asyncio.run(test())
