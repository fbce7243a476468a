"""Requests with random deadlines; answers that only a defect gives are kept. `load.py` runs them, with the options that
the function names."""

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

from nemesis.load import tls_of
from support.costly import METHODS
from support.hostile import client_tls

AT_ONCE = 16
KEPT = 20
"""Wrong answers that are kept."""
CALL_SECONDS = 20.0
GRPC_CODES = {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED"} | {
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE")
}
"""Statuses that aren't a defect's; the last two must say why."""
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


async def call(calling: grpc.aio.Channel, method: str, data: bytes, seconds: float, metadata: Any) -> str:
    """Sends a gRPC message; returns the outcome."""
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
