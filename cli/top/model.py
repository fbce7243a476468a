"""The data of `kvrelay top`: the latest view of each router, and the requests of the last minute."""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvrelay.cli.bench.figures import good

WINDOW_SECONDS = 60.0
"""Length in seconds of the window over which figures about requests are computed."""
RATE_SECONDS = 5.0
"""Length in seconds of the window over which the rates of counters are computed."""
MOST_DECISIONS = 200
GOOD = ("stop", "length")


@dataclass(slots=True)
class Rate:
    """A counter's rate over the last RATE_SECONDS."""

    points: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, value: float) -> None:
        """Takes the counter's value at `now`. A smaller value than before means that the counter was reset."""
        if self.points and value < self.points[-1][1]:
            self.points.clear()
        self.points.append((now, value))
        while len(self.points) > 2 and self.points[1][0] < now - RATE_SECONDS:
            self.points.popleft()

    @property
    def value(self) -> float | None:
        """Growth per second; None before the second point."""
        if not self.points:
            return None
        (first, low), (last, high) = self.points[0], self.points[-1]
        return (high - low) / (last - first) if last > first else None


@dataclass(slots=True)
class RouterView:
    """The latest report of one router."""

    url: str
    name: str = ""
    model: str = ""
    version: str = ""
    ready: bool = False
    running: int = 0
    error: str = ""
    """Reason why the router doesn't answer; empty while it does."""


class Model:
    """Takes the events of all routers; `frame` is what is shown."""

    def __init__(self, urls: Sequence[str], goodput: Mapping[str, float]) -> None:
        """`goodput`: limits in milliseconds of ttft, tpot or e2el; without any, each completed request is good."""
        self.routers = {url: RouterView(url) for url in urls}
        self._goodput = goodput
        self._fleets: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, OrderedDict[tuple[str, float], dict[str, Any]]] = {url: OrderedDict() for url in urls}
        """Ended requests of each router by the request's id (one that was refused has the client's, or none) and the
        time of its arrival, in the order in which they ended: a router tells each new connection again what it has told
        an earlier one."""
        self._rates: dict[tuple[str, ...], Rate] = {}

    def about(self, url: str, about: Mapping[str, Any]) -> None:
        """Takes a router's description of itself."""
        view = self.routers[url]
        view.name, view.model, view.version = about["router"], about["model"], about["version"]

    def lost(self, url: str, error: str) -> None:
        """Notes that a router has stopped answering."""
        self.routers[url].error = error
        self._fleets.pop(url, None)

    def event(self, url: str, name: str, value: Any) -> None:
        """Takes one event of a router."""
        if name == "recent":
            self._keep(url, value)
        elif name == "ended":
            self._keep(url, (value,))
        elif name == "fleet":
            view = self.routers[url]
            view.ready, view.running, view.error = value["ready"], value["running"], ""
            self._fleets[url] = value

    def sample(self, now: float) -> None:
        """Takes the counters for their rates: a router sends nothing while nothing changes.

        Args:
            now: on the monotonic clock.
        """
        for url, fleet in self._fleets.items():
            for worker in fleet["workers"]:
                self._rate("worker", url, worker["name"]).add(now, worker["computed_tokens"])
            for link in fleet["links"]:
                self._rate("link", url, link["prefill"], link["decode"]).add(now, link["nbytes"])

    def frame(self) -> dict[str, Any]:
        """The frame's data as JSON; times are in seconds."""
        return {
            "time": time.time(),
            "routers": [{**asdict(view), "name": view.name or view.url} for view in self.routers.values()],
            "workers": self._workers(),
            "links": self._links(),
            "requests": self._requests(time.time()),
            "decisions": self._decisions(),
        }

    def _keep(self, url: str, lives: Iterable[dict[str, Any]]) -> None:
        """Adds a router's ended requests; drops those before the window, but for the latest MOST_DECISIONS."""
        ended = self.ended[url]
        router = self.routers[url].name or url
        ended.update(((life["id"], life["received"]), {**life, "router": router}) for life in lives)
        oldest = time.time() - WINDOW_SECONDS
        while len(ended) > MOST_DECISIONS and _end(next(iter(ended.values()))) < oldest:
            ended.popitem(last=False)

    def _rate(self, *key: str) -> Rate:
        return self._rates.setdefault(key, Rate())

    def _workers(self) -> list[dict[str, Any]]:
        """Each worker by its newest report, which has the largest token count: routers get reports at different
        moments."""
        found: dict[str, dict[str, Any]] = {}
        for url, fleet in self._fleets.items():
            for worker in fleet["workers"]:
                known = found.get(worker["name"])
                if known is None or known["computed_tokens"] < worker["computed_tokens"]:
                    rate = self._rate("worker", url, worker["name"]).value
                    found[worker["name"]] = {**worker, "tokens_per_second": rate}
        return [found[name] for name in sorted(found)]

    def _links(self) -> list[dict[str, Any]]:
        """The traffic of each link: the sum of what all routers report for it."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for url, fleet in self._fleets.items():
            for link in fleet["links"]:
                pair = link["prefill"], link["decode"]
                total = found.setdefault(
                    pair,
                    {"prefill": pair[0], "decode": pair[1], "nbytes": 0, "transfers": 0, "sending": 0}
                    | {"bytes_per_second": 0.0},
                )
                for name in ("nbytes", "transfers", "sending"):
                    total[name] += link[name]
                total["bytes_per_second"] += self._rate("link", url, *pair).value or 0.0
        return [found[pair] for pair in sorted(found)]

    def _requests(self, now: float) -> dict[str, Any]:
        """Figures of the caller's requests that ended within the window."""
        lives = [life for ended in self.ended.values() for life in ended.values() if _end(life) >= now - WINDOW_SECONDS]
        # The routers keep a fixed number of requests, so with more traffic the window is shorter.
        seconds = min(WINDOW_SECONDS, now - min((_end(life) for life in lives), default=now))
        seconds = max(seconds, 1.0)
        done = [life for life in lives if life["outcome"] in GOOD]
        found: dict[str, Any] = {
            "running": sum(view.running for view in self.routers.values()),
            "window_seconds": seconds,
            "ended": len(lives),
            "completed": len(done),
            "failed": sum(life["outcome"] not in (*GOOD, "cancelled") for life in lives),
            "requests_per_second": len(done) / seconds,
            "goodput_per_second": sum(good({**life, "e2el": life["age"]}, self._goodput) for life in done) / seconds,
            "output_tokens_per_second": sum(life["completion_tokens"] for life in lives) / seconds,
            "retries": sum(life["retries"] for life in lives),
            "migrations": sum(life["migrations"] for life in lives),
            "goodput_limits": dict(self._goodput),
        }
        prompt = sum(life["prompt_tokens"] for life in lives)
        found["cached_share"] = sum(life["cached_tokens"] for life in lives) / prompt if prompt else None
        for name in ("ttft", "tpot", "handoff"):
            values = [life[name] for life in done if life[name] is not None]
            for percentile in (50, 99):
                found[f"p{percentile}_{name}"] = float(np.percentile(values, percentile)) if values else None
        return found

    def _decisions(self) -> list[dict[str, Any]]:
        """The latest placements of requests, running ones too, the latest first."""
        running = [
            {**life, "router": self.routers[url].name or url}
            for url, fleet in self._fleets.items()
            for life in fleet["lives"]
        ]
        ended = (life for each in self.ended.values() for life in each.values())
        lives = sorted([*ended, *running], key=lambda life: -float(life["received"]))
        return [_decision(life) for life in lives[:MOST_DECISIONS]]


def _decision(life: Mapping[str, Any]) -> dict[str, Any]:
    incidents = life["incidents"]
    return {
        "id": life["id"],
        "router": life["router"],
        "received": life["received"],
        "outcome": life["outcome"],
        "age": life["age"],
        "prefill": life["prefill_worker"],
        "decode": life["decode_worker"],
        "waited": life["placed"][0] if life["placed"] else life["age"],
        "prompt_tokens": life["prompt_tokens"],
        "cached_tokens": life["cached_tokens"],
        "completion_tokens": life["completion_tokens"],
        "ttft": life["ttft"],
        "tpot": life["tpot"],
        "handoff": life["handoff"],
        "attempts": len(life["placed"]),
        "why": incidents[-1][2] if incidents else "",
    }


def _end(life: Mapping[str, Any]) -> float:
    """Unix time."""
    return float(life["received"] + life["age"])


SORTS = {
    "name": lambda worker: worker["name"],
    "load": lambda worker: (-worker["running"] - worker["waiting"], worker["name"]),
    "memory": lambda worker: (-worker["held"] / worker["total"] if worker["total"] else math.inf, worker["name"]),
    "tokens": lambda worker: (-(worker["tokens_per_second"] or 0.0), worker["name"]),
}
"""Orders of the workers, by name."""
