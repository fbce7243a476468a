"""The rows of the siege, but for deaths. Each starts a cluster, attacks it, and returns what was asked and measured."""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from siege_cluster import ATTACKER, MIB, WITNESS, Besieged, besieged
from siege_witness import (
    Given,
    Measure,
    Witness,
    at_most,
    first_tokens,
    gaps,
    loading,
    none_of,
    quantile,
)

from nemesis.load import Sizes
from support.costly import METHODS, PATHS, Bodies, messages
from support.key_edits import EDITS, KEPT, REMOVED, UNREADABLE, WHOLE, edit
from support.processes import wait_until

CONNECTIONS = 10
LIMIT = 4 * MIB
"""Bytes of the largest body."""
SIZES = (64 * 1024, LIMIT)
PROBES_A_SECOND = 3.0
"""Bodies that are tried in a second, to find the worst ones."""
SEARCH_SECONDS = 90.0
"""For which they are tried at most."""
HELD_SECONDS = 0.020
TTFT_SECONDS = 0.100
POOL_TOKENS = 8192
LONG = Sizes((100, 100), (2400, 2400))
"""Of the streams that need more KV than there is."""
OVERSUBSCRIPTION = 4.0
GAP_SECONDS = 1.0
SERVED = 0.99
GAP_FACTOR = 2.0
GROWTH_MIB = 64.0
CLOSED_SECONDS = 30.0
DESCRIPTORS = 200
NEW_CLIENT_SECONDS = 5.0
KEY_SECONDS = 1.0
STRANGERS = "127.0.0.9"
"""Address of the clients that don't finish: without keys, an address is what has shares."""
PARTIAL = ("Generate", "Check", "body", "header", "preface", "nothing", "handshake")
LOOPS = ("asyncio", "uvloop")


def alive_and_whole(place: Besieged, part: str = "") -> list[Measure]:
    """What holds after every row: no process has ended, no block stays held."""
    held = [f"{name} {count} blocks" for name, count in place.held_blocks().items()]
    return [none_of(f"{part}processes ended", place.dead()), none_of(f"{part}blocks held without a request", held)]


# bodies


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


def send(place: Besieged, path: str, data: bytes, key: str = ATTACKER) -> str:
    """Sends one request; its status."""
    if "Service/" in path:
        with grpc.insecure_channel(place.grpc) as channel:
            try:
                call = channel.unary_stream(path)(data, timeout=30, metadata=(("authorization", f"Bearer {key}"),))
                list(call)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]  # every RpcError of a call has it
            return "OK"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{place.http}{path}", data or None, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return str(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return str(error.code)


def worst_bodies(place: Besieged, given: Given) -> dict[tuple[str, str], dict[str, float]]:
    """Of each endpoint, the bodies that hold the loop for longest, and that take most of the router's CPU time: by path
    and file, their seconds of both."""
    seconds = min(SEARCH_SECONDS, given.seconds)
    each = max(1, int(seconds * PROBES_A_SECOND / (len(SIZES) * (len(PATHS) + len(METHODS)))))
    worst: dict[tuple[str, str], tuple[float, Path, dict[str, float]]] = {}
    deadline = time.monotonic() + 2 * seconds
    for number, (path, make) in enumerate(candidates(given.seed, each)):
        if time.monotonic() > deadline:
            break
        data = make()
        before, since = place.router.cpu_times(), time.monotonic()
        send(place, path, data)
        after = place.router.cpu_times()
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
        witness = Witness(place)
        idle = witness.alone(given.seconds)
        worst = worst_bodies(place, given)
        requests = sorted(worst)
        since = time.monotonic()
        with (
            witness.beside() as seen,
            loading("bodies", place, connections=CONNECTIONS, requests=requests) as attack,
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


def ttft(streams: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(quantile(first_tokens(streams), share), 4) for name, share in (("p50", 0.5), ("p99", 0.99))}


def defects(said: dict[str, Any]) -> list[str]:
    """Outcomes of requests that only a defect has."""
    bad = ("HTTP 500", "HTTP 501", "HTTP 502", "AioRpcError StatusCode.INTERNAL", "AioRpcError StatusCode.UNKNOWN")
    return [
        f"{number} of {kind}: {said['examples'].get(kind)}" for kind, number in said["outcomes"].items() if kind in bad
    ]


# fuzz and deadlines


def _on_both_loops(given: Given, kind: str, model: str, **options: Any) -> list[Measure]:
    measures = []
    for loop in LOOPS:
        if given.only not in loop:
            continue
        with besieged(given.folder / loop, loop=loop, model=model) as place:
            witness = Witness(place, model)
            witness.alone(given.seconds)
            with (
                witness.beside() as seen,
                loading(kind, place, count=given.count, seed=given.seed, **options) as attack,
            ):
                said = attack.finish(max(given.seconds, 0.2 * given.count))
            sent, wrong = said["sent"], said["wrong"]
            text = f"{wrong}" + (f", e.g. {said['examples'][0][:300]}" if wrong else "")
            measures += [
                Measure(f"{loop}: requests", f"at least {given.count}", f"{sent}", sent >= given.count),
                Measure(f"{loop}: answers of a defect, or none", "none", text, not wrong, said),
                *witness.measures(seen, f"{loop}: "),
                *alive_and_whole(place, f"{loop}: "),
            ]
    return measures


def fuzz(given: Given) -> list[Measure]:
    """On the bundled model, which knows the tokens of texts."""
    return _on_both_loops(given, "fuzz", "pico", stride=max(1, 7000 // given.count))


def deadlines(given: Given) -> list[Measure]:
    return _on_both_loops(given, "deadlines", "hash")


# kv


def kv(given: Given) -> list[Measure]:
    each = LONG.prompts[0] + LONG.counts[0]
    at_once = int(OVERSUBSCRIPTION * POOL_TOKENS / each) + 1
    with besieged(given.folder, kv_bytes=POOL_TOKENS * 1024) as place:
        witness = Witness(place, rate=1.0)
        options = {"prompts": LONG.prompts, "counts": LONG.counts, "at_once": at_once, "seconds": 900.0}
        with (
            witness.beside() as seen,
            loading("streams", place, name="long", distinct=0, **options) as attack,
        ):
            time.sleep(given.seconds)
            long = attack.finish()["streams"]
        begun = [stream for stream in long if stream["tokens"]]
        failed = [
            f"{stream['name']} after {len(stream['tokens'])} tokens: {stream['error']}"
            for stream in begun
            if stream["error"]
        ]
        shed = [stream["error"] for stream in long if not stream["tokens"] and stream["error"]]
        retried = [f"{stream['name']}: {stream['retries']}" for stream in [*long, *seen] if stream["retries"]]
        wait = max(first_tokens(seen), default=0.0)
        return [
            Measure(
                "streams begun",
                f"at least {at_once // 4}",
                f"{len(begun)}",
                len(begun) >= at_once // 4,
                {"at_once": at_once},
            ),
            none_of("begun streams failed", failed, shed=shed[:5], number_shed=len(shed)),
            none_of("streams retried", retried),
            none_of("wrong tokens of the long streams", witness.wrong(long, LONG)),
            at_most("longest gap of the other tenant's streams", max(gaps(seen), default=0.0), GAP_SECONDS, "s"),
            at_most("their first token", wait, GAP_SECONDS, "s", ttft=ttft(seen)),
            *witness.measures(seen),
            *alive_and_whole(place),
        ]


# tenant


def attacks(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The ways in which one tenant is at its worst: the kind of load, and its options."""
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


def page_seen(place: Besieged) -> bool:
    """Whether the witness can open the page's events."""
    headers = {"Authorization": f"Bearer {WITNESS}"}
    request = urllib.request.Request(f"http://{place.http}/page/events", None, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.read(1))
    except OSError:
        return False


def tenant(given: Given) -> list[Measure]:
    measures: list[Measure] = []
    with besieged(given.folder, model="pico", kv_bytes=64 * MIB) as place:
        witness = Witness(place, model="pico", rate=2.0)
        idle = witness.alone(given.seconds)
        usual = quantile(gaps(idle), 0.99)
        for name, (kind, options) in attacks(given.folder).items():
            if given.only not in name:
                continue
            pages = []
            with witness.beside() as seen, loading(kind, place, **options) as attack:
                ends = time.monotonic() + given.seconds
                while time.monotonic() < ends:
                    time.sleep(min(1.0, given.seconds / 4))
                    pages.append(page_seen(place))
                said = attack.finish()
            outcomes = said.get("outcomes", {})
            served = sum(not stream["error"] for stream in seen) / max(1, len(seen))
            errors = [stream["error"] for stream in seen if stream["error"]]
            gap = quantile(gaps(seen), 0.99) / usual
            opened = sum(pages) / len(pages)
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
                    f"{part}the page opens", f"at least {SERVED:.0%}", f"{opened:.0%} of {len(pages)}", opened >= SERVED
                ),
                none_of(f"{part}wrong tokens", witness.wrong(seen)),
            ]
        return [*measures, *alive_and_whole(place)]


# partial


def partial(given: Given) -> list[Measure]:
    measures: list[Measure] = []
    for secured in (False, True):
        where = "tls and keys" if secured else "open"
        kinds = [kind for kind in PARTIAL if given.only in f"{where} {kind}" and (secured or kind != "handshake")]
        if not kinds:
            continue
        with besieged(given.folder / where, tls=secured, keys=secured) as place:
            witness = Witness(place, rate=2.0)
            with witness.beside() as seen:
                for kind in kinds:
                    measures += _unfinished(place, given, kind, f"{where}, {kind}: ")
            measures += [*witness.measures(seen, f"{where}: "), *alive_and_whole(place, f"{where}: ")]
    if given.only in "descriptors":
        measures += _descriptors(given)
    return measures


def _unfinished(place: Besieged, given: Given, kind: str, part: str) -> list[Measure]:
    before = most = place.router.memory_info().rss
    with loading("partial", place, what=kind, count=given.clients, source=STRANGERS) as attack:
        deadline = time.monotonic() + 2 * CLOSED_SECONDS
        while attack.running and time.monotonic() < deadline:
            most = max(most, place.router.memory_info().rss)
            time.sleep(0.05)
        said = attack.finish()
    return [
        at_most(f"{part}the router grew", (most - before) / MIB, GROWTH_MIB, "MiB", before=round(before / MIB)),
        at_most(f"{part}all closed after", max(said["closed"], default=0.0), CLOSED_SECONDS, "s", open=said["open"]),
        none_of(f"{part}never closed", ["a connection"] * said["open"]),
    ]


def _descriptors(given: Given) -> list[Measure]:
    """Clients that never finish take all descriptors; new ones of both faces are timed."""
    measures = []
    with besieged(given.folder / "descriptors", keys=False, descriptors=DESCRIPTORS) as place:
        for kind in ("header", "preface"):
            with loading("partial", place, what=kind, count=300, source=STRANGERS) as attack:
                _settled(place.router.num_fds)
                for path in ("/v1/models", "/kvrelay.v1.InferenceService/GetModelInfo"):
                    took = _served_within(place, path)
                    face = "gRPC" if "Service/" in path else "HTTP"
                    measures.append(
                        at_most(f"descriptors, {kind}: a new client of {face}", took, NEW_CLIENT_SECONDS, "s")
                    )
                attack.finish()
        measures += alive_and_whole(place, "descriptors: ")
    return measures


def _settled(count: Callable[[], int]) -> None:
    """Returns when a count hasn't changed for a second, or after ten."""
    deadline = time.monotonic() + 10
    last, since = count(), time.monotonic()
    while time.monotonic() < min(deadline, since + 1.0):
        time.sleep(0.05)
        if (now := count()) != last:
            last, since = now, time.monotonic()


def _served_within(place: Besieged, path: str) -> float:
    """Seconds until a client that tries again and again is served; at most some."""
    started = time.monotonic()
    while (took := time.monotonic() - started) < 4 * NEW_CLIENT_SECONDS:
        try:
            if send(place, path, b"") in ("200", "OK"):
                return time.monotonic() - started
        except OSError:
            pass  # it was closed at once
        time.sleep(0.05)
    return took


# keys


def keys(given: Given) -> list[Measure]:
    measures = []
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "api_keys"
    path.write_text(WHOLE)
    with besieged(given.folder / "cluster", keys=False, api_keys=str(path), caller=KEPT) as place:
        witness = Witness(place)
        options = {"prompts": LONG.prompts, "counts": LONG.counts, "at_once": 2, "distinct": 0}
        for way in EDITS:
            if given.only not in way:
                continue
            path.write_text(WHOLE)
            for key in (KEPT, REMOVED):
                wait_until(lambda key=key: send(place, "/v1/models", b"", key) == "200", f"{key} is known", 10, 0.02)
            with loading("streams", place, nice=0, key=REMOVED, name=f"begun before {way}", **options) as begun:
                wait_until(lambda: place.running(), "streams have begun", 30, 0.05)
                edit(path, way)
                started = time.monotonic()
                while (status := send(place, "/v1/models", b"", REMOVED)) != "401" and time.monotonic() < started + 30:
                    time.sleep(0.01)
                took = time.monotonic() - started
                time.sleep(max(0.0, KEY_SECONDS - took))
                kept, due = send(place, "/v1/models", b"", KEPT), "401" if way in UNREADABLE else "200"
                streams = begun.finish()["streams"]
            measures += [
                at_most(f"{way}: refused after", took if status == "401" else float("inf"), KEY_SECONDS, "s"),
                Measure(f"{way}: the other key", f"HTTP {due}", f"HTTP {kept}", kept == due),
                none_of(
                    f"{way}: streams that failed",
                    [each["error"] for each in streams if each["tokens"] and each["error"]],
                ),
                none_of(f"{way}: wrong tokens", witness.wrong(streams, LONG)),
            ]
        measures.append(none_of("processes ended", place.dead()))
    return measures
