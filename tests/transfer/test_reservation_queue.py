"""Offers that wait for blocks get them in the scheduler's order, and none passes another one unasked."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.request import Urgency
from kvrelay.transfer.protocol.messages import Key

URGENCIES = [Urgency(rank, priority, due) for rank in (0, 10) for priority in (0, 1) for due in (5.0, 9.0)]


@given(
    urgencies=st.lists(st.sampled_from(URGENCIES), min_size=6, max_size=6),
    steps=st.lists(st.tuples(st.sampled_from(("ask", "refuse", "leave")), st.integers(0, 5)), max_size=60),
)
def test_no_offer_overtakes_a_more_urgent_or_older_one_that_waits(
    urgencies: list[Urgency], steps: list[tuple[str, int]]
) -> None:
    queue, waiting = ReservationQueue(), list[Key]()

    def urgency(key: Key) -> Urgency:
        return urgencies[int(key[0])]

    for step, number in steps:
        key = (str(number), 1)
        if step == "ask":
            others = [each for each in waiting if each != key]
            older = others[: waiting.index(key)] if key in waiting else others
            before = [each for each in others if urgency(each) < urgency(key)]
            equal = [each for each in older if urgency(each) == urgency(key)]
            assert queue.passing(key, urgency(key)) == bool(before or equal)
        elif step == "refuse":
            queue.wait(key, urgency(key))
            if key not in waiting:
                waiting.append(key)
        else:
            assert queue.leave(key) == (key in waiting)
            waiting = [other for other in waiting if other != key]
        assert queue.first == min(waiting, key=urgency, default=None)
