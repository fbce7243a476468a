"""Failpoints: what arms them, what is refused, and that they do nothing unless armed."""

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest

from kvrelay.transfer import failpoints
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.failpoints import VARIABLE, FailpointError, Fault, Injected, failpoint, parse
from kvrelay.transfer.frames import SendJob
from kvrelay.transfer.links import Job
from support.fake_transport import FakeTransport
from support.handoff import LAYOUT, pair

KEY = ("name/0123", 1)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch):
    return lambda text: monkeypatch.setattr(failpoints, "_armed", parse(text))


def test_unarmed_nothing_happens_and_it_costs_next_to_nothing() -> None:
    assert failpoint("prefill.after_chunk", KEY, chunk=0) is None
    started = time.perf_counter()
    for chunk in range(100_000):
        failpoint("prefill.after_chunk", KEY, chunk=chunk)
    assert time.perf_counter() - started < 1, "10 us each would show in no step"


def test_conditions_choose_the_moment(arm) -> None:
    arm("prefill.after_chunk,chunk=2,request=name,attempt=1:raise")
    for key, chunk in ((KEY, 1), (("name/0123", 2), 2), (("other/0123", 1), 2)):
        assert failpoint("prefill.after_chunk", key, chunk=chunk) is None
    assert failpoint("prefill.after_finish", KEY) is None
    with pytest.raises(Injected, match=r"prefill\.after_chunk"):
        failpoint("prefill.after_chunk", KEY, chunk=2)


def test_times_and_share_bound_how_often(arm) -> None:
    arm("transfer.frame,times=2:drop")
    acted = [failpoint("transfer.frame", KEY, index=index) is not None for index in range(5)]
    assert acted == [True, True, False, False, False]
    arm("transfer.frame,share=0.05,seed=3:drop")
    acted = [failpoint("transfer.frame", KEY, index=index) is not None for index in range(2000)]
    assert 60 < sum(acted) < 140
    arm("transfer.frame,share=0.05,seed=3:drop")
    assert acted == [failpoint("transfer.frame", KEY, index=index) is not None for index in range(2000)]


def test_the_first_rule_that_applies_acts(arm) -> None:
    arm("transfer.frame,index=1:drop; transfer.frame:duplicate")
    assert failpoint("transfer.frame", KEY, index=1) == Fault("drop")
    assert failpoint("transfer.frame", KEY, index=2) == Fault("duplicate")


@pytest.mark.parametrize("action", ["corrupt", "truncate"])
@pytest.mark.parametrize("amount", [1, 3, 64, 1000])
def test_exactly_so_many_bytes_are_spoiled(action: str, amount: int) -> None:
    data = np.arange(64, dtype=np.uint8)
    (rule,) = parse(f"transfer.frame_bytes:{action}({amount})")
    fault = rule.act()
    assert fault is not None
    fault.spoil(data)
    wrong = np.flatnonzero(data != np.arange(64))
    assert len(wrong) == min(amount, 64)
    assert action == "corrupt" or wrong[-1] == 63


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill.after_lunch:kill", "no place 'prefill.after_lunch'"),
        ("prefill.after_finish:explode", "can't explode"),
        ("prefill.after_finish:corrupt(1)", "can't corrupt"),
        ("transfer.frame:reorder", "can't reorder"),
        ("transfer.queued:reorder(2)", "takes no argument"),
        ("prefill.after_finish,chunk=1:kill", "doesn't tell chunk"),
        ("prefill.after_finish:kill(9)", "takes no argument"),
        ("prefill.after_finish,share=often:kill", "often"),
        ("prefill.after_finish:sleep(1.2.3)", "1.2.3"),
        ("prefill.after_finish", "is not of the form"),
        ("prefill.after_finish:kill:kill", "is not of the form"),
    ],
)
def test_a_mistake_is_told(text: str, says: str) -> None:
    with pytest.raises(FailpointError) as told:
        parse(f"prefill.after_ack:kill; {text}")
    assert says in str(told.value)
    assert VARIABLE in str(told.value)


@pytest.mark.parametrize(("action", "status"), [("exit(7)", 7), ("kill", -9)])
def test_the_environment_arms_it_at_import_without_torch(action: str, status: int) -> None:
    script = (
        "import sys; from kvrelay.transfer.failpoints import failpoint; assert 'torch' not in sys.modules;"
        "failpoint('prefill.after_ack', ('r', 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={VARIABLE: f"prefill.after_ack:{action}"}, timeout=20, check=False
    )
    assert done.returncode == status


def test_a_mistake_in_the_environment_ends_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kvrelay.transfer.failpoints"],
        env={VARIABLE: "nowhere:kill"},
        timeout=20,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no place 'nowhere'" in done.stderr


@pytest.mark.parametrize(("index", "order"), [(0, [1, 0, 2, 3]), (2, [0, 1, 3, 2]), (3, [0, 1, 2, 3])])
def test_a_reordered_frame_goes_after_the_next_one(arm, index: int, order: list[int]) -> None:
    """And is refused, unless it is the last one: then there is none to go before it."""
    arm(f"transfer.queued,index={index},attempt=1:reorder")
    went: list[int] = []

    async def test() -> None:
        fake = {"fake": FakeTransport()}
        async with pair(TransferConfig(frame_bytes=65536), transports=(fake, fake)) as world:
            submit = world.exporter._links.submit

            def watched(peer: str, epoch: int, job: Job) -> None:
                if isinstance(job, SendJob):
                    went.append(job._frame.index)
                submit(peer, epoch, job)

            world.exporter._links.submit = watched  # type: ignore[method-assign]  # to see what goes by
            count = 4 * (65536 // LAYOUT.block_bytes) * LAYOUT.block_size
            key = ("r", 1)
            world.announce(key, list(range(count)))
            world.compute(key, list(range(LAYOUT.blocks_for(count))))
            ends = world.ends
            await ends.until(lambda: key in ends.imported or key in ends.import_failed)
            await ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            assert went == order
            assert (key in ends.imported) == (index == 3)

    asyncio.run(test())
