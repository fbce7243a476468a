"""Four times as many long streams as the KV pool holds: they wait before they begin, and what has begun goes on."""

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvrelay.client import Client, Completion
from support.faults import Scene, oracle_of_all, prompt_of, sampling_options, scene, seed_of
from support.hash_worker import STEP_SECONDS

POOL_TOKENS = 1024
LONG = 256
"""Tokens of a long completion, whose prompt has PROMPT: three of them fill the pool's share of one tenant."""
PROMPT = 24
OVERSUBSCRIBED = 4
SHORT = 16
IDLE_SECONDS = 2.0
"""Seconds without a token after which a router gives a stream up: far less than the crowd takes."""
GAP_SECONDS = 1.0
"""Longest wait of another tenant's short request for its next token, in seconds."""
KEYS = {"many": "key of many", "few": "key of few"}


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("overload")
    with crowded(folder) as it:
        yield it


def crowded(folder: Path) -> AbstractContextManager[Scene]:
    """One worker of each role, and two routers that know two tenants."""
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
    return scene(
        folder,
        prefill=1,
        decode=1,
        routers=2,
        variables={STEP_SECONDS: 0.004},
        engine={"kv_memory_bytes": POOL_TOKENS * 1024, "speculation": {"method": "off"}},
        router={"idle_timeout_seconds": IDLE_SECONDS, "api_keys": str(keys)},
    )


def ask(client: Client, name: str, count: int) -> Completion:
    """A request whose tokens are those of an undisturbed run; most names draw them at random."""
    options = sampling_options(seed_of(name)) | {"max_tokens": count, "ignore_eos": True}
    completion = client.complete(prompt_of(name, PROMPT), timeout=120, **options)
    assert list(completion.token_ids) == oracle_of_all([(prompt_of(name, PROMPT), count, seed_of(name))])[0]
    assert completion.timeline.retries == 0
    return completion


class Short:
    """The longest time between two tokens of one tenant's short requests, one after another, until `stop`."""

    def __init__(self, client: Client) -> None:
        self.gaps: list[float] = []
        self.waits: list[float] = []
        """Seconds to the first token."""
        self._client = client
        self._over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            last = began = time.monotonic()
            options = sampling_options(seed_of(f"short {number}")) | {"max_tokens": SHORT, "ignore_eos": True}
            longest = 0.0
            for chunk in self._client.generate(prompt_of(f"short {number}", PROMPT), timeout=60, **options):
                now = time.monotonic()
                if chunk.token_ids:
                    if last is began:
                        self.waits.append(now - began)
                    else:
                        longest = max(longest, now - last)
                    last = now
            self.gaps.append(longest)

    def stop(self) -> None:
        self._over.set()


@pytest.mark.more
def test_no_begun_stream_fails_and_anothers_short_one_is_not_stalled(it: Scene) -> None:
    streams = OVERSUBSCRIBED * POOL_TOKENS // (LONG + PROMPT)
    routers = it.cluster.router.split(",")
    with (
        Client(",".join(routers), api_key=KEYS["many"]) as first,
        Client(",".join(reversed(routers)), api_key=KEYS["many"]) as second,
        Client(it.cluster.router, api_key=KEYS["few"]) as other,
        ThreadPoolExecutor(streams + 1) as pool,
    ):
        short = Short(other)
        running = pool.submit(short.run)
        try:
            # Two rounds: what is usual is unknown in the first one.
            for turn in range(2):
                names = [f"long {turn} {number}" for number in range(streams)]
                clients = [first, second] * streams
                list(pool.map(lambda client, name: ask(client, name, LONG), clients, names))
        finally:
            short.stop()
        running.result()
    assert len(short.gaps) > 1
    assert max(short.gaps) < GAP_SECONDS, short.gaps
    for router in it.routers:
        assert not it.failures(router)
    it.cluster.wait_idle(5)
