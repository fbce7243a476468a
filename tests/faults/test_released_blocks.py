"""A link may read or write blocks long after their request has ended; until then no other request gets them.

Leases last 50 ms, pools are small and churned, reads of the sending link are delayed by 2 s, links hold back bytes in
mid-frame, clients cancel, and decode's event loop is sometimes blocked for longer than a lease. If a block were reused
while a link still uses it, another request's KV would be sent or overwritten, and the hash model's next token would
show it.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.client import KvrelayError
from support.chaos import HELD, Weather
from support.faults import Scene, scene
from support.hash_worker import STEP_SECONDS, WORKER_LAYOUT

LEASE_SECONDS = 0.05
READ_SECONDS = 2.0
BLOCKS = 24
AT_ONCE = 12
COUNT = 6
MOST_ROUNDS = 3
TRANSFER = {
    "frame_bytes": 2**16,
    "lease_seconds": LEASE_SECONDS,
    "frame_timeout_seconds": 3.0,
    "grant_timeout_seconds": 10.0,
    "transfer_timeout_seconds": 10.0,
}
STALLS = ("decode.before_commit,share=0.04:sleep(0.15)", "decode.after_reserve,share=0.02:sleep(0.15)")


@contextmanager
def gusts(it: Scene, seed: int) -> Iterator[None]:
    """During the block, links hold back their bytes for 0.2 s at a time, and are slow in between."""
    over = threading.Event()
    chance = random.Random(seed)

    def blow() -> None:
        links = [it.link(prefill, decode) for prefill in it.prefills for decode in it.decodes]
        while not over.wait(0.05):
            link = chance.choice(links)
            link.set(forward=HELD)
            over.wait(0.2)
            link.set(forward=Weather(rate=0.5e6))
        it.chaos.clear()

    thread = threading.Thread(target=blow, name="gusts")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def churn(it: Scene, seed: int, requests: int) -> Counter[str]:
    """Requests of all lengths, a quarter of them cancelled; returns how many finished, were cancelled and failed."""
    chance = random.Random(seed)
    asked = [(f"{seed} {number}", chance.randrange(9, 60), chance.random() < 0.25) for number in range(requests)]

    def one(name: str, length: int, cancel: bool) -> str:
        it.may_fail.add(name)
        if cancel:
            request = it.begin(name, length, COUNT)
            time.sleep(random.Random(name).random() * 0.3)
            request.cancel()
            return "cancelled"
        try:
            it.ask(name, length, COUNT)
        except KvrelayError:
            return "failed"
        return "finished"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(lambda call: one(*call), asked))


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.more
@pytest.mark.parametrize(
    ("transport", "share", "requests"),
    [
        ("tcp", 0.02, 120),
        *(pytest.param(name, share, 1000, marks=SLOW) for share in (0.02, 1.0) for name in ("tcp", "shm", "gloo")),
    ],
)
def test_no_read_after_release(tmp_path: Path, transport: str, share: float, requests: int) -> None:
    """`share` of the frames is read late.

    Leases end in real time, so a busy machine finishes fewer of the requests: they are asked in rounds until enough
    whole streams were judged.
    """
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rules = [f"transfer.read,share={share},seed={seed}:sleep({READ_SECONDS})", *STALLS]
    memory = {"kv_memory_bytes": BLOCKS * WORKER_LAYOUT.block_bytes, "max_context": 128}
    with scene(
        tmp_path,
        rules,
        chaos=True,
        losses=True,  # so many hand-offs fail that some requests fail too; their tokens must still be right
        variables={STEP_SECONDS: 0.0},
        engine=memory,
        transfer={**TRANSFER, "transport": transport},
    ) as it:
        ends: Counter[str] = Counter()
        with gusts(it, seed):
            for number in range(MOST_ROUNDS):
                ends += churn(it, seed + number, requests)
                if ends["finished"] > requests / 4:
                    break
        late = len(it.failures())
        print(f"{dict(ends)} in {number + 1} rounds; {late} attempts failed")
        it.settle(READ_SECONDS + 10)
        assert ends["finished"] > requests / 4, "whole streams were judged"
        assert late > requests / 100, "leases ended while blocks were waiting to be read"
