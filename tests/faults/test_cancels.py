"""A client cancels in each state of its hand-off: both sides free their blocks at once, by notice.

Leases and timeouts are a minute here, so only a notice can free a block in time. Where a state needs a decode worker
without free blocks, or without a free row, another request takes them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvrelay.client import InvalidRequest
from support.chaos import CLEAR, Weather
from support.faults import ALL_TRANSPORTS, PROMPT, TRANSFER, Scene, scene, until
from support.hash_worker import BEAT_SECONDS, STEP_SECONDS, WORKER_LAYOUT
from support.processes import wait_until

FREE_SECONDS = 1.5
"""Seconds until blocks are free: far more than a notice takes, for a busy machine, and far less than MINUTE."""
MINUTE = dict.fromkeys(
    ("lease_seconds", "grant_timeout_seconds", "prefill_timeout_seconds", "transfer_timeout_seconds"), 60.0
)
DECODE_BLOCKS = 66
LARGE = 420
"""Tokens of a prompt that leaves too few blocks for another on the decode worker."""
LONG = 480
"""Tokens of a prompt that takes eight steps to compute."""


SLOW_READS = "transfer.read,request=transferring:sleep(0.15)"
"""Makes shared memory slow, which no proxy carries."""


@pytest.fixture(scope="module", params=ALL_TRANSPORTS)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    by_shm = request.param == "shm"
    with scene(
        tmp_path_factory.mktemp("cancels"),
        [SLOW_READS] if by_shm else [],
        prefill=1,
        decode=1,
        chaos=not by_shm,
        variables={STEP_SECONDS: 0.05, BEAT_SECONDS: 0.02},
        transfer={**TRANSFER, **MINUTE, "frame_timeout_seconds": 5.0, "transport": request.param},
        decode_engine={"kv_memory_bytes": DECODE_BLOCKS * WORKER_LAYOUT.block_bytes, "max_sequences": 1},
    ) as it:
        it.ask("the first one, which makes the link", count=2)
        it.settle(3)
        yield it


@contextmanager
def decoding(it: Scene, name: str, length: int) -> Iterator[int]:
    """During the block, a request decodes in the only row; yields the most blocks that it may hold there."""
    request = it.begin(name, length, 90)
    wait_until(lambda: request.tokens >= 3 and it.held("prefill-0") == 0, f"{name} decodes", seconds=5)
    yield WORKER_LAYOUT.blocks_for(length + 90) + 1
    request.cancel()
    it.settle(3)


def free_after_cancel(
    it: Scene, name: str, length: int, reached: Callable[[int, int, int], bool], beside: int = 0
) -> float:
    """Cancels a request once `reached` (tokens received, blocks held on prefill, on decode) is true. Returns seconds
    until both sides have freed their blocks, except `beside` blocks of another request on decode."""
    request = it.begin(name, length)
    wait_until(
        lambda: reached(request.tokens, it.held("prefill-0"), it.held("decode-0")),
        lambda: f"its state; {request.tokens} tokens, {it.held('prefill-0')} and {it.held('decode-0')} blocks",
        seconds=5,
    )
    request.cancel()
    took = until(lambda: it.held("prefill-0") == 0 and it.held("decode-0") <= beside, "both are free")
    print(f"{name}: both are free after {took:.3f} s")
    return took


def carried(it: Scene) -> int:
    """Bytes that the proxy has passed on; 0 where there is none."""
    return 0 if it.chaos is None else it.link().passed


def test_admitted_while_decode_has_no_free_block(it: Scene) -> None:
    with decoding(it, "beside admitted", LARGE) as beside:
        took = free_after_cancel(it, "admitted", LONG, lambda tokens, here, there: here > 0 and tokens == 0, beside)
    assert took < FREE_SECONDS


def test_prefilling(it: Scene) -> None:
    before = carried(it)

    def reached(tokens: int, here: int, there: int) -> bool:
        return tokens == 0 and here > 0 and there > 0 and (it.chaos is None or carried(it) > before)

    assert free_after_cancel(it, "prefilling", LONG, reached) < FREE_SECONDS
    it.settle(3)


def test_exported_while_decode_has_no_free_block(it: Scene) -> None:
    with decoding(it, "beside exported", LARGE) as beside:
        took = free_after_cancel(it, "exported", PROMPT, lambda tokens, here, there: tokens == 1 and here > 0, beside)
    assert took < FREE_SECONDS


def test_transferring_over_a_slow_link(it: Scene) -> None:
    if it.chaos is not None:
        it.link().set(forward=Weather(rate=0.3e6))

    def reached(tokens: int, here: int, there: int) -> bool:
        return tokens == 1 and here > 0 and there > 0

    assert free_after_cancel(it, "transferring", PROMPT, reached) < FREE_SECONDS
    if it.chaos is not None:
        it.link().set(forward=CLEAR)
    it.settle(3)


def test_committed_while_decode_has_no_row(it: Scene) -> None:
    with decoding(it, "beside committed", 40) as beside:
        whole = WORKER_LAYOUT.blocks_for(PROMPT)

        def reached(tokens: int, here: int, there: int) -> bool:
            return tokens == 1 and here == 0 and there >= whole

        took = free_after_cancel(it, "committed", PROMPT, reached, beside)
    assert took < FREE_SECONDS


def test_decoding(it: Scene) -> None:
    assert free_after_cancel(it, "decoding", PROMPT, lambda tokens, here, there: tokens >= 3) < FREE_SECONDS
    it.settle(3)


def test_a_prompt_too_large_for_decode_is_refused_with_the_numbers(it: Scene) -> None:
    it.may_fail.add("too large")
    with pytest.raises(InvalidRequest, match=f"holds {DECODE_BLOCKS * WORKER_LAYOUT.block_size}"):
        it.ask("too large", DECODE_BLOCKS * WORKER_LAYOUT.block_size)
    it.settle(3)
