"""Hidden states that come with a prompt's KV: exactly those that were kept, or none, and no memory stays behind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.states import StatesLayout, StatesShape
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.states import SentStates, StatesRoom
from support.handoff import (
    FIRST_TOKEN,
    LAYOUT,
    RECEIVER,
    SENDER,
    SHAPE,
    STATES,
    Pair,
    blocks_of,
    links_of,
    pair,
    prompt,
    raw,
)

CONFIG = TransferConfig(frame_timeout_seconds=10.0, frame_bytes=65536)
BLOCK = LAYOUT.block_size
CHUNK = 4 * BLOCK


def states_of(tokens: int, layout: StatesLayout = STATES) -> Tensor:
    noise = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, len(layout.layers), layout.hidden_size, generator=noise)
    return states.to(getattr(torch, layout.dtype))


def compute(world: Pair, key: tuple[str, int], states: Tensor, first: int = 0) -> None:
    """Computes a prompt chunk by chunk, with the hidden states from token `first` on."""
    count, blocks = len(states), blocks_of(len(states))
    for start in range(0, count, CHUNK):
        end = min(start + CHUNK, count)
        if first < end:
            world.sender.keep(key, max(first, start), states[max(first, start) : end])
        if end < count:
            world.sender.progress(key, world.sending.hold(blocks[start // BLOCK : end // BLOCK]))
    world.sender.finished(key, FIRST_TOKEN, world.sending.hold(blocks))


async def arrives(world: Pair, name: str, states: Tensor, expected: int | None, first: int = 0) -> None:
    """Hands a prompt over, and checks that the states from `expected` on came with it; None if none came. No room is
    taken any more."""
    key, count = (name, 1), len(states)
    world.announce(key, prompt(count))
    compute(world, key, states, first)
    await world.settled(key)
    world.check_equal(key, blocks_of(count), count)
    came = world.ends.states[key]
    if expected is None:
        assert came is None
    else:
        assert came is not None
        assert torch.equal(came, states[expected:])
    nbytes = 0 if came is None else came.nbytes
    assert world.ends.imported[key][2].state_nbytes == nbytes <= world.ends.exported[key].state_nbytes
    assert world.sender.states_room.used == world.receiver.states_room.used == 0
    world.reuse(key)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["tcp", "shm", "fake", pytest.param("gloo", marks=pytest.mark.more)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_they_arrive_with_the_kv(kind: str, dtype: str) -> None:
    """States come from the first token whose states were kept, in frames of many tokens, beside KV that is there
    already."""
    wanted = replace(STATES, dtype=dtype)  # type: ignore[arg-type]  # a literal
    async with pair(CONFIG, transports=links_of(kind), states=wanted) as world:
        raw(world.source).random_(0, 256)
        for number, (count, first) in enumerate(((1, 0), (BLOCK + 1, 0), (1000, 0), (300, 100), (300, 299))):
            await arrives(world, f"r{number}", states_of(count, wanted), first, first)
        key, states = ("all there", 1), states_of(3 * BLOCK, wanted)
        world.announce(key, prompt(3 * BLOCK), have=3 * BLOCK)
        compute(world, key, states)
        await world.settled(key)
        assert torch.equal(world.ends.states[key], states)  # type: ignore[arg-type]  # it came
        assert world.ends.imported[key][2].nbytes == 0


@pytest.mark.anyio
async def test_without_room_the_kv_comes_alone() -> None:
    """The sender drops the part that doesn't fit, and what came before it; the receiver takes all or none."""
    small = replace(CONFIG, states_bytes=3 * CHUNK * STATES.token_bytes)
    for config, receiver, first in ((small, CONFIG, 4 * CHUNK), (CONFIG, small, None)):
        async with pair(config, receiver_config=receiver, states=STATES) as world:
            await arrives(world, "r", states_of(5 * CHUNK), first)


@pytest.mark.anyio
async def test_who_wants_none_gets_none() -> None:
    """The hand-off takes no frame, byte or memory more than one without states."""
    async with pair(CONFIG) as world:
        await arrives(world, "r", states_of(200), None, first=200)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (None, "states: this worker's steps keep no hidden states"),
        (StatesShape(3, 32), "states.hidden_size: 32 here, 16 there"),
        (StatesShape(2, 16), "states.layers: 0, 2, 3 there; allowed: 0 to 2"),
    ],
)
def test_a_worker_that_cannot_keep_them_refuses_by_name(shape: StatesShape | None, why: str) -> None:
    here = LocalWorker(SENDER, CacheLayout.of(LAYOUT), "model", states_shape=shape)
    there = LocalWorker(RECEIVER, CacheLayout.of(LAYOUT), "model", states=STATES)
    code, message = here.objection(there.hello(SENDER, CONFIG), CONFIG) or (None, "")
    assert code is Code.INCOMPATIBLE
    assert message.startswith(why)
    assert there.objection(here.hello(RECEIVER, CONFIG), CONFIG) is None
    able = replace(here, states_shape=SHAPE)
    assert able.objection(there.hello(SENDER, CONFIG), CONFIG) is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("wanted", "shape", "why"),
    [(STATES, None, "states: "), (replace(STATES, hidden_size=2**20), SHAPE, "transfer.frame_bytes")],
    ids=["that can't be kept", "larger than a frame"],
)
async def test_a_pair_whose_states_are_impossible_hands_nothing_over(
    wanted: StatesLayout, shape: StatesShape | None, why: str
) -> None:
    async with pair(CONFIG, states=wanted, shape=shape) as world:
        world.announce(("r", 1), prompt(100))
        world.compute(("r", 1), blocks_of(100))
        assert not await world.sent(("r", 1))
        code, message = world.ends.export_failed["r", 1]
        assert code is Code.INCOMPATIBLE
        assert why in message
        assert not world.ends.imported


def test_what_is_known_is_not_taken_twice() -> None:
    """A preempted sequence computes its tokens again."""
    room = StatesRoom(10**6)
    kept, states = SentStates(room), states_of(100)
    for first, end in ((0, 40), (0, 30), (20, 60), (60, 61), (10, 100)):
        kept.add(first, states[first:end])
    assert (kept.first, kept.end) == (0, 100)
    for first, count in ((0, 100), (35, 30), (99, 1), (0, 0)):
        assert torch.equal(torch.cat([states[:0], *kept.slices(first, count)]), states[first : first + count])
    assert room.used == states.nbytes
    kept.clear()
    assert room.used == 0
