"""A deadline that moves later costs no timer, and rings once its time has come."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.alarm import Alarm
from support.router_fakes import until

pytestmark = pytest.mark.both_loops


async def test_it_rings_once_when_its_last_time_has_come_and_not_when_it_is_off() -> None:
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(time.monotonic()))
    due = 0.0
    for pause in (0.05, 0.1, 0.2):
        due = time.monotonic() + pause
        alarm.set(due)
    await until(lambda: rung, "it rings")
    assert due <= rung[0] < due + 1
    # Earlier than it was set to.
    alarm.set(time.monotonic() + 60)
    alarm.set(time.monotonic() + 0.05)
    await until(lambda: len(rung) > 1, "it rings")
    alarm.set(time.monotonic() + 0.05)
    alarm.set(math.inf)
    await asyncio.sleep(0.15)
    alarm.set(time.monotonic() + 0.05)
    alarm.close()
    await asyncio.sleep(0.15)
    assert len(rung) == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 1e-6, 0.0004, 0.0011, 0.005, 60.0]), min_size=1, max_size=8))
def test_times_that_are_past_or_near_ring_once(pauses: list[float]) -> None:
    async def test() -> None:
        rung = asyncio.Event()
        alarm = Alarm(rung.set)
        for pause in pauses:
            alarm.set(time.monotonic() + pause)
        if pauses[-1] < 1:
            await asyncio.wait_for(rung.wait(), 5)
            rung.clear()
            await asyncio.sleep(0)
        assert not rung.is_set()
        alarm.close()

    asyncio.run(test())


async def test_moving_it_later_makes_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[object]()

    class Counting:
        """The running event loop, which counts its timers."""

        def __getattr__(self, name: str) -> object:
            if name.startswith("call_"):
                timers.append(name)
            return getattr(loop, name)

    monkeypatch.setattr(asyncio, "get_running_loop", Counting)
    alarm = Alarm(lambda: None)
    for number in range(1000):
        alarm.set(time.monotonic() + 30 + number)
    assert len(timers) == 1
    alarm.close()
