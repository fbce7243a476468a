"""KV from other workers in the scheduler; hand-offs, cancels and ends are in `test_scheduler_machine.py`."""

import pytest
from scheduler_bench import SIZE, Bench, numbers, spans

from support.hash_runner import window_of


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE])
def test_the_prompt_of_a_resumed_sequence_is_not_computed(length: int) -> None:
    bench = Bench(16)
    request = bench.request(numbers(length), 12)
    reservation = bench.scheduler.reserve(request)
    assert reservation.have == (0,)
    assert len(reservation.hold.blocks) == length // SIZE + 1
    sequence = bench.resume(request, reservation)
    plan = bench.launch()
    assert spans(plan) == [(sequence.handle, length, length + 1)]
    assert plan.generated.tolist() == [1]
    bench.land()
    while not sequence.ended:
        (report,) = bench.step()
        assert report.computed == sequence.num_computed
    assert (sequence.recomputed_tokens, sequence.cached_tokens) == (0, 0)
    assert sequence.lifetime.committed is not None
    bench.check_over()


@pytest.mark.parametrize("length", [SIZE, 2 * SIZE + 3, 4 * SIZE])
@pytest.mark.parametrize("window", [SIZE + 3, 3 * SIZE, 5 * SIZE])
def test_a_reservation_takes_what_is_cached(length: int, window: int) -> None:
    """A window's blocks are taken too, as far as they are still there."""
    bench = Bench(16, sides=[window_of(window)])
    request = bench.request(numbers(length), 4)
    first = bench.scheduler.reserve(request)
    bench.resume(request, first)
    second = bench.scheduler.reserve(bench.request(numbers(length), 4))
    # The second one's logits come from the first token, so nothing needs the prompt's last token to be computed.
    whole = length - length % SIZE
    assert second.have == (whole, whole)
    assert second.hold.blocks[: length // SIZE] == first.hold.blocks[: length // SIZE]
    other = bench.scheduler.reserve(bench.request(numbers(length), 4, tenant="other"))
    begin = max(0, length - window + 1) // SIZE * SIZE
    assert other.have == (0, begin)
    second.release()
    other.release()
    bench.drain()
    # Others take the window's blocks: what comes of them then is kept again.
    (side,) = bench.prefix.sides
    side.pool.allocate(side.pool.available, "others").release()
    for expected in (begin, whole):
        asked = bench.request(numbers(length), 4)
        reservation = bench.scheduler.reserve(asked)
        assert reservation.have == (whole, expected)
        bench.resume(asked, reservation)
        bench.drain()


def test_a_reservation_leaves_a_block_for_each_that_runs() -> None:
    bench = Bench(6)
    bench.add(bench.request(numbers(2), 20))
    bench.add(bench.request(numbers(2, 1), 20))
    bench.step()
    assert bench.pool.available == 4
    assert bench.scheduler.reserve(bench.request(numbers(2 * SIZE, 2), 4)) is None
    reservation = bench.scheduler.reserve(bench.request(numbers(2 * SIZE - 1, 2), 4))
    assert bench.pool.available == 2
    reservation.release()
    assert bench.pool.available == 4


def test_reservations_end_where_rows_end() -> None:
    bench = Bench(64, max_sequences=2)
    reservations = [bench.scheduler.reserve(bench.request(numbers(2, n), 4)) for n in range(4)]
    assert [reservation is None for reservation in reservations] == [False, False, False, True]
    reservations[0].release()
    assert bench.scheduler.reserve(bench.request(numbers(2, 4), 4)) is not None


def test_a_sequence_that_waits_for_room_goes_before_reservations() -> None:
    bench = Bench(6)
    bench.add(bench.request(numbers(2 * SIZE), 8))
    bench.step()
    bench.add(bench.request(numbers(4 * SIZE, 1), 2))
    bench.step()
    assert bench.scheduler.reserve(bench.request(numbers(2, 2), 2)) is None
    bench.drain()
    assert bench.scheduler.reserve(bench.request(numbers(2, 2), 2)) is not None


def test_a_reservation_that_was_released_keeps_nothing_from_anybody() -> None:
    bench = Bench(8, max_batch_tokens=8 * SIZE)
    reservation = bench.scheduler.reserve(bench.request(numbers(2, 1), 4))
    bench.add(bench.request(numbers(8 * SIZE - 4), 4, holder=1))
    assert not bench.step()
    reservation.release()
    bench.drain()


def test_one_that_has_its_kv_gives_way_when_the_only_row_needs_a_block() -> None:
    bench = Bench(5, max_sequences=1)
    first = bench.add(bench.request(numbers(SIZE), 20))
    bench.step()
    request = bench.request(numbers(2 * SIZE, 1), 4)
    reservation = bench.scheduler.reserve(request)
    second = bench.resume(request, reservation)
    bench.step()
    third = bench.pool.allocate(bench.pool.available, "elsewhere")
    while not first.ended:
        assert bench.step()
        bench.check()
    third.release()
    bench.drain()
    assert first.recomputed_tokens == 0
    assert second.recomputed_tokens > 0


def test_what_resume_refuses_stays_with_the_caller() -> None:
    bench = Bench(8)
    request = bench.request(numbers(SIZE + 1), 4, stop=(7,))
    reservation = bench.scheduler.reserve(request)
    small = bench.pool.allocate(1, "small")
    with pytest.raises(ValueError, match="first_token is 7"):
        bench.scheduler.resume(request, 7, reservation.hold)
    with pytest.raises(ValueError, match="first_token has the id 251; allowed: 0 to 250"):
        bench.scheduler.resume(request, 251, reservation.hold)
    with pytest.raises(ValueError, match="'small' has 1 blocks; 9 tokens"):
        bench.scheduler.resume(request, 8, small)
    assert not reservation.hold.released
    assert not small.released
    assert not bench.scheduler.has_work
