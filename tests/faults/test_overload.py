"""Four times as many long streams as the KV pool holds: they wait before they begin, and what has begun goes on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrelay.client import Client
from support.faults import scene
from support.hash_worker import STEP_SECONDS
from support.router_fakes import key_file

POOL_TOKENS = 1024
LONG = 256
"""Tokens of a long completion, whose prompt has PROMPT: three of them fill the pool's share of one tenant."""
PROMPT = 24
OVERSUBSCRIBED = 4
SHORT = 16
IDLE_SECONDS = 4.0
"""Seconds without a token after which a router gives a stream up: far less than the crowd takes."""
GAP_SECONDS = 2.0
"""Longest wait of another tenant's short request for its next token, in seconds."""


@pytest.mark.more
def test_no_begun_stream_fails_and_anothers_short_one_is_not_stalled(tmp_path: Path) -> None:
    """One worker of each role, and two routers that know two tenants."""
    streams, over = OVERSUBSCRIBED * POOL_TOKENS // (LONG + PROMPT), threading.Event()
    with ExitStack() as stack:
        it = stack.enter_context(
            scene(
                tmp_path / "cluster",
                prefill=1,
                decode=1,
                routers=2,
                variables={STEP_SECONDS: 0.008},
                engine={"kv_memory_bytes": POOL_TOKENS * 1024, "speculation": {"method": "off"}},
                router={"idle_timeout_seconds": IDLE_SECONDS, "api_keys": key_file(tmp_path, many="", few="")},
            )
        )
        routers = it.cluster.router.split(",")
        many = [stack.enter_context(Client(order, api_key="many")) for order in (routers, routers[::-1])]
        few = stack.enter_context(Client(routers, api_key="few"))
        pool = stack.enter_context(ThreadPoolExecutor(streams + 1))

        def short_ones() -> int:
            number = 0
            while not over.is_set():
                it.begin(f"short {number}", PROMPT, SHORT, few).result()
                number += 1
            return number

        running = pool.submit(short_ones)
        try:
            # Two rounds: what is usual is unknown in the first one.
            for turn in range(2):
                names = [f"long {turn} {number}" for number in range(streams)]
                list(
                    pool.map(lambda name, client: it.begin(name, PROMPT, LONG, client).result(), names, many * streams)
                )
        finally:
            over.set()
        assert running.result() > 1
        assert it.history.longest_silence("short", since="token") < GAP_SECONDS
        assert [it.failures(router) for router in it.routers] == [[], []]
        it.settle(5)
