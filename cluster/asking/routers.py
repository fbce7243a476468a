"""The routers' HTTP answers about the cluster and its requests: the page's own API (`router/faces/page/page.py`)."""

import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from kvrelay.cluster import state
from kvrelay.cluster.errors import NO_CLUSTER, RunError, UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""Seconds without an event after which a router counts as lost; it sends an event every ten seconds."""
NO_PAGE = "it has no page; the router's options http_port and page turn it on"


@dataclass(frozen=True, slots=True)
class Access:
    """The addresses of routers, and the credentials for calls to them."""

    urls: tuple[str, ...]
    """Base URL of each router's HTTP."""
    ca: Path | None = None
    """File with the authorities of their certificates; None takes the usual ones."""
    api_key: str | None = None
    guessed: bool = False
    """Whether no cluster runs here, and none was named."""

    @classmethod
    def of(cls, target: str | None, tls: bool, ca: Path | None, api_key: str | None) -> "Access":
        """The routers that `target` names, else those of the running cluster, else the default one.

        Raises:
            UsageError: the running cluster's routers serve no HTTP.
        """
        tls = tls or ca is not None
        current = state.current() if target is None else None
        if current is not None and current.router:
            if not current.http or not current.page:
                raise UsageError(f"router {current.router}: {NO_PAGE}")
            target, tls = current.http, tls or current.router_tls
        scheme = "https" if tls else "http"
        parts = [part.strip().rstrip("/") for part in (target or DEFAULT_URL).split(",")]
        urls = tuple(part if "://" in part else f"{scheme}://{part}" for part in parts)
        return cls(urls, ca, api_key, guessed=target is None)


class Routers(AbstractAsyncContextManager["Routers"]):
    """Asks the routers."""

    def __init__(self, access: Access) -> None:
        self.urls: Sequence[str] = access.urls
        self._access = access
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Routers":
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        self._session = open_session(self._access.ca, self._access.api_key, timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def about(self, url: str) -> dict[str, Any]:
        """Name, version and model of a router.

        Raises:
            RunError: it doesn't answer, or refuses.
        """
        found = await self._json(url, "/page/about")
        return found if isinstance(found, dict) else {}

    async def request(self, url: str, request_id: str) -> list[dict[str, Any]]:
        """The life of each completion of a request; empty if the router doesn't know the request.

        Raises:
            RunError: it doesn't answer, or refuses.
        """
        found = await self._json(url, f"/page/requests/{quote(request_id, safe='')}", missing=[])
        return found if isinstance(found, list) else []

    async def events(self, url: str) -> AsyncIterator[tuple[str, Any]]:
        """Name and value of each event of a router: `recent`, then `fleet` and `ended`.

        Raises:
            RunError: it doesn't answer, refuses, or has ended.
        """
        try:
            async with self._session.get(f"{url}/page/events") as answer:
                await _check(url, answer)
                name = ""
                async for line in _lines(answer.content):
                    field, _, value = line.decode().strip().partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        yield name, json.loads(value)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._failure(url, error) from None
        raise RunError(f"router {url} has ended")

    async def _json(self, url: str, path: str, missing: object = None) -> object:
        """The JSON answer; `missing` if the router doesn't know the request that is asked for."""
        try:
            async with self._session.get(url + path, timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)) as answer:
                # Any other 404 is about the path.
                if answer.status == 404 and (await _error(answer)).get("code") == "request_not_found":
                    return missing
                await _check(url, answer)
                found: object = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._failure(url, error) from None

    def _failure(self, url: str, error: Exception) -> RunError:
        if self._access.guessed and isinstance(error, aiohttp.ClientConnectorError):
            return RunError(f"{NO_CLUSTER}, --target names routers elsewhere; nothing answers at {url}")
        return RunError(f"router {url}: {error or type(error).__name__}")


def open_session(ca: Path | None, api_key: str | None, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """A session for calls to routers, with any number of connections at once.

    Args:
        ca: file with the authorities of their certificates; None takes the usual ones.

    Raises:
        UsageError: `ca` can't be read.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca else None)
    except OSError as error:
        raise UsageError(f"--ca {ca}: {error.strerror or error}") from None
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=context), headers=headers, timeout=timeout)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: an event of a large cluster is longer than aiohttp's own limit."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


async def _error(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error that a router's answer describes; empty if it describes none."""
    try:
        error = (await answer.json())["error"]
    except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


async def _check(url: str, answer: aiohttp.ClientResponse) -> None:
    """
    Raises:
        RunError: the answer is an error; the text is the router's own.
    """
    if answer.status == 404:
        raise RunError(f"router {url}: {NO_PAGE}")
    if answer.status != 200:
        text = (await _error(answer)).get("message", f"{answer.status} {answer.reason}")
        raise RunError(f"router {url}: {text}")
