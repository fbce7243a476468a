"""The rows of the siege. Each starts a cluster, attacks it, and returns its measures."""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from nemesis.load import Sizes
from siege.cluster import MIB, WITNESS, Besieged, besieged, send, web
from siege.witness import (
    Given,
    Measure,
    Witness,
    alive_and_whole,
    at_least,
    at_most,
    first_tokens,
    gaps,
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
POOL_TOKENS = 8192
LONG = Sizes((100, 100), (2400, 2400))
"""Sizes of the streams that need more KV than there is."""
OVERSUBSCRIPTION = 4.0
GAP_SECONDS = 1.0
SERVED = 0.99
GAP_FACTOR = 2.0
LOOPS = ("asyncio", "uvloop")


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


def deadlines(given: Given) -> list[Measure]:
    measures = []
    for loop in LOOPS:
        if given.only not in loop:
            continue
        with besieged(given.folder / loop, loop=loop) as place:
            witness = Witness(place.reach)
            witness.alone(given.seconds)
            with (
                witness.beside() as seen,
                loading("deadlines", place.reach, count=given.count, seed=given.seed) as attack,
            ):
                said = attack.finish(max(given.seconds, 0.2 * given.count))
            outcomes = said["outcomes"]
            wrong = [f"{number} of {said['examples'].get(kind)}" for kind, number in outcomes.items() if kind[0] == "!"]
            measures += [
                at_least(f"{loop}: requests", sum(outcomes.values()), given.count),
                none_of(f"{loop}: answers of a defect, or none", wrong, outcomes=outcomes),
                *witness.measures(seen, f"{loop}: "),
                *alive_and_whole(place, f"{loop}: "),
            ]
    return measures


def kv(given: Given) -> list[Measure]:
    each = LONG.prompts[0] + LONG.counts[0]
    at_once = int(OVERSUBSCRIPTION * POOL_TOKENS / each) + 1
    with besieged(given.folder, kv_bytes=POOL_TOKENS * 1024) as place:
        witness = Witness(place.reach, rate=1.0)
        options = {"prompts": LONG.prompts, "counts": LONG.counts, "at_once": at_once, "seconds": 900.0}
        with witness.beside() as seen, loading("streams", place.reach, name="long", distinct=0, **options) as attack:
            time.sleep(given.seconds)
            long = attack.finish()["streams"]
        begun = [stream for stream in long if stream["tokens"]]
        failed = [
            f"{each['name']} after {len(each['tokens'])} tokens: {each['error']}" for each in begun if each["error"]
        ]
        shed = [stream["error"] for stream in long if not stream["tokens"] and stream["error"]]
        retried = [f"{stream['name']}: {stream['retries']}" for stream in [*long, *seen] if stream["retries"]]
        wait = max(first_tokens(seen), default=0.0)
        return [
            at_least("streams begun", len(begun), at_once // 4, at_once=at_once),
            none_of("begun streams failed", failed, shed=shed[:5], number_shed=len(shed)),
            none_of("streams retried", retried),
            none_of("wrong tokens of the long streams", witness.wrong(long, LONG)),
            at_most("longest gap of the other tenant's streams", max(gaps(seen), default=0.0), GAP_SECONDS, "s"),
            at_most("their first token", wait, GAP_SECONDS, "s", ttft=ttft(seen)),
            *witness.measures(seen),
            *alive_and_whole(place),
        ]


def attacks(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The attacks of one tenant: kind of load, and its options."""
    prompts = folder / "prompts"
    prompts.write_text(json.dumps({"prompt": [[5]] * 1024, "max_tokens": 64}))
    streams = {"name": "many", "prompts": (16, 16), "counts": (1000, 1000), "at_once": 300, "distinct": 0}
    return {
        "prompts": ("bodies", {"connections": 4, "requests": [("/v1/completions", str(prompts))]}),
        "slow bodies": ("slow bodies", {"connections": 210}),
        "streams": ("streams", streams),
        "viewers": ("viewers", {"connections": 64}),
        "grammars": ("grammars", {"connections": 8}),
    }


def page_seen(place: Besieged) -> str:
    """Opens the page's events as the witness; why that fails, or an empty text."""
    try:
        status, begun = web(place, "/page/events", b"", WITNESS, 1)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if status != 200:
        return f"HTTP {status}: {begun.decode()[:200]}"
    return "" if begun else "it ended at once"


def tenant(given: Given) -> list[Measure]:
    measures: list[Measure] = []
    with besieged(given.folder, model="pico", kv_bytes=64 * MIB) as place:
        witness = Witness(place.reach, model="pico", rate=2.0)
        idle = witness.alone(given.seconds)
        usual = quantile(gaps(idle), 0.99)
        for name, (kind, options) in attacks(given.folder).items():
            if given.only not in name:
                continue
            pages = []
            with witness.beside() as seen, loading(kind, place.reach, **options) as attack:
                ends = time.monotonic() + given.seconds
                while time.monotonic() < ends:
                    time.sleep(min(1.0, given.seconds / 4))
                    pages.append(page_seen(place))
                said = attack.finish()
            outcomes = said.get("outcomes", {})
            served = sum(not stream["error"] for stream in seen) / max(1, len(seen))
            errors = [stream["error"] for stream in seen if stream["error"]]
            gap = quantile(gaps(seen), 0.99) / usual
            unseen = [said for said in pages if said]
            opened = 1 - len(unseen) / len(pages)
            part = f"{name}: "
            measures += [
                Measure(
                    f"{part}served",
                    f"at least {SERVED:.0%} of some",
                    f"{served:.1%} of {len(seen)}",
                    served >= SERVED and bool(seen),
                    {"errors": errors[:5], "ttft": ttft(seen), "outcomes": outcomes},
                ),
                at_most(
                    f"{part}gap p99 over idle's",
                    gap,
                    GAP_FACTOR,
                    "times",
                    idle=usual,
                    p50=[quantile(gaps(each), 0.5) for each in (idle, seen)],
                ),
                Measure(
                    f"{part}the page opens",
                    f"at least {SERVED:.0%}",
                    f"{opened:.0%} of {len(pages)}" + (f", else {unseen[0]}" if unseen else ""),
                    opened >= SERVED,
                    {"errors": unseen[:5]},
                ),
                none_of(f"{part}wrong tokens", witness.wrong(seen)),
            ]
        return [*measures, *alive_and_whole(place)]
