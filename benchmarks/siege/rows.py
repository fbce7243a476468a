"""The rows of the siege, but for bodies. Each starts a cluster, attacks it, and returns its measures."""

import json
import time
from pathlib import Path
from typing import Any

from nemesis.load import Sizes
from siege.cluster import MIB, WITNESS, Besieged, besieged, web
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

POOL_TOKENS = 8192
LONG = Sizes((100, 100), (2400, 2400))
"""Sizes of the streams that need more KV than there is."""
OVERSUBSCRIPTION = 4.0
GAP_SECONDS = 1.0
SERVED = 0.99
GAP_FACTOR = 2.0
LOOPS = ("asyncio", "uvloop")


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
            wrong = said["wrong"]
            text = f"{wrong}" + (f", e.g. {said['examples'][0][:300]}" if wrong else "")
            measures += [
                at_least(f"{loop}: requests", said["sent"], given.count),
                Measure(f"{loop}: answers of a defect, or none", "none", text, not wrong, said),
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
