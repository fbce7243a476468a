"""Another rank than rank 0 does what rank 0 says, but never ahead of its own steps."""

import asyncio
from typing import Any

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.kv.writes import WRITTEN, RankWrites
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.rank_links import Command, RankFrames
from kvrelay.transfer.links.rank_transfers import RankTransfers
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.ports import BlockClaim, LoopRuntime
from kvrelay.transfer.protocol.routes import routes_of
from support.hash_runner import LAYOUT
from support.late_writes import LateWrites
from support.ranks import MemoryChannel, pools_of

DEGREE = Degree(tensor=2)


class Links:
    """Records what is given to the links of a rank, in order."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def submit(self, peer: str, epoch: int, ranks: tuple[int, int], job: Any) -> None:
        self.given.append(job)

    def after_frames(self, peer: str, epoch: int, key: tuple[str, int], call: Any) -> None:
        self.given.append("after")


class RankOne:
    """Rank 1 of a sender, and rank 0's end of the channel to it."""

    def __init__(self) -> None:
        own, other = pools_of(LAYOUT, DEGREE, 4)
        self.route = next(route for route in routes_of(CacheLayout.of(LAYOUT), DEGREE, ONE) if route.ranks.sender == 1)
        self.jobs, self.links, self.reports = RankFrames(PoolFrames([own], True)), Links(), list[Command]()
        self.channel, far = MemoryChannel.pair()
        self.channel.listen(self.reports.append, lambda reason: None)
        self.writes = RankWrites()
        self.transfers = RankTransfers(far, self.links, PoolFrames([other], True), LoopRuntime(), self.writes)  # type: ignore[arg-type]  # enough of them

    async def send(self, number: int, behind: int) -> None:
        """Has rank 1 send a frame; the last step whose result rank 0 has is this one."""
        frame = Frame(1, number, 0, 8, self.route.layout.block_bytes)
        job = self.jobs.send(("r", 1), frame, BlockClaim(), [2], self.route, lambda push: None, lambda: None)
        where = {"peer": "p", "epoch": 1, "ranks": [1, 0]}
        self.channel.send(job.command | where | {"number": number, "behind": behind})
        await self.turn()

    async def after(self) -> None:
        self.channel.send({"do": "after", "peer": "p", "epoch": 1, "number": 9, "key": ["r", 1]})
        await self.turn()

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_frame_waits_until_its_rank_has_run_the_steps_of_rank_0() -> None:
    rank = RankOne()
    await rank.send(0, behind=-1)
    await rank.send(1, behind=1)
    await rank.after()
    assert len(rank.links.given) == 1
    rank.writes.launched(0, WRITTEN)
    await rank.turn()
    assert len(rank.links.given) == 1
    late = LateWrites()
    rank.writes.launched(1, late)
    await rank.turn()
    assert len(rank.links.given) == 1, "the second step's KV isn't there"
    late.end()
    await rank.turn()
    assert len(rank.links.given) == 3
    assert rank.links.given[-1] == "after", "what is behind a frame stays behind it"


async def test_a_frame_that_waits_can_be_stopped() -> None:
    rank = RankOne()
    await rank.send(0, behind=0)
    rank.channel.send({"do": "stop", "number": 0})
    await rank.turn()
    assert [(report["do"], report["outcome"]) for report in rank.reports] == [("ended", Outcome.LOST.value)]
    assert rank.transfers.active == 0
