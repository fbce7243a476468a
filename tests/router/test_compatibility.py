"""Workers of several versions in one fleet: which are paired, and what an operator is told."""

import asyncio
import hashlib
import json
from itertools import product
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.client import AsyncClient
from kvrelay.engine.models.reading.checkpoint import Checkpoint
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
from kvrelay.models import resolve
from kvrelay.router.placing.placement import Demand, LeastWork, NoPlace, Placement, WorkerView, complete
from kvrelay.router.placing.prefixes import PrefixIndex
from kvrelay.rpc.compatibility import rank, unpaired
from kvrelay.rpc.identity import WorkerId, WorkerRole
from support.router_fakes import FakeWorker, decode_of, fake_cluster, prefill_of, run

ROLES: list[WorkerRole] = ["prefill", "decode", "colocated"]


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    names = [WorkerId(f"w{index}", "i") for index in range(7)]
    roles = [draw(st.sampled_from(ROLES)) for _ in range(draw(st.integers(1, 7)))]
    return [
        WorkerView(
            worker,
            role,
            ready=True,
            outstanding_tokens=draw(st.integers(0, 5)),
            compatibility=draw(st.sampled_from("ab")),
            avoided=draw(st.booleans()),
            bad_peers=draw(st.frozensets(st.sampled_from(names))) if role == "prefill" else frozenset(),
            suspects=draw(st.integers(0, 1)),
            requests=draw(st.integers(0, 1)),
        )
        for worker, role in zip(names, roles, strict=False)
    ]


@settings(max_examples=500, deadline=None)
@given(fleets(), st.booleans())
def test_a_pair_has_one_digest_and_is_avoided_only_if_all_are(workers: list[WorkerView], on_trial: bool) -> None:
    by_id = {worker.id: worker for worker in workers}
    of = {role: [worker for worker in workers if worker.role == role] for role in ROLES}
    options = [(worker, worker) for worker in of["colocated"]]
    options += [
        (prefill, decode)
        for prefill, decode in product(of["prefill"], of["decode"])
        if prefill.compatibility == decode.compatibility
    ]

    # A decode worker computes prompts itself if nobody else can.
    options = options or [(decode, decode) for decode in of["decode"]]

    def bad(option: tuple[WorkerView, WorkerView]) -> bool:
        return option[0].avoided or option[1].avoided or option[1].id in option[0].bad_peers

    def apart(option: tuple[WorkerView, WorkerView]) -> bool:
        return not on_trial or not (option[0].suspects or option[1].suspects)

    good = [option for option in options if not bad(option)]
    placed = LeastWork(PrefixIndex(0)).place(Demand(5, 5, on_trial=on_trial), workers)
    assert complete(workers) == bool(options)
    if isinstance(placed, Placement):
        assert placed.decode is not None
        chosen = by_id[placed.prefill], by_id[placed.decode]
        assert chosen in options
        assert apart(chosen)
        assert chosen in good or not good
    elif placed is NoPlace.NO_WORKERS:
        assert not options
    else:
        assert not any(map(apart, good))


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


def sampled_fingerprint(checkpoint: Checkpoint) -> str:
    """A model's fingerprint as versions made it that read samples of each tensor only."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for name, entry in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        data = entry.path.read_bytes()[: entry.end]
        for at in (entry.begin, (entry.begin + entry.end) // 2, max(entry.begin, entry.end - 4096)):
            digest.update(data[at : at + 4096])
    return digest.hexdigest()


def test_an_upgrade_in_place_drains_workers_whose_fingerprint_is_made_the_old_way(tmp_path: Path) -> None:
    """The old workers have the same weights as the new ones. Streams end where they are; none moves from old to new."""
    checkpoint = Checkpoint(resolve("pico"))
    prints = {"old": sampled_fingerprint(checkpoint), "new": checkpoint.fingerprint()}
    assert prints["old"] != prints["new"]

    def workers(age: str) -> tuple[FakeWorker, FakeWorker]:
        same = {"compatibility": f"{prints[age]} digest", "fingerprint": prints[age]}
        prefill = FakeWorker(f"prefill-{age}", "prefill", prefill_of(lambda index: 40 + index), **same)
        decode = FakeWorker(f"decode-{age}", "decode", decode_of(lambda index: 40 + index, pause=0.05), **same)
        return prefill, decode

    async def test() -> None:
        old, new = workers("old"), workers("new")
        async with fake_cluster(tmp_path, *old) as cluster, AsyncClient(cluster.router.address, timeout=30) as client:
            running = [asyncio.create_task(client.complete("hello", max_tokens=30)) for _ in range(4)]
            await cluster.job("decode-old", 3)
            for worker in new:
                await worker.start()
                cluster.workers[worker.name] = worker
            cluster.announce()
            mixed = await client.complete("hello", max_tokens=3)
            cluster.announce(prefill_old=MEMBER_STATE_DRAINING, decode_old=MEMBER_STATE_DRAINING)
            await cluster.ready("prefill-new", "decode-new")
            later = await client.complete("hello", max_tokens=3)
            drained = await asyncio.gather(*running)
            for worker in new:
                await worker.stop()
        for done, ages in [(later, {"new"}), *((each, {"old"}) for each in drained), (mixed, {"old", "new"})]:
            pair = [done.timeline.prefill_worker.split("-")[1], done.timeline.decode_worker.split("-")[1]]
            assert set(pair) <= ages
            assert len(set(pair)) == 1
            assert (done.timeline.retries, done.timeline.migrations) == (0, 0)
            assert done.token_ids == tuple(range(40, 40 + len(done.token_ids)))

    run(test)
