"""A deadline that moves later costs no timer, and rings once its time has come."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.alarm import Alarm


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_it_rings_once_when_its_last_time_has_come() -> None:
    async def test() -> None:
        rung: list[float] = []
        alarm = Alarm(lambda: rung.append(time.monotonic()))
        due = 0.0
        for pause in (0.05, 0.1, 0.2):
            due = time.monotonic() + pause
            alarm.set(due)
        while not rung:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)
        assert due <= rung[0] < due + 1
        await asyncio.sleep(0.2)
        assert len(rung) == 1

    run(test)


def test_it_can_be_set_earlier_again_and_off() -> None:
    async def test() -> None:
        rung: list[float] = []
        alarm = Alarm(lambda: rung.append(time.monotonic()))
        alarm.set(time.monotonic() + 60)
        alarm.set(time.monotonic() + 0.05)
        while not rung:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)
        alarm.set(time.monotonic() + 0.05)
        alarm.set(math.inf)
        await asyncio.sleep(0.15)
        alarm.set(time.monotonic() + 0.05)
        alarm.close()
        await asyncio.sleep(0.15)
        assert len(rung) == 1

    run(test)


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

    run(test)


def test_moving_it_later_makes_no_timer() -> None:
    class Loop(asyncio.SelectorEventLoop):
        timers = 0

        def call_at(self, *arguments: object, **options: object) -> asyncio.TimerHandle:
            self.timers += 1
            return super().call_at(*arguments, **options)  # type: ignore[arg-type]  # as it was given

    async def test(loop: Loop) -> None:
        alarm = Alarm(lambda: None)
        for number in range(1000):
            alarm.set(time.monotonic() + 30 + number)
        assert loop.timers == 1
        alarm.close()

    loop = Loop()
    try:
        loop.run_until_complete(test(loop))
    finally:
        loop.close()
