"""The two ways to a server: kvrelay's gRPC, and OpenAI's HTTP, which other servers speak as well.

Both measure what `vllm bench serve` measures: times are taken as the messages of a completion arrive, the last one
included, whether or not it has tokens of its own.
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from kvrelay.cli.bench.workload import Ask
from kvrelay.client import AsyncClient, Tls
from kvrelay.client.errors import KvrelayError
from kvrelay.cluster.asking.routers import open_session
from kvrelay.cluster.errors import RunError, UsageError

ERROR_CHARACTERS = 200


@dataclass(slots=True)
class Reply:
    """The answer to one request. Times are in seconds from the moment when the request was sent."""

    ok: bool = False
    error: str = ""
    arrivals: tuple[float, ...] = ()
    """Seconds at which each message of the completion came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    stages: dict[str, float] | None = None
    """The server's own figures of the request, of kvrelay's gRPC only."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, and the credentials and time limit of calls to it."""

    address: str
    """host:port of routers for gRPC, with commas between; base URL for HTTP."""
    model: str = ""
    """Name that requests carry over HTTP; empty: the one that the server names first."""
    tls: Tls | None = None
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds after which a request has failed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of every request of a benchmark."""

    ignore_eos: bool
    temperature: float
    seed: int
    cache_salt: str
    """Requests with different salts share no prefix cache; empty: none is sent."""


class Face(Protocol):
    """A way to a server; used inside of `async with`."""

    async def __aenter__(self) -> "Face": ...

    async def __aexit__(self, *_: object) -> None: ...

    async def model(self) -> dict[str, Any]:
        """The server's description of its model.

        Raises:
            RunError: it doesn't answer, or refuses.
        """

    async def tokenize(self, text: str) -> Sequence[int]:
        """
        Raises:
            RunError: the server can't.
        """

    async def send(self, ask: Ask, sampling: Sampling) -> Reply:
        """Sends a request and reads its whole answer. A failure is a reply too."""


class GrpcFace:
    """kvrelay's gRPC."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client: AsyncClient

    async def __aenter__(self) -> "GrpcFace":
        target = self._target
        try:
            self._client = AsyncClient(target.address, api_key=target.api_key, tls=target.tls)
        except KvrelayError as error:
            raise RunError(f"--target {target.address}: {error}") from None
        except OSError as error:
            raise UsageError(f"--ca {target.tls and target.tls.ca}: {error.strerror}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def model(self) -> dict[str, Any]:
        try:
            return asdict(await self._client.model_info())
        except KvrelayError as error:
            raise RunError(f"--target {self._target.address}: {error}") from None

    async def tokenize(self, text: str) -> Sequence[int]:
        try:
            return await self._client.tokenize(text)
        except KvrelayError as error:
            raise RunError(f"--target {self._target.address}: {error}") from None

    async def send(self, ask: Ask, sampling: Sampling) -> Reply:
        arrivals: list[float] = []
        last = None
        began = time.perf_counter()
        try:
            async with self._client.generate(
                ask.prompt,
                max_tokens=ask.output_tokens,
                ignore_eos=sampling.ignore_eos,
                temperature=sampling.temperature,
                seed=sampling.seed,
                cache_salt=sampling.cache_salt,
                timeout=self._target.timeout,
            ) as stream:
                async for chunk in stream:
                    arrivals.append(time.perf_counter() - began)
                    last = chunk
        except KvrelayError as error:
            return Reply(error=_short(f"{type(error).__name__}: {error}"), arrivals=tuple(arrivals))
        if last is None or last.usage is None or last.timeline is None:
            return Reply(error="the stream ended without its last message", arrivals=tuple(arrivals))
        usage = last.usage
        stages = {name: value for name, value in asdict(last.timeline).items() if isinstance(value, int | float)}
        return Reply(
            True, "", tuple(arrivals), usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, stages
        )


class HttpFace:
    """OpenAI's `/v1/completions`, streamed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._base = target.address.rstrip("/").removesuffix("/v1")
        self._model = target.model
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "HttpFace":
        tls, timeout = self._target.tls, aiohttp.ClientTimeout(total=self._target.timeout)
        ca = Path(tls.ca) if tls is not None and tls.ca else None
        self._session = open_session(ca, self._target.api_key, timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> dict[str, Any]:
        listed = await self._json("GET", "/v1/models", None)
        models = listed.get("data") or [{}]
        self._model = self._model or str(models[0].get("id", ""))
        lengths = [model.get("max_model_len") for model in models if model.get("id") == self._model]
        return {"name": self._model, "max_context": lengths[0] if lengths else None}

    async def tokenize(self, text: str) -> Sequence[int]:
        answer = await self._json("POST", "/tokenize", {"model": self._model, "prompt": text})
        return [int(token) for token in answer.get("tokens", ())]

    async def _json(self, method: str, path: str, body: object) -> dict[str, Any]:
        try:
            async with self._session.request(method, self._base + path, json=body) as answer:
                if answer.status != 200:
                    text = _short(await answer.text())
                    raise RunError(f"--target {self._base}: {method} {path}: {answer.status} {answer.reason}: {text}")
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RunError(f"--target {self._base}: {method} {path}: {_why(error)}") from None
        return found if isinstance(found, dict) else {}

    async def send(self, ask: Ask, sampling: Sampling) -> Reply:
        body = {
            "model": self._model,
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "max_tokens": ask.output_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.cache_salt:
            body["cache_salt"] = sampling.cache_salt
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            async with self._session.post(f"{self._base}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    return Reply(error=_short(f"{answer.status} {answer.reason}: {await answer.text()}"))
                async for event in _events(answer.content):
                    if event.get("error"):
                        return Reply(error=_short(json.dumps(event["error"])), arrivals=tuple(arrivals))
                    if event.get("choices"):
                        arrivals.append(time.perf_counter() - began)
                    usage = event.get("usage") or usage
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Reply(error=_short(_why(error)), arrivals=tuple(arrivals))
        if not arrivals:
            return Reply(error="the stream ended without a token")
        details = usage.get("prompt_tokens_details") or {}
        prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        return Reply(True, "", tuple(arrivals), prompt, output, details.get("cached_tokens") or 0)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE].

    Raises:
        ValueError: one is no JSON object.
    """
    while line := await content.readline():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event is no JSON object")
            yield event


def _why(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)


def _short(text: str) -> str:
    return " ".join(text.split())[:ERROR_CHARACTERS]
