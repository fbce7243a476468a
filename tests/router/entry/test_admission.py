"""Admission: how many calls and bytes a router takes at once."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.entry.admission import CHARGE, PEER_SHARE, RESERVED_SHARE, Admission, Place, Ticket
from kvrelay.router.errors import Exhausted
from support.router_fakes import entries

MAX_CALLS, MAX_BYTES = 32, 2000
RESERVE = MAX_CALLS // RESERVED_SHARE


@dataclass(eq=False)
class Open:
    """A call that was admitted."""

    holder: str
    ticket: Ticket
    end: Callable[[], object]

    @property
    def waits(self) -> bool:
        return not self.ticket.begun

    @property
    def alive(self) -> bool:
        return not self.ticket.displaced


def steps() -> st.SearchStrategy[list[tuple[str, str, int, int]]]:
    kinds = st.sampled_from(["admit"] * 6 + ["begin", "arrive", "end"])
    # One holder sends most of them.
    return st.lists(st.tuples(kinds, st.sampled_from("aaaabc"), st.integers(0, 30), st.integers(0, 63)), max_size=120)


@settings(max_examples=200)
@given(steps())
def test_calls_and_bytes_are_bounded_shared_and_come_back(given_: list[tuple[str, str, int, int]]) -> None:
    """A newcomer is refused only if no larger holder has a call that has not begun."""
    admission = Admission(MAX_CALLS, MAX_BYTES)
    open_: list[Open] = []
    with ExitStack() as all_:
        for kind, holder, size, at in given_:
            known = open_[at % len(open_)] if open_ else None
            if kind == "admit":
                calls, nbytes = Counter(each.holder for each in open_), _bytes(open_)
                waits = Counter(each.holder for each in open_ if each.waits)
                own = ExitStack()
                try:
                    ticket = own.enter_context(admission.admit(holder, size))
                except Exhausted:
                    more = nbytes[holder] + CHARGE * size
                    if "max_requests" not in str(sys.exc_info()[1]):
                        others = [name for name in waits if name != holder and nbytes[name] > more]
                        full = sum(nbytes.values()) + CHARGE * size > MAX_BYTES
                        assert more > MAX_BYTES // PEER_SHARE or (
                            full and not any(_held(open_, other) for other in others)
                        )
                    else:
                        assert sum(calls.values()) >= MAX_CALLS - RESERVE
                        assert not [name for name in waits if calls[name] >= calls[holder] + 2]
                        equal = MAX_CALLS // (len({*calls, holder}) + 1)
                        assert sum(calls.values()) == MAX_CALLS or calls[holder] >= equal
                else:
                    all_.push(own)
                    open_.append(Open(holder, ticket, own.close))
                    victims = [each for each in open_ if not each.alive]
                    assert not any(each.ticket.begun or each.holder == holder for each in victims)
            elif known is not None and kind == "begin":
                known.ticket.begun = True
            elif known is not None and kind == "arrive":
                with suppress(Exhausted):
                    known.ticket.resize(size)
            elif known is not None:
                known.end()
                open_.remove(known)
            open_ = [each for each in open_ if each.alive]
            assert admission.calls == len(open_) <= MAX_CALLS
            assert admission.nbytes == sum(each.ticket.nbytes for each in open_) <= MAX_BYTES
            for count in Counter(each.holder for each in open_).values():
                assert count <= MAX_CALLS - RESERVE
    assert admission.calls == admission.nbytes == entries(admission) == 0


def _bytes(calls: list[Open]) -> Counter[str]:
    held: Counter[str] = Counter()
    for each in calls:
        held[each.holder] += each.ticket.nbytes
    return held


def _held(calls: list[Open], holder: str) -> bool:
    return any(each.holder == holder and each.waits and each.ticket.nbytes for each in calls)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 8),
    st.integers(0, 5),
)
async def test_the_completions_of_calls_take_turns_and_all_run(
    calls: list[tuple[str, int, int]], concurrent: int, newcomers: int
) -> None:
    """Calls that give way run again; no more run than there are places, or than their key may have."""
    running: Counter[str] = Counter()
    done: Counter[int] = Counter()

    admission = Admission(MAX_CALLS, MAX_BYTES)

    async def completion(call: int, holder: str, place: Place, turns: int) -> None:
        with place.ticket.lent(place):
            while True:
                begun: list[bool] = []
                try:
                    async with asyncio.timeout(None) as scope:
                        with place.work(scope, partial(bool, begun)):
                            await asyncio.sleep(0)
                            begun.append(True)
                            running[holder] += 1
                            try:
                                assert running.total() <= MAX_CALLS
                                assert not concurrent or running[holder] <= concurrent
                                for _ in range(turns):
                                    await asyncio.sleep(0)
                            finally:
                                running[holder] -= 1
                            done[call] += 1
                            return
                except TimeoutError:
                    await place.ticket.again(place)

    async def one(call: int, holder: str, count: int, turns: int) -> None:
        with admission.admit(holder, 1, key=holder, concurrent=concurrent) as ticket:
            ticket.begun = True  # a call that fails as a whole is not what is tested here
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(completion(call, holder, await ticket.place(), turns))

    tasks = [asyncio.create_task(one(at, *call)) for at, call in enumerate(calls)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(one(-1, "c", 1, 1)) for _ in range(newcomers)]
    for at, task in enumerate(tasks):
        try:
            await task
        except Exhausted:
            done[at if at < len(calls) else -1] += calls[at][1] if at < len(calls) else 1
    assert done == Counter(
        {at: count for at, (_, count, _) in enumerate(calls)} | ({-1: newcomers} if newcomers else {})
    )
    assert admission.calls == admission.nbytes == entries(admission) == 0


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_place_passes_over_completions_that_were_cancelled_in_the_same_turn(calls: int) -> None:
    admission = Admission(calls, MAX_BYTES)
    with admission.admit("a", 0) as ticket, ExitStack() as others:
        for number in range(calls - 1):
            others.enter_context(admission.admit(f"b{number}", 0))
        own = await ticket.place()
        own.ticket.begun = True
        waiting = [asyncio.create_task(ticket.place()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        others.close()  # its place goes to one that waits
        admission.take_back(own)
        _, left = await asyncio.wait(waiting, timeout=5)
        assert not left
        assert [task.cancelled() for task in waiting] == [True, True, False]
        admission.take_back(waiting[2].result())
    assert admission.calls == entries(admission) == 0
