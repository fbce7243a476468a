"""Arrivals and lengths of requests, from Mooncake's trace of conversations, `mooncake/conversation_trace.jsonl`.

Each line has a timestamp (ms, in batches of 3 s), lengths, and the ids of the prompt's blocks of 512 tokens, equal for
equal prefixes.
"""

import hashlib
import json
import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from simulated.cluster import FIRST_TOKEN, TOKENS

BATCH_SECONDS = 3.0
"""Seconds within which the requests of one timestamp of Mooncake's trace came."""
BLOCK = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    at: float
    """Seconds from the trace's beginning."""
    number: int
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks; none if nothing is known of it but its length."""

    def prompt(self) -> list[int]:
        """The prompt's tokens, of which only equal blocks are equal."""
        blocks = self.blocks or range(-self.number * 4096, -self.number * 4096 + -(-self.prompt_tokens // BLOCK))
        return list(b"".join(map(_tokens, blocks))[: self.prompt_tokens])


_TOKEN_OF_BYTE = bytes([FIRST_TOKEN + byte % TOKENS for byte in range(256)])


@lru_cache(1 << 16)
def _tokens(block: int) -> bytes:
    """The tokens of a block, all of which are smaller than 256."""
    return hashlib.shake_128(b"%d" % block).digest(BLOCK).translate(_TOKEN_OF_BYTE)


def read(folder: Path, seed: int = 0) -> list[Arrival]:
    """All requests of the trace, in order.

    Args:
        folder: with the trace's folder.
        seed: of the moments within a batch of arrivals.
    """
    rng = random.Random(seed)
    found: list[Arrival] = []
    with (folder / "mooncake" / "conversation_trace.jsonl").open() as lines:
        for number, row in enumerate(map(json.loads, lines)):
            at = row["timestamp"] / 1000 + rng.uniform(0.0, BATCH_SECONDS)
            blocks = tuple(row["hash_ids"])
            found.append(Arrival(at, number, row["input_length"], max(1, row["output_length"]), blocks))
    found.sort(key=lambda each: each.at)
    return [replace(each, at=each.at - found[0].at) for each in found]


def at_rate(trace: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """The first requests of a trace, with its time slowed or hastened to `rate` requests a second, for so many seconds;
    where it ends, it begins again with other prompts."""
    whole = trace[-1].at + trace[-1].at / len(trace)
    scale = len(trace) / whole / rate

    def arrivals() -> Iterator[Arrival]:
        turn = 0
        while True:
            for each in trace:
                blocks = tuple([block + turn * 10**9 for block in each.blocks])
                number = each.number + turn * len(trace)
                yield replace(each, at=(each.at + turn * whole) * scale, number=number, blocks=blocks)
            turn += 1

    return list(takewhile(lambda each: each.at < seconds, arrivals()))


def begun_later(trace: Sequence[Arrival], share: float) -> list[Arrival]:
    """The trace from a share of its requests on; those before come at its end."""
    first = int(share * len(trace))
    begin, end = trace[first].at, trace[-1].at + trace[-1].at / len(trace)
    late = [replace(each, at=each.at + end - begin) for each in trace[:first]]
    return [replace(each, at=each.at - begin) for each in trace[first:]] + late


def oracle_hits(arrivals: Sequence[Arrival], most_tokens: float = math.inf) -> dict[int, int]:
    """Tokens of each prompt, by the arrival's number, that one cache would have if it had each prompt as soon as it
    arrives. The last token of a prompt is always computed.

    Args:
        most_tokens: that the cache holds; the blocks used least recently are evicted first, of a prompt its end.
    """
    known: OrderedDict[int, None] = OrderedDict()
    hits: dict[int, int] = {}
    for each in arrivals:
        blocks = each.blocks[: (each.prompt_tokens - 1) // BLOCK]
        hits[each.number] = BLOCK * len(list(takewhile(known.__contains__, blocks)))
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) * BLOCK > most_tokens:
            known.popitem(last=False)
    return hits
