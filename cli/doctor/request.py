"""Explains why a request took as long as it did, from what its router has kept of it (`router/records/life.py`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvrelay.cli.common import duration
from kvrelay.cli.doctor.finding import size
from kvrelay.cluster.asking.routers import Routers
from kvrelay.cluster.errors import RunError

NOTABLE_SHARE = 0.2
"""Share of prefill's time from which on its longest step is named."""
LONG_GAP = 5.0
"""Multiple of the mean gap between two messages from which on a gap is notable."""
LONG_GAP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a request's time."""

    stage: str
    seconds: float
    text: str
    """One sentence, without a full stop."""


@dataclass(frozen=True, slots=True)
class Story:
    """A request in words."""

    id: str
    headline: str
    verdict: str
    """Cause of most of the request's time."""
    parts: tuple[Part, ...]
    incidents: tuple[str, ...]


async def find(routers: Routers, request_id: str) -> list[dict[str, Any]]:
    """The lives of a request's completions, from every router that had the request; later calls come last.

    Raises:
        RunError: no router knows it; or none answers.
    """
    name = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    found: list[dict[str, Any]] = []
    silent = []
    for url in routers.urls:
        try:
            found += await routers.request(url, name)
        except RunError as error:
            silent.append(str(error))
    if found:
        return sorted(found, key=lambda life: (life["received"], life["index"]))
    if len(silent) == len(routers.urls):
        raise RunError(*silent)
    raise RunError(
        f"no router knows request {name!r}: each keeps the running requests and the latest 200 that ended since it "
        "started, and shows a caller those of its own tenant (--api-key)",
        *silent,
    )


def story(life: dict[str, Any]) -> Story:
    """The story of a request.

    Args:
        life: `Life` of router/records/life.py, as JSON.
    """
    parts = tuple(_parts(life))
    age, ttft = life["age"], life["ttft"]
    if life["outcome"] is None:
        headline = f"running for {duration(age)}"
    else:
        ends = {"stop": "completed", "length": "completed (its full length)"}
        headline = f"{ends.get(life['outcome'], 'ended: ' + life['outcome'])} after {duration(age)}"
    headline += f"; {life['prompt_tokens']} prompt tokens ({life['cached_tokens']} cached)"
    headline += f", {life['completion_tokens']} generated"
    headline += f"; first token after {duration(ttft)}" if ttft is not None else "; no first token"
    if life["tpot"] is not None:
        headline += f", then {duration(life['tpot'])} per token"
    words = {"wait": "had to wait", "failed": "an attempt failed", "moved": "moved to other workers", "ended": "ended"}
    incidents = tuple(f"after {duration(at)} {words.get(kind, kind)}: {why}" for kind, at, why in life["incidents"])
    return Story(life["id"], headline, _verdict(life, parts), parts, incidents)


def _parts(life: dict[str, Any]) -> Iterator[Part]:
    spans = {span["stage"]: span for span in life["spans"]}  # the latest attempt's
    if "router" in spans:
        yield Part("router", _length(life, spans["router"]), _router(life, spans["router"]))
    if "queue" in spans:
        seconds, worker = _length(life, spans["queue"]), spans["queue"]["worker"]
        yield Part("queue", seconds, f"waited on {worker} behind other prompts and steps")
    if "prefill" in spans:
        yield Part("prefill", _length(life, spans["prefill"]), _prefill(life, spans["prefill"]))
    if "transfer" in spans:
        yield _transfer(life, spans["transfer"])
    if "decode_queue" in spans:
        span = spans["decode_queue"]
        yield Part("decode queue", _length(life, span), f"had its KV on {span['worker']}, waited for a step")
    if "decode" in spans:
        yield Part("decode", _length(life, spans["decode"]), _decode(life, spans["decode"]))


def _length(life: dict[str, Any], span: dict[str, Any]) -> float:
    end = life["age"] if span["end"] is None else span["end"]
    return float(end - span["start"])


def _router(life: dict[str, Any], span: dict[str, Any]) -> str:
    end = life["age"] if span["end"] is None else span["end"]
    waits = [why for kind, at, why in life["incidents"] if kind == "wait" and at <= end]
    if waits:
        return f"waited in the router: {', then '.join(dict.fromkeys(waits))}"
    return "was checked, tokenized and placed by the router"


def _prefill(life: dict[str, Any], span: dict[str, Any]) -> str:
    seconds, new = _length(life, span), life["prompt_tokens"] - life["cached_tokens"]
    text = f"{span['worker']} computed {new} tokens of the prompt"
    if life["cached_tokens"]:
        text += f", with {life['cached_tokens']} more from its cache"
    if seconds > 0 and span["end"] is not None:
        text += f": {new / seconds:.0f} tokens/s"
    if life["chunks"]:
        text += f", in {len(life['chunks']) + (span['end'] is not None)} steps or more"
        longest = _longest_step(life, span)
        if longest is not None and longest >= NOTABLE_SHARE * seconds and len(life["chunks"]) > 1:
            text += f", the longest of them {duration(longest)}"
    return text


def _longest_step(life: dict[str, Any], span: dict[str, Any]) -> float | None:
    moments = [span["start"], *(at for at, _ in life["chunks"]), span["end"]]
    steps = [later - earlier for earlier, later in pairwise(moments) if None not in (earlier, later)]
    return max(steps, default=None)


def _transfer(life: dict[str, Any], span: dict[str, Any]) -> Part:
    exposed = life["handoff"]
    text = f"{span['worker']} sent {size(life['transfer_bytes'])} of KV to {life['decode_worker']}"
    seconds = _length(life, span)
    if span["end"] is None:
        return Part("transfer", seconds, f"{span['worker']} is sending the KV to {life['decode_worker']}")
    if exposed is None:
        text += "; the sender has not reported yet what it cost"
    else:
        text += f", {duration(exposed)} of it after the end of prefill"
    if life["grant"]:
        text += f"; {life['decode_worker']} granted blocks for it after {duration(life['grant'])}"
    return Part("transfer", seconds if exposed is None else exposed, text)


def _decode(life: dict[str, Any], span: dict[str, Any]) -> str:
    text = f"{span['worker']} generated {max(0, life['completion_tokens'] - 1)} tokens"
    if life["tpot"]:
        text += f", {1.0 / life['tpot']:.1f} a second"
    gap, at = life["longest_gap"]
    if gap >= LONG_GAP_SECONDS and life["tpot"] and gap >= LONG_GAP * life["tpot"]:
        text += f"; the longest pause took {duration(gap)}, up to {duration(at)} after receipt"
        causes = [why for kind, when, why in life["incidents"] if kind != "ended" and at - gap <= when <= at]
        text += f": {causes[0]}" if causes else ""
    return text


def _verdict(life: dict[str, Any], parts: Sequence[Part]) -> str:
    ended = [why for kind, _, why in life["incidents"] if kind == "ended"]
    if ended:
        return f"It failed: {ended[-1]}"
    lost = [(kind, at, why) for kind, at, why in life["incidents"] if kind in ("failed", "moved")]
    if lost:
        first, last = lost[0][1], life["placed"][-1] if life["placed"] else life["age"]
        kinds = {"failed": "an attempt failed", "moved": "its worker was stopped on purpose"}
        why = "; ".join(dict.fromkeys(f"{kinds[kind]} ({text})" for kind, _, text in lost))
        return (
            f"It was placed {len(life['placed'])} times, the last time {duration(max(0.0, last - first))} after: {why}"
        )
    if not parts:
        return "Nothing is known of its time yet"
    longest = max(parts, key=lambda part: part.seconds)
    total = max(life["age"], 1e-9)
    share = f"{longest.seconds / total:.0%}, {duration(longest.seconds)}"
    return f"Most of its time ({share}) was {longest.stage}: {longest.text}"
