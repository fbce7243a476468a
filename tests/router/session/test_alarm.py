"""A deadline that moves later costs no timer, and rings once its time has come."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.alarm import Alarm
from support.router_fakes import until


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([-1.0, 0.0, 1e-6, 0.0004, 0.0011, 0.005, 60.0, math.inf]), min_size=1, max_size=8),
    st.booleans(),
)
async def test_it_rings_once_when_its_last_time_has_come_and_not_when_it_is_closed(
    pauses: list[float], closed: bool
) -> None:
    rung: list[float] = []
    alarm, due = Alarm(lambda: rung.append(time.monotonic())), 0.0
    for pause in pauses:
        due = time.monotonic() + pause
        alarm.set(due)
    if closed:
        alarm.close()
    elif pauses[-1] < 1:
        await until(lambda: rung, "it rings", 20)
        assert due <= rung[0]
    await asyncio.sleep(0.006)  # the earlier times are past
    assert len(rung) == (pauses[-1] < 1 and not closed)
    alarm.close()


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
