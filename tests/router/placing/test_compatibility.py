"""Workers of several versions in one fleet: which are paired, and what an operator is told."""

import asyncio

import pytest

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
)
from kvrelay.router.placing.placement import Demand, Placement, WorkerView
from kvrelay.router.placing.policies import LeastWork
from kvrelay.router.placing.prefixes import PrefixIndex
from kvrelay.rpc.compatibility import rank, unpaired
from kvrelay.rpc.identity import WorkerId
from support.router_fakes import FakeWorker, decode_of, fake, silent
from support.scenes import Serve


def test_the_group_with_the_most_pairs_is_preferred() -> None:
    old = [("prefill", "old"), ("decode", "old"), ("decode", "old"), ("decode", "old")]
    new = [("prefill", "new"), ("prefill", "new"), ("decode", "new"), ("decode", "new")]
    assert rank(old + new) == ["new", "old"]
    assert rank([*old, *new, ("prefill", "old"), ("prefill", "old")]) == ["old", "new"]
    workers = [
        WorkerView(WorkerId(f"w{at}", "i"), role, True, compatibility=digest)
        for at, (role, digest) in enumerate(old + new)
    ]  # type: ignore[arg-type]  # a role
    placed = LeastWork(PrefixIndex(0)).place(Demand(5, 5), workers)
    assert isinstance(placed, Placement)
    assert {worker.name for worker in placed.workers} <= {"w4", "w5", "w6", "w7"}


async def test_workers_of_another_digest_are_never_paired(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    old = fake("decode-1", silent, compatibility="old")
    cluster = await serve(fake("prefill-0", compatibility="new"), fake("decode-0", compatibility="new"), old)
    for _ in range(8):
        await cluster.ask()
    assert not old.jobs
    cluster.announce()
    await cluster.ask()
    (line,) = [vars(record) for record in caplog.records if record.message == "workers not paired"]
    assert "decode-1 (digest old) can't be paired with" in line["reason"]


def member(name: str, role: int, digest: str, state: int = MEMBER_STATE_READY) -> Member:
    return Member(name=name, role=role, compatibility=digest, state=state)  # type: ignore[arg-type]  # enum values


def test_the_operator_is_told_who_cant_be_paired_with_whom() -> None:
    fleet = [
        member("prefill-0", ROLE_PREFILL, "aaaaaaaaaaaa"),
        member("decode-0", ROLE_DECODE, "aaaaaaaaaaaa"),
        member("router-0", ROLE_ROUTER, ""),
        member("decode-2", ROLE_DECODE, "cccc", MEMBER_STATE_DEAD),
    ]
    assert unpaired(fleet) == []
    assert unpaired([*fleet, member("decode-1", ROLE_DECODE, "", MEMBER_STATE_STARTING)]) == []
    (sentence,) = unpaired([*fleet, member("decode-1", ROLE_DECODE, "")])
    assert sentence.startswith("decode-1 (digest none) can't be paired with decode-0, prefill-0 (digest aaaaaaaa): ")
    assert "without a prefill worker of the same digest" in sentence


async def test_an_upgrade_in_place_drains_workers_whose_fingerprint_is_made_the_old_way(serve: Serve) -> None:
    """The old workers have the same weights as the new ones. Streams end where they are; none moves from old to new."""

    def workers(age: str) -> tuple[FakeWorker, FakeWorker]:
        same = {"compatibility": f"{age} digest", "fingerprint": age * 16}
        return fake(f"prefill-{age}", **same), fake(f"decode-{age}", decode_of(pause=0.05), **same)

    cluster = await serve(*workers("old"))
    running = [cluster.asking(count=30) for _ in range(4)]
    await cluster.job("decode-old", 3)
    await cluster.join(*workers("new"))
    mixed = await cluster.ask()
    cluster.announce(prefill_old=MEMBER_STATE_DRAINING, decode_old=MEMBER_STATE_DRAINING)
    await cluster.ready("prefill-new", "decode-new")
    later = await cluster.ask()
    drained = await asyncio.gather(*running)
    for done, ages in [(later, {"new"}), *((each, {"old"}) for each in drained), (mixed, {"old", "new"})]:
        line = done.timeline
        assert {line.prefill_worker.partition("-")[2], line.decode_worker.partition("-")[2]} in [{age} for age in ages]
        assert (line.retries, line.migrations) == (0, 0)
