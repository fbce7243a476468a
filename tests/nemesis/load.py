"""Open-loop load: requests come at random times, whether earlier ones are answered or not. Each stream keeps its times.

`python -m nemesis.load NAME AUTHORITY ADDRESS...` is a client of its own with some streams, which can be killed.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.client import AsyncClient, KvrelayError, Tls
from kvrelay.rpc.certificates import dns_name
from support.history import sampling_options

TOKENS = 250
"""Limit of the token ids in prompts; the poison's are not below it."""
PROMPTS, COUNTS = (40, 400), (20, 120)
"""Tokens of a prompt and of a completion, least and most."""
REQUEST_SECONDS = 60.0
CLIENT_STREAMS = 6


@dataclass(slots=True)
class Stream:
    """One request, as its client saw it; times are on the monotonic clock."""

    name: str
    prompt: tuple[int, ...]
    count: int
    seed: int | None
    """Seed of sampling; None for greedy decoding."""
    invoked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Time of each token."""
    ended: float = 0.0
    """Time at which it ended; 0 while it runs."""
    error: str = ""
    reported: int = 0
    """Tokens that the last message says it had."""
    retries: int = 0
    migrations: int = 0
    resumes: int = 0
    """Times that it went on over another router; `retries` and `migrations` are those of the last one then."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set at the first token or the end."""
    pause: float = 0.0
    """Seconds for which its client reads nothing after the first token."""
    may_fail: bool = False
    """Whether it may fail; only the poison may."""
    seconds: float = REQUEST_SECONDS
    """Seconds until its deadline."""

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.invoked if self.times else None

    def longest_gap(self, begin: float, end: float) -> float | None:
        """Seconds of the longest gap between two tokens that overlaps [begin, end]; None if there is none."""
        gaps = [
            after - before
            for before, after in zip(self.times, self.times[1:], strict=False)
            if after >= begin and before <= end
        ]
        return max(gaps, default=None)


@dataclass(frozen=True)
class Sizes:
    """Tokens of requests, least and most."""

    prompts: tuple[int, int] = PROMPTS
    counts: tuple[int, int] = COUNTS


USUAL = Sizes()


def draw(name: str, sizes: Sizes = USUAL) -> Stream:
    """The request of this name, which is its seed: one in four is greedy."""
    rng = random.Random(name)
    seed = rng.getrandbits(64) if rng.random() < 0.75 else None
    prompt = tuple(rng.choices(range(TOKENS), k=rng.randint(*sizes.prompts)))
    return Stream(name, prompt, rng.randint(*sizes.counts), seed, time.monotonic())


async def ask(client: AsyncClient, stream: Stream, request_id: str = "") -> None:
    """Runs the request to its end, by default under the stream's name."""
    pause = stream.pause
    try:
        async for chunk in client.generate(
            stream.prompt,
            max_tokens=stream.count,
            ignore_eos=True,
            request_id=request_id or stream.name,
            timeout=stream.seconds,
            **sampling_options(stream.seed),
        ):
            stream.tokens += chunk.token_ids
            stream.times += [time.monotonic()] * len(chunk.token_ids)
            stream.begun.set()
            if chunk.usage is not None and chunk.timeline is not None:
                stream.reported = chunk.usage.completion_tokens
                stream.retries, stream.migrations = chunk.timeline.retries, chunk.timeline.migrations
                stream.resumes = chunk.timeline.resumes
            if pause:
                await asyncio.sleep(pause)
                pause = 0.0
    except KvrelayError as error:
        stream.error = f"{error.code.name}: {error}"
    finally:
        stream.ended = time.monotonic()
        stream.begun.set()


class Load:
    """Sends requests to the routers until it is stopped."""

    def __init__(self, addresses: Sequence[str], rate: float, seed: int, authority: str = "") -> None:
        """
        Args:
            rate: requests per second.
            authority: file with the certificate that signed the routers'; empty without TLS.
        """
        self.addresses = addresses
        self.streams: list[Stream] = []
        """Streams that have not been taken yet."""
        self._rate = rate
        self._rng = random.Random(f"load {seed}")
        self._client = AsyncClient(addresses, tls=tls_of(authority))
        self._number = 0
        self._running: set[asyncio.Task[None]] = set()
        self._arrivals = asyncio.create_task(self._arrive(), name="arrivals")

    async def stop(self) -> None:
        """Sends nothing more, and returns when everything is answered."""
        self._arrivals.cancel()
        await asyncio.gather(*self._running)
        await self._client.close()

    def take_ended(self) -> list[Stream]:
        """The streams that have ended since the last call."""
        ended = [stream for stream in self.streams if stream.ended]
        self.streams = [stream for stream in self.streams if not stream.ended]
        return ended

    def send(self, prefix: str, poison: tuple[int, ...] = (), pause: float = 0.0) -> asyncio.Task[None]:
        """Sends one request; with `poison` its prompt begins so, and it may fail. `pause` as in `Stream`."""
        self._number += 1
        stream = draw(f"{prefix}-{self._number}")
        if poison:
            stream.prompt, stream.may_fail = poison + stream.prompt, True
        stream.pause = pause
        self.streams.append(stream)
        task = asyncio.create_task(ask(self._client, stream), name=stream.name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _arrive(self) -> None:
        due = time.monotonic()
        while True:
            due += self._rng.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.send("load")


def tls_of(authority: str) -> Tls | None:
    return Tls(ca=authority, server_name=dns_name("router")) if authority else None


async def client(name: str, authority: str, *addresses: str) -> None:
    """A client with CLIENT_STREAMS streams; says when all of them have tokens."""
    async with AsyncClient(addresses, tls=tls_of(authority)) as caller:
        streams = [draw(f"{name}-{number}") for number in range(CLIENT_STREAMS)]
        running = asyncio.gather(*(ask(caller, stream) for stream in streams))
        for stream in streams:
            await stream.begun.wait()
        print("streaming", flush=True)
        await running


if __name__ == "__main__":
    asyncio.run(client(*sys.argv[1:]))
