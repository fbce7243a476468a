"""A process that calls the cluster under siege: the witness, whose streams are compared, or an attacker.

    python benchmarks/siege/load.py KIND '{"grpc": "127.0.0.1:50051", ...}'

It prints a line when it begins. It goes on until its standard input ends, or until it has sent what it was told to, and
prints one JSON object then. Options are `grpc` and `http`, addresses; `authority`, the file of the certificate that
signed the router's, or null without TLS; `key`; and those that the functions of KINDS name.
"""

import asyncio
import itertools
import json
import math
import random
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

import aiohttp  # noqa: E402  # after the path
import grpc  # noqa: E402

from kvrelay.client import AsyncClient, KvrelayError  # noqa: E402
from kvrelay.router.doors.sockets import raise_limit  # noqa: E402
from nemesis.load import REQUEST_SECONDS, Sizes, Stream, ask, draw, tls_of  # noqa: E402
from support.costly import METHODS  # noqa: E402
from support.hostile import GENERATE, client_tls, half_a_call, left_open  # noqa: E402

Options = dict[str, Any]
CALL_SECONDS = 60.0
AT_ONCE = 16
"""Requests with deadlines at a time."""
DEADLINE_SECONDS = 20.0
"""Seconds after which a request has no answer, whatever its deadline."""
KEPT = 20
"""Kinds of answers of which an example is kept."""
GRPC_CODES = {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED"} | {
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE")
}
"""Statuses that aren't a defect's; UNAVAILABLE must say why."""
AMBIGUOUS = 'start: a\na: a a | a a a | "x" | ""\n'
"""A grammar with very many derivations of each text."""


def client(options: Options) -> AsyncClient:
    return AsyncClient(options["grpc"], api_key=options["key"], tls=tls_of(options["authority"] or ""))


def channel(options: Options) -> grpc.aio.Channel:
    """Opens a channel to the router of `options["grpc"]`, with TLS if there is an `authority`."""
    tls = tls_of(options["authority"] or "")
    if tls is None:
        return grpc.aio.insecure_channel(options["grpc"])
    return grpc.aio.secure_channel(options["grpc"], tls.credentials(), options=tls.options(()))


def session(options: Options, seconds: float | None) -> aiohttp.ClientSession:
    """Opens an HTTP session whose paths are on the router at `options["http"]`, with the key of `options`."""
    tls = web_tls(options)
    return aiohttp.ClientSession(
        f"http{'s' if tls else ''}://{options['http']}",
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
        headers={"Authorization": f"Bearer {options['key']}", "Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(seconds),
    )


def web_tls(options: Options) -> ssl.SSLContext | None:
    return None if options["authority"] is None else client_tls(options["authority"], "http/1.1")


async def call(options: Options, calling: grpc.aio.Channel, method: str, data: bytes, seconds: float) -> str:
    """Sends a message to a method of gRPC, with the key of `options`.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    key = (("authorization", f"Bearer {options['key']}"),)
    async for _ in calling.unary_stream(method)(data, timeout=seconds, metadata=key):
        pass
    return "gRPC OK"


def noted(stream: Stream) -> dict[str, Any]:
    """Record of an ended stream."""
    return {
        "name": stream.name,
        "first_token": stream.first_token,
        "gap": max((after - before for before, after in itertools.pairwise(stream.times)), default=0.0),
        "tokens": stream.tokens,
        "error": stream.error,
        "left": not stream.error and not stream.reported,
        "retries": stream.retries,
    }


async def streams(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Runs streams, whose tokens the witness compares.

    Options: `name`, with which their names begin; `prompts` and `counts`, least and most tokens; `rate`, how many come
    a second whether others are answered or not, or `at_once`, how many there are at any time, which are left at the
    end; `distinct`, after which number of requests the same ones come again, 0: never; `seconds`, of each one's
    deadline.
    """
    sizes = Sizes(tuple(options["prompts"]), tuple(options["counts"]))
    rng, ended = random.Random(options["name"]), []
    running: set[asyncio.Task[None]] = set()
    free = asyncio.Semaphore(options.get("at_once", 0))
    async with client(options) as caller:

        async def one(number: int) -> None:
            same = number % options["distinct"] if options.get("distinct") else number
            stream = draw(f"{options['name']}-{same}", sizes)
            stream.seconds = options.get("seconds", REQUEST_SECONDS)
            try:
                await ask(caller, stream, request_id=f"{options['name']}-{number}-of-{options['key']}")
            finally:  # streams that are left count, too
                ended.append(noted(stream))
            if "at_once" in options:
                await asyncio.sleep(0.2 if stream.error else 0.0)
                free.release()

        async def begin() -> None:
            due = time.monotonic()
            for number in itertools.count():
                if "rate" in options:
                    due += rng.expovariate(options["rate"])
                    await asyncio.sleep(due - time.monotonic())
                else:
                    await free.acquire()
                running.add(task := asyncio.create_task(one(number)))
                task.add_done_callback(running.discard)

        beginning = asyncio.create_task(begin())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((beginning, stopping), return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        with suppress(asyncio.CancelledError):
            await beginning
        for task in running if "at_once" in options else ():
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {"streams": ended}


async def until_stopped(stop: asyncio.Event, tasks: list[asyncio.Task[None]], grace: float = 0.0) -> None:
    """Lets tasks run until the end of the siege and `grace` seconds more. An error of one is raised."""
    await stop.wait()
    _, late = await asyncio.wait(tasks, timeout=grace)
    for task in late:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def repeated(
    stop: asyncio.Event, connections: int, send: Callable[[int], Awaitable[str]], count: float = math.inf
) -> dict[str, Any]:
    """Each of the connections sends again and again; counts what came of it.

    Args:
        send: sends the request of a number, and says what came of it; the first two words are its kind.
        count: numbers are less.
    """
    outcomes: Counter[str] = Counter()
    examples: dict[str, str] = {}

    async def one(number: int) -> None:
        """Errors of a call count by their status."""
        while number < count and not stop.is_set():
            try:
                said = await send(number)
            except (aiohttp.ClientError, OSError, TimeoutError, grpc.RpcError, KvrelayError) as error:
                code = getattr(error, "code", None)
                said = f"{type(error).__name__} {code() if callable(code) else code or ''} {error}"
                await asyncio.sleep(0.05)
            kind = " ".join(said.split()[:2])
            outcomes[kind] += 1
            if len(examples) < KEPT:
                examples.setdefault(kind, said[:600])
            number += connections

    tasks = [asyncio.create_task(one(number)) for number in range(connections)]
    if math.isfinite(count):
        await asyncio.gather(*tasks)
    else:
        await until_stopped(stop, tasks, grace=2.0)
    return {"outcomes": outcomes, "examples": examples}


async def bodies(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Sends the same bodies again and again.

    Options: `connections`; `requests`, each with the path of HTTP or of a gRPC method, and a file with the body.
    """
    requests = [(path, await asyncio.to_thread(Path(name).read_bytes)) for path, name in options["requests"]]
    async with session(options, CALL_SECONDS) as web, channel(options) as calling:

        async def send(number: int) -> str:
            path, data = requests[number % len(requests)]
            if "Service/" in path:
                return await call(options, calling, path, data, CALL_SECONDS)
            async with web.post(path, data=data) as response:
                text = await response.text()
                return f"HTTP {response.status} {path} {text}"

        return await repeated(stop, options["connections"], send)


async def slow_bodies(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """HTTP requests with a key whose bodies never come whole. Options: `connections`."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{" % options["key"].encode()
    )
    tls = web_tls(options)

    async def send(_: int) -> str:
        host, _, port = options["http"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        try:
            writer.write(head)
            reading = asyncio.ensure_future(reader.read(4096))
            while not reading.done() and not stop.is_set():
                writer.write(b" ")
                await asyncio.wait([reading], timeout=0.5)
            if not reading.done():
                reading.cancel()
                return "left alone"
            return f"HTTP {reading.result()[9:12].decode()}"
        finally:
            writer.transport.abort()

    return await repeated(stop, options["connections"], send)


async def viewers(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Viewers of the page, who stay. Options: `connections`."""
    async with session(options, None) as web:

        async def send(_: int) -> str:
            async with web.get("/page/events") as response:
                while not stop.is_set() and response.status == 200 and await response.content.readany():
                    pass
                if response.status != 200:
                    await asyncio.sleep(0.2)
                return f"HTTP {response.status}"

        return await repeated(stop, options["connections"], send)


async def grammars(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Completions that obey an ambiguous grammar. Options: `connections`."""
    async with client(options) as caller:

        async def send(number: int) -> str:
            given: dict[str, Any] = {"max_tokens": 200, "seed": number, "grammar": AMBIGUOUS, "timeout": CALL_SECONDS}
            await caller.complete([5, 6, 7 + number % 200], **given)
            return "gRPC OK"

        return await repeated(stop, options["connections"], send)


async def partial_requests(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Clients that begin a request or handshake and never finish it, once each.

    Options: `what`: `Generate`, a message, or `handshake`; `count`; `source`, their address.
    """
    tls = None if options["authority"] is None else client_tls(options["authority"], "h2")
    address, source = options["grpc"], options["source"]

    async def one() -> None:
        with suppress(OSError, asyncio.IncompleteReadError):  # it was one too many
            if options["what"] == "Generate":
                await half_a_call(address, GENERATE, tls, source)
            else:
                await left_open(address, b"\x16\x03\x01\x02\x00\x01", None, source)

    await until_stopped(stop, [asyncio.create_task(one()) for _ in range(options["count"])])
    return {}


async def deadlines(options: Options, stop: asyncio.Event) -> dict[str, Any]:
    """Requests whose deadline is any time between 0.3 ms and 1 s, on both interfaces; what only a defect answers begins
    with an exclamation mark. Options: `count`, `seed`."""
    rng = random.Random(options["seed"])
    within = [10 ** rng.uniform(-3.5, 0.0) for _ in range(options["count"])]
    request = type(METHODS["Generate"])()
    request.CopyFrom(METHODS["Generate"])
    request.sampling.max_tokens = 32  # type: ignore[attr-defined]  # it is a GenerateRequest
    async with channel(options) as calling, session(options, DEADLINE_SECONDS) as web:

        async def send(number: int) -> str:
            seconds = within[number]
            if number % 2:
                return await over_grpc(options, calling, request.SerializeToString(), seconds)
            return await over_http(web, seconds, streamed=number % 4 == 0)

        return await repeated(stop, AT_ONCE, send, options["count"])


async def over_http(web: aiohttp.ClientSession, seconds: float, *, streamed: bool) -> str:
    body = {"prompt": "a", "max_tokens": 32, "stream": streamed}
    given = {"X-Request-Timeout": f"{seconds:.6f}"}
    try:
        async with web.post("/v1/completions", json=body, headers=given) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"! {type(error).__name__} {error} with {seconds:.6f} s"
    right = status in (200, 429, 503, 504) and (status == 200 or json.loads(text)["error"]["message"])
    if not right or (re.search(r'"server_error"|defect', text) and status == 200 and "deadline" not in text):
        return f"! HTTP {status} with {seconds:.6f} s: {text[-400:]}"
    return f"HTTP {status}"


async def over_grpc(options: Options, calling: grpc.aio.Channel, data: bytes, seconds: float) -> str:
    try:
        return await call(options, calling, GENERATE, data, seconds)
    except grpc.aio.AioRpcError as error:
        name, details = error.code().name, error.details() or ""
        right = name in GRPC_CODES and (name != "UNAVAILABLE" or bool(details)) and "defect" not in details
        return f"{'gRPC' if right else '! gRPC'} {name} {details} {data[:100]!r}"


KINDS: dict[str, Callable[[Options, asyncio.Event], Awaitable[dict[str, Any]]]] = {
    "streams": streams,
    "bodies": bodies,
    "slow bodies": slow_bodies,
    "viewers": viewers,
    "grammars": grammars,
    "partial": partial_requests,
    "deadlines": deadlines,
}


async def main(kind: str, options: Options) -> dict[str, Any]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not sys.stdin.buffer.raw.read(1):  # type: ignore[attr-defined]  # of a buffered reader
            loop.remove_reader(sys.stdin)
            stop.set()

    loop.add_reader(sys.stdin, read)
    return await KINDS[kind](options, stop)


if __name__ == "__main__":
    raise_limit()
    print("begun", flush=True)
    print(json.dumps(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))), flush=True)
