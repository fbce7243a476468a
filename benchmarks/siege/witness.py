"""Questions and measures of a row of the siege, the processes that call the cluster, and the witness among them.

The witness is another tenant than the attackers. Each of its streams is compared with that of an undisturbed run: of
the hash model by computing it, of a real one with what the idle cluster answered before.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemesis.load import Sizes, draw
from siege.cluster import ATTACKER, WITNESS, Besieged
from support.faults import oracle_of_all

LOAD = Path(__file__).with_name("load.py")
END_SECONDS = 90.0
"""Seconds for a process to print what it saw."""
SHORT = Sizes((8, 24), (12, 20))
NICE = 5
"""Niceness of attackers, which would have machines of their own."""
IDLE_SECONDS = 20.0
"""Longest time for which the idle cluster is measured."""
MIN_STREAMS = 5
"""Fewest streams of the witness; with fewer, a row has measured nothing."""


@dataclass(frozen=True)
class Given:
    """Options of a row."""

    folder: Path
    seconds: float
    """Seconds of an attack."""
    count: int
    """Number of requests with random deadlines."""
    seed: int
    only: str
    """A piece of the names of the parts that are run; empty: all."""


@dataclass(frozen=True)
class Measure:
    """One line of a row."""

    what: str
    asked: str
    measured: str
    ok: bool
    more: dict[str, Any] = field(default_factory=dict)
    """Details that only the results have."""


def at_most(what: str, value: float, limit: float, unit: str, **more: Any) -> Measure:
    return Measure(what, f"at most {limit:g} {unit}", f"{value:.4g} {unit}", value <= limit, more)


def at_least(what: str, value: float, limit: float, **more: Any) -> Measure:
    """A measure of a count."""
    return Measure(what, f"at least {limit:g}", f"{value:g}", value >= limit, more)


def none_of(what: str, found: Sequence[str], **more: Any) -> Measure:
    """A measure that requires `found` to be empty."""
    text = f"{len(found)}" + (f", e.g. {found[0][:200]}" if found else "")
    return Measure(what, "none", text, not found, {"found": [each[:600] for each in found[:10]], **more})


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile of the values; NaN without values, which no limit allows."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Loading:
    """A process of `load.py` that has begun."""

    def __init__(self, kind: str, popen: "subprocess.Popen[str]") -> None:
        """Returns when it has begun: a busy machine takes seconds to start it."""
        self._kind = kind
        self._popen = popen
        self._output = popen.stdout
        if not select.select([self._output], [], [], END_SECONDS)[0] or not self._output or not self._output.readline():
            raise RuntimeError(f"the process of {kind} did not begin")

    def finish(self, seconds: float = 0.0) -> dict[str, Any]:
        """Tells the process to end, unless it ends by itself within `seconds`; returns its output.

        Raises:
            RuntimeError: it failed.
        """
        select.select([self._output], [], [], seconds)
        said, _ = self._popen.communicate(timeout=END_SECONDS)
        if self._popen.returncode:
            raise RuntimeError(f"the process of {self._kind} ended with {self._popen.returncode}")
        return dict(json.loads(said))


@contextmanager
def loading(
    kind: str, reach: dict[str, Any], *, nice: int = NICE, key: str = ATTACKER, **options: Any
) -> Iterator[Loading]:
    """A process of this kind that calls the cluster; it is gone at the end.

    Args:
        reach: addresses of the router, and the authority that signed its certificate.
    """
    given = json.dumps({**reach, "key": key, **options})
    command = ["nice", "-n", str(nice), sys.executable, str(LOAD), kind, given]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Loading(kind, popen)
        finally:
            popen.kill()


@dataclass
class Witness:
    """Sends short requests, whether earlier ones are answered or not."""

    reach: dict[str, Any]
    model: str = "hash"
    rate: float = 4.0
    sizes: Sizes = SHORT
    distinct: int = 12
    """Different requests of a real model, which come again and again."""
    _known: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that the idle cluster answered to each request; only for a real model."""

    def alone(self, seconds: float) -> list[dict[str, Any]]:
        """Runs the witness's streams on the idle cluster and returns them.

        Raises:
            RuntimeError: a stream failed there.
        """
        with self.beside("idle") as found:
            # A real model's requests must all be known.
            time.sleep(max(min(seconds, IDLE_SECONDS), 0 if self.model == "hash" else 1.5 * self.distinct / self.rate))
        if bad := [stream["error"] for stream in found if stream["error"]]:
            raise RuntimeError(f"failed on the idle cluster: {bad[0]}")
        for stream in found:
            if self._known.setdefault(stream["name"], stream["tokens"]) != stream["tokens"]:
                raise RuntimeError(f"{stream['name']} has two answers on the idle cluster")
        return found

    @contextmanager
    def beside(self, phase: str = "siege") -> Iterator[list[dict[str, Any]]]:
        """Runs the witness's streams while the body runs; afterwards they are in the list."""
        found: list[dict[str, Any]] = []
        options: dict[str, Any] = {"rate": self.rate, "prompts": self.sizes.prompts, "counts": self.sizes.counts}
        options["name"] = f"witness-{phase}" if self.model == "hash" else "witness"
        options["distinct"] = 0 if self.model == "hash" else self.distinct
        with loading("streams", self.reach, nice=0, key=WITNESS, **options) as process:
            yield found
            found += process.finish()["streams"]

    def wrong(self, streams: Sequence[dict[str, Any]], sizes: Sizes | None = None) -> list[str]:
        """Lists the wrong tokens of streams, including streams that failed."""
        asked = [draw(stream["name"], sizes or self.sizes) for stream in streams]
        if self.model == "hash":
            right = oracle_of_all([(each.prompt, each.count, each.seed) for each in asked])
        else:
            right = [self._known.get(stream["name"], []) for stream in streams]
        found = []
        for stream, each, expected in zip(streams, asked, right, strict=True):
            tokens = stream["tokens"]
            if expected and list(tokens) != list(expected[: len(tokens)]):
                found.append(f"{stream['name']}: {tokens[:50]}, where {expected[:50]} was due")
            if not stream["error"] and not stream["left"] and len(tokens) != each.count:
                found.append(f"{stream['name']}: {len(tokens)} tokens of {each.count}")
        return found

    def measures(self, streams: Sequence[dict[str, Any]], part: str = "") -> list[Measure]:
        """Measures that every row must pass: all of the witness's streams are served, with the right tokens."""
        failed = [f"{stream['name']}: {stream['error']}" for stream in streams if stream["error"]]
        return [
            at_least(f"{part}the other tenant's streams", len(streams), MIN_STREAMS),
            none_of(f"{part}of these failed", failed),
            none_of(f"{part}wrong tokens", self.wrong(streams)),
        ]


def first_tokens(streams: Sequence[dict[str, Any]]) -> list[float]:
    return [float(stream["first_token"]) for stream in streams if stream["first_token"] is not None]


def gaps(streams: Sequence[dict[str, Any]]) -> list[float]:
    """The longest gap between two tokens of each stream, in seconds."""
    return [float(stream["gap"]) for stream in streams if not stream["error"]]


def ttft(streams: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(quantile(first_tokens(streams), share), 4) for name, share in (("p50", 0.5), ("p99", 0.99))}


def alive_and_whole(place: Besieged, part: str = "") -> list[Measure]:
    """Measures that must hold after every row: no process has ended, no block is still held."""
    held = [f"{name} {count} blocks" for name, count in place.held_blocks().items()]
    return [none_of(f"{part}processes ended", place.dead()), none_of(f"{part}blocks held without a request", held)]
