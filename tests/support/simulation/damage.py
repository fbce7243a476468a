"""Damage that a link may do to a frame: each kind turns one announced frame into what crosses instead."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.transfer.protocol.messages import Push
from support.simulation.blocks import BLOCK


@dataclass(slots=True)
class Crossing:
    """One frame on its way: its announcement, and its bytes on the link."""

    push: Push | None
    data: bytes | None
    announce: Callable[[Push], None]


@dataclass
class History:
    """Frames that have crossed between two workers, and those held back until the next frame has crossed."""

    crossed: list[Crossing]
    held: list[Crossing]

    def alike(self, crossing: Crossing) -> list[Crossing]:
        """Earlier frames for the same place; any earlier ones if there are none."""
        now = crossing.push
        assert now is not None
        same = [
            each for each in self.crossed if each.push and each.push.first == now.first and each.push.key != now.key
        ]
        return same or self.crossed


Damage = Callable[[random.Random, Crossing, History], list[Crossing]]


def flip_bits(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    data = bytearray(crossing.data or b"")
    for position in rng.sample(range(len(data)), rng.choice((1, 1, 2, 7))):
        data[position] ^= 1 << rng.randrange(8)
    return [replace(crossing, data=bytes(data))]


def cut_short(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The rest of the bytes are others, as after a write that stopped."""
    data = np.frombuffer(crossing.data or b"", np.uint8).copy()
    data[rng.randrange(len(data)) :] ^= 0x5A
    return [replace(crossing, data=data.tobytes())]


def noise(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    data = np.random.default_rng(rng.randrange(2**32)).bytes(len(crossing.data or b""))
    return [replace(crossing, data=data)]


def lose_the_end(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    return [replace(crossing, data=(crossing.data or b"")[: -rng.choice((1, 8, 100))])]


def swap(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The bytes arrive behind those of the next frame."""
    history.held.append(replace(crossing, push=None))
    return [replace(crossing, data=None)]


def swap_whole(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The frame is announced and sent behind the next one."""
    history.held.append(crossing)
    return []


def replay(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The bytes of an earlier frame arrive instead; those of an earlier attempt for the same place, if there is one."""
    return [replace(crossing, data=rng.choice(history.alike(crossing)).data)]


def replay_whole(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """Announcement and bytes of an earlier frame arrive instead."""
    return [replace(rng.choice(history.alike(crossing)), announce=crossing.announce)]


def double(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The bytes arrive twice, so that all later frames are one place late."""
    return [crossing, replace(crossing, push=None)]


def leave_out(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The frame is announced, and never arrives."""
    return [replace(crossing, data=None)]


def leave_out_whole(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The frame is neither announced nor sent."""
    return []


def other_epoch(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The announcement is one of another link."""
    assert crossing.push is not None
    return [replace(crossing, push=replace(crossing.push, epoch=crossing.push.epoch + 1))]


def other_place(rng: random.Random, crossing: Crossing, history: History) -> list[Crossing]:
    """The announcement names another place than that of the bytes."""
    assert crossing.push is not None
    return [replace(crossing, push=replace(crossing.push, first=crossing.push.first + BLOCK))]


DAMAGES: tuple[Damage, ...] = (
    flip_bits,
    cut_short,
    noise,
    lose_the_end,
    swap,
    swap_whole,
    replay,
    replay_whole,
    double,
    leave_out,
    leave_out_whole,
    other_epoch,
    other_place,
)
