"""A client cancels in each state of its hand-off: both sides free their blocks at once, by notice.

Leases and timeouts are a minute here, so only a notice can free a block in time. Where a state needs a decode worker
without free blocks, or without a free row, another request takes them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest

from kvrelay.client import InvalidRequest
from support.chaos import CLEAR, Weather
from support.faults import ALL_TRANSPORTS, PROMPT, TRANSFER, Scene, scene, until
from support.hash_worker import BEAT_SECONDS, STEP_SECONDS, WORKER_LAYOUT
from support.processes import wait_until

FREE_SECONDS = 5.0
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
    chaos = request.param != "auto"
    with scene(
        tmp_path_factory.mktemp("cancels"),
        [] if chaos else [SLOW_READS],
        prefill=1,
        decode=1,
        chaos=chaos,
        variables={STEP_SECONDS: 0.05, BEAT_SECONDS: 0.02},
        transfer={**TRANSFER, **MINUTE, "frame_timeout_seconds": 5.0, "transport": request.param},
        decode_engine={"kv_memory_bytes": DECODE_BLOCKS * WORKER_LAYOUT.block_bytes, "max_sequences": 1},
    ) as it:
        it.ask("the first one, which makes the link", count=2)
        it.settle(3)
        yield it


class Seen(NamedTuple):
    """A request as its client and the workers' status show it."""

    tokens: int
    prefill: int
    """Blocks held there."""
    decode: int


class State(NamedTuple):
    """A state of a hand-off."""

    length: int
    """Tokens of the prompt."""
    reached: Callable[[Seen], bool]
    beside: int = 0
    """Tokens of the prompt of another request that decodes in the only row meanwhile; 0 if there is none."""


STATES = {
    "admitted while decode has no free block": State(LONG, lambda seen: seen.prefill > 0 and not seen.tokens, LARGE),
    "prefilling": State(LONG, lambda seen: not seen.tokens and seen.prefill > 0 and seen.decode > 0),
    "exported while decode has no free block": State(PROMPT, lambda seen: seen.tokens == 1 and seen.prefill > 0, LARGE),
    "transferring": State(PROMPT, lambda seen: seen.tokens == 1 and seen.prefill > 0 and seen.decode > 0),
    "committed while decode has no row": State(
        PROMPT,
        lambda seen: seen.tokens == 1 and not seen.prefill and seen.decode >= WORKER_LAYOUT.blocks_for(PROMPT),
        40,
    ),
    "decoding": State(PROMPT, lambda seen: seen.tokens >= 3),
}


@contextmanager
def decoding(it: Scene, name: str, length: int) -> Iterator[int]:
    """During the block, a request decodes in the only row; yields the most blocks that it may hold there."""
    request = it.begin(name, length, 90)
    wait_until(lambda: request.tokens >= 3 and it.held("prefill-0") == 0, f"{name} decodes")
    yield WORKER_LAYOUT.blocks_for(length + 90) + 1
    request.cancel()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.more if "exported" in name or "row" in name else ()) for name in STATES],
)
def test_a_cancel_frees_both_sides_by_notice(it: Scene, name: str) -> None:
    state = STATES[name]
    before = 0 if it.chaos is None else it.link().passed
    if it.chaos is not None and name == "transferring":
        it.link().set(forward=Weather(rate=0.3e6))
    with decoding(it, f"beside {name}", state.beside) if state.beside else nullcontext(0) as beside:
        request = it.begin(name, state.length)

        def seen() -> Seen:
            return Seen(request.tokens, it.held("prefill-0"), it.held("decode-0"))

        wait_until(lambda: state.reached(seen()), lambda: f"its state; {seen()}")
        if it.chaos is not None and name == "prefilling":
            wait_until(lambda: it.link().passed > before, "bytes move")
        request.cancel()
        took = until(lambda: it.held("prefill-0") == 0 and it.held("decode-0") <= beside, "both are free", FREE_SECONDS)
    print(f"{name}: both are free after {took:.3f} s")
    if it.chaos is not None:
        it.link().set(forward=CLEAR)
    it.settle(3)


def test_a_prompt_too_large_for_decode_is_refused_with_the_numbers(it: Scene) -> None:
    it.may_fail.add("too large")
    with pytest.raises(InvalidRequest, match=f"holds {DECODE_BLOCKS * WORKER_LAYOUT.block_size}"):
        it.ask("too large", DECODE_BLOCKS * WORKER_LAYOUT.block_size)
    it.settle(3)
