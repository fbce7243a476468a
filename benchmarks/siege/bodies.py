"""The row of bodies: the worst of each endpoint, found by trying many, are sent again and again."""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from siege.cluster import MIB, Besieged, besieged, send
from siege.witness import (
    Given,
    Measure,
    Witness,
    alive_and_whole,
    at_most,
    first_tokens,
    loading,
    none_of,
    quantile,
    ttft,
)
from support.costly import METHODS, PATHS, Bodies, messages

CONNECTIONS = 10
LIMIT = 4 * MIB
"""Bytes of the largest body."""
SIZES = (64 * 1024, LIMIT)
PROBES_A_SECOND = 3.0
"""Bodies that are tried in a second, to find the worst ones."""
SEARCH_SECONDS = 90.0
"""Longest time for which bodies are tried."""
HELD_SECONDS = 0.020
TTFT_SECONDS = 0.100


def known() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Bodies that held a router's loop once."""
    ids = json.dumps({"tokens": [-1] * 500_000}, separators=(",", ":")).encode()
    yield "/detokenize", lambda: ids
    yield "/v1/completions", lambda: json.dumps({"prompt": [[5]] * 1000, "max_tokens": 1}).encode()
    yield "/v1/completions", lambda: json.dumps({"prompt": "a", "stop": [5] * 65_000}).encode()
    chat: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "r" * (LIMIT - 200), "content": "a"}]}
    yield "/v1/chat/completions", lambda: json.dumps(chat).encode()
    yield "/v1/chat/completions", lambda: json.dumps({"messages": [{"role": "user", "content": [5] * 65_000}]}).encode()


def candidates(seed: int, each: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """`each` bodies of every endpoint and size, drawn among all, after those that are known to have been bad."""
    yield from known()
    rng = random.Random(f"bodies {seed}")
    for size in SIZES:
        for path, (kind, base, numbers) in PATHS.items():
            whole = Bodies(kind, base).of(size, numbers)
            yield from ((path, make) for _, make in rng.sample(whole, min(each, len(whole))))
        for method, message in METHODS.items():
            calls = messages(type(message), message, size)
            path = f"/kvrelay.v1.InferenceService/{method}"
            yield from ((path, make) for _, make in rng.sample(calls, min(each, len(calls))))


def worst_bodies(place: Besieged, given: Given) -> dict[tuple[str, str], dict[str, float]]:
    """Finds the worst bodies of each endpoint: those that hold the event loop longest and those that take most of the
    router's CPU time. Returns the seconds of both by path and file."""
    seconds = min(SEARCH_SECONDS, given.seconds)
    each = max(1, int(seconds * PROBES_A_SECOND / (len(SIZES) * (len(PATHS) + len(METHODS)))))
    worst: dict[tuple[str, str], tuple[float, Path, dict[str, float]]] = {}
    deadline, router = time.monotonic() + 2 * seconds, psutil.Process(place.pids["router-0"])
    for number, (path, make) in enumerate(candidates(given.seed, each)):
        if time.monotonic() > deadline:
            break
        data = make()
        before, since = router.cpu_times(), time.monotonic()
        send(place, path, data)
        after = router.cpu_times()
        cost = {
            "cpu": after.user + after.system - before.user - before.system,
            "held": max(place.holds(since), default=0),
        }
        for kind, value in cost.items():
            if value > worst.get((path, kind), (-1.0,))[0]:
                file = place.cluster.folder / f"body-{number}"
                file.write_bytes(data)
                worst[path, kind] = value, file, cost
    return {(path, str(file)): cost for (path, _), (_, file, cost) in worst.items()}


def bodies(given: Given) -> list[Measure]:
    with besieged(given.folder) as place:
        witness = Witness(place.reach)
        idle = witness.alone(given.seconds)
        worst = worst_bodies(place, given)
        requests = sorted(worst)
        since = time.monotonic()
        with (
            witness.beside() as seen,
            loading("bodies", place.reach, connections=CONNECTIONS, requests=requests) as attack,
        ):
            time.sleep(given.seconds)
            said = attack.finish()
        over = quantile(first_tokens(seen), 0.99) - quantile(first_tokens(idle), 0.99)
        held = sorted(place.holds(since))
        sent = sum(said["outcomes"].values())
        return [
            at_most("TTFT p99 over idle's", over, TTFT_SECONDS, "s", idle=ttft(idle), siege=ttft(seen)),
            at_most("the router's loop held", max(held, default=0.0), HELD_SECONDS, "s", longest=held[-20:]),
            none_of("answers with 5xx but 503 and 504", defects(said), outcomes=said["outcomes"]),
            Measure(
                "bodies answered",
                "some",
                f"{sent} of {len(requests)} kinds",
                sent > len(requests),
                {"alone": [[path, Path(file).name, cost] for (path, file), cost in worst.items()]},
            ),
            *witness.measures(seen),
            *alive_and_whole(place),
        ]


def defects(said: dict[str, Any]) -> list[str]:
    """Outcomes that only a defect can have."""
    bad = ("HTTP 500", "HTTP 501", "HTTP 502", "AioRpcError StatusCode.INTERNAL", "AioRpcError StatusCode.UNKNOWN")
    return [
        f"{number} of {kind}: {said['examples'].get(kind)}" for kind, number in said["outcomes"].items() if kind in bad
    ]
