"""Requests that are wrong in every place, and requests with random deadlines; what is a defect's answer is kept.

`load.py` runs them, with the options that the functions name.
"""

import asyncio
import json
import random
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import grpc

from kvrelay.router.faces.http.connection import HEADERS
from nemesis.load import tls_of
from support.costly import METHODS, PATHS, messages
from support.hostile import client_tls
from support.http_calls import check_answers, exchange

AT_ONCE = 16
KEPT = 20
"""Wrong answers that are kept."""
SMALL = 400
"""Bytes of a message of gRPC."""
CALL_SECONDS = 20.0
SERVED_SECONDS = "2"
"""Deadline of each fuzzed request in seconds; some ask for as many tokens as there may be."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, 2**31, 2**40, 2**64, "", "x", "auto", "required", "none", "\x00"),
    *("\ud800", "a" * 1000, [], [5], [-1], [[5]], [{}], [None], ["a", 5], {}, {"a": 1}, {"type": "json_object"}),
)
"""Values that each field of a body is set to in turn."""
GRPC_CODES = {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED"} | {
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE")
}
"""Statuses that aren't a defect's; the last two must say why."""
OCTETS = [bytes([value]) for value in range(256)]
Send = Callable[[], Awaitable[str]]
"""Function that sends a request and returns what came of it, after an exclamation mark if it is wrong."""


def channel(options: dict[str, Any]) -> grpc.aio.Channel:
    """Opens a channel to the router of `options["grpc"]`, with TLS if there is an `authority`."""
    tls = tls_of(options["authority"] or "")
    if tls is None:
        return grpc.aio.insecure_channel(options["grpc"])
    return grpc.aio.secure_channel(options["grpc"], tls.credentials(), options=tls.options(()))


def session(options: dict[str, Any], seconds: float | None) -> aiohttp.ClientSession:
    """Opens an HTTP session whose paths are on the router at `options["http"]`, with the key of `options`."""
    tls = web_tls(options)
    return aiohttp.ClientSession(
        f"http{'s' if tls else ''}://{options['http']}",
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
        headers={"Authorization": f"Bearer {options['key']}", "Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(seconds),
    )


def web_tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    return None if options["authority"] is None else client_tls(options["authority"], "http/1.1")


def authorization(options: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Metadata of gRPC."""
    return (("authorization", f"Bearer {options['key']}"),)


def _request(line: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    head = [line, *(name + b": " + value for name, value in headers), b"X-Request-Timeout: " + SERVED_SECONDS.encode()]
    head += [b"Content-Length: %d" % len(body)] if body else []
    return b"\r\n".join([*head, b"Connection: close", b"", body])


def http_requests(key: str, rng: random.Random) -> Iterator[bytes]:
    """First those that are wrong in one place, each in turn; then without end those that are wrong in some."""
    right = [(b"Host", b"x"), (b"Authorization", b"Bearer " + key.encode()), (b"Content-Type", b"application/json")]
    post, names = b"POST /v1/completions HTTP/1.1", [name.encode() for name in HEADERS]
    bases = {path: json.dumps({**base}).encode() for path, (_, base, _) in PATHS.items()}
    hello = bases["/v1/completions"]
    for name in (*names, b"Cookie", b"User-Agent", b"Host"):
        kept = [pair for pair in right if pair[0] != name]
        for octet in OCTETS:
            yield _request(post, [*kept, (name, b"a" + octet + b"b")], hello)
    for octet in OCTETS:
        yield _request(b"PO" + octet + b"ST /v1/completions HTTP/1.1", right, hello)
        yield _request(b"GET /v1/mod" + octet + b"els HTTP/1.1", right, b"")
        yield _request(b"GET /v1/models HTTP/1." + octet, right, b"")
        yield _request(post, [*right, (b"X-" + octet + b"Y", b"a")], hello)
        yield _request(post, right, hello[:5] + octet + hello[5:])
    for path, (kind, base, _) in PATHS.items():
        for field in (*kind.model_fields, "other"):
            for value in VALUES:
                body = json.dumps({**base, field: value}).encode()
                yield _request(b"POST " + path.encode() + b" HTTP/1.1", right, body)
    while True:
        path = rng.choice([*PATHS, "/nowhere", "/", "/health", "/metrics", "/v1/models"])
        body = bytearray(bases.get(path, b""))
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(body))
            body[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
        more = [(rng.choice(names), rng.randbytes(rng.randint(0, 30))) for _ in range(rng.randint(0, 3))]
        some = [pair for pair in right if rng.random() < 0.9]
        method = rng.choice([b"POST", b"GET", b"OPTIONS", b"HEAD"] if not body else [b"POST"])
        yield _request(method + b" " + path.encode() + b" HTTP/1." + rng.choice([b"0", b"1"]), some + more, bytes(body))


def grpc_requests() -> Iterator[tuple[str, bytes]]:
    """Each field of each message, right and wrong."""
    for method, base in METHODS.items():
        for _, make in messages(type(base), base, SMALL):
            yield f"/kvrelay.v1.InferenceService/{method}", make()


async def run_all(stop: asyncio.Event, sends: Iterator[Send], count: int) -> dict[str, Any]:
    """Sends `count` requests, AT_ONCE at a time; counts what came of them, and keeps what is wrong."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []

    async def one() -> None:
        while not stop.is_set() and outcomes.total() < count and (send := next(sends, None)) is not None:
            outcomes["under way"] += 1
            said = await send()
            outcomes["under way"] -= 1
            outcomes[" ".join(said.split()[:2])] += 1
            if said.startswith("!") and len(wrong) < KEPT:
                wrong.append(said[:600])

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    bad = sum(number for kind, number in outcomes.items() if kind.startswith("!"))
    return {"sent": outcomes.total(), "outcomes": +outcomes, "wrong": bad, "examples": wrong}


async def fuzz(options: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
    """Options: `key`; `count`, of which a tenth is sent over gRPC; `seed`; `stride`, with which the requests that are
    wrong in one place are chosen: 1 for all."""
    rng = random.Random(options["seed"])
    tls, metadata = web_tls(options), authorization(options)
    raw, calls = http_requests(options["key"], rng), [*grpc_requests()]
    async with channel(options) as calling:

        async def over_http(request: bytes, half_close: bool) -> str:
            try:
                half = half_close and tls is None  # TLS has no half of a connection
                answers = await exchange(options["http"], request, half_close=half, tls=tls)
                check_answers(answers)
            except (AssertionError, ValueError, TimeoutError, OSError) as error:
                return f"! {type(error).__name__} {error} after {request[:200]!r}"
            return f"HTTP {answers[0][0]}" if answers else f"! no answer to {request[:300]!r}"

        async def over_grpc(method: str, data: bytes) -> str:
            return await call(calling, method, data, CALL_SECONDS, metadata)

        def sends() -> Iterator[Send]:
            number = 0
            while True:
                for _ in range(options["stride"] - 1):
                    next(raw)
                request = next(raw)
                number += 1
                if number % 10:
                    yield lambda request=request, half=bool(number % 2): over_http(request, half)
                else:
                    method, data = calls[(number // 10 * options["stride"]) % len(calls)]
                    yield lambda method=method, data=data: over_grpc(method, data)

        return await run_all(stop, sends(), options["count"])


async def call(calling: grpc.aio.Channel, method: str, data: bytes, seconds: float, metadata: Any) -> str:
    """Sends a message of gRPC; what came of it."""
    answer = calling.unary_stream(method)(data, timeout=seconds, metadata=metadata)
    try:
        async for _ in answer:
            pass
    except grpc.aio.AioRpcError as error:
        name, details = error.code().name, error.details() or ""
        right = name in GRPC_CODES and (name != "UNAVAILABLE" or bool(details)) and "defect" not in details
        return f"{'gRPC' if right else '! gRPC'} {name} {details} {data[:100]!r}"
    return "gRPC OK"


async def deadlines(options: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
    """Requests whose deadline is any time between 0.3 ms and 1 s. Options: `key`, `count`, `seed`."""
    rng = random.Random(options["seed"])
    metadata = authorization(options)
    base = METHODS["Generate"]
    async with channel(options) as calling, session(options, CALL_SECONDS) as web:

        async def over_http(seconds: float, streamed: bool) -> str:
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

        async def over_grpc(seconds: float) -> str:
            request = type(base)()
            request.CopyFrom(base)
            request.sampling.max_tokens = 32  # type: ignore[attr-defined]  # it is a GenerateRequest
            method = "/kvrelay.v1.InferenceService/Generate"
            return await call(calling, method, request.SerializeToString(), seconds, metadata)

        def sends() -> Iterator[Send]:
            for number in range(options["count"]):
                seconds = 10 ** rng.uniform(-3.5, 0.0)
                if number % 2:
                    yield lambda seconds=seconds: over_grpc(seconds)
                else:
                    yield lambda seconds=seconds, streamed=number % 4 == 0: over_http(seconds, streamed)

        return await run_all(stop, sends(), options["count"])
