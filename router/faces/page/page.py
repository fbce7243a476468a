"""Serves the page at `/`, and what it shows as server-sent events.

    GET  /              the page; GET /page/NAME its scripts and styles: the same for everybody, so nobody is asked
    GET  /page/about    the router and its model
    GET  /page/events   `recent`, then `fleet` whenever something has changed, and `ended` for each request that ends;
                        `over` in the end, or `error`
    GET  /page/requests/ID  what a running or recent request went through

The playground asks the HTTP API, as any client does. Whoever asks for more than the page itself needs the API key or
certificate that any other call needs, and sees the requests of its own tenant only.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from importlib.resources import files
from math import inf

from aiohttp import web
from pydantic_core import to_json

from kvrelay.router.entry.front import Front
from kvrelay.router.errors import NotKept, RequestError, SlowReader, shorten
from kvrelay.router.faces.http.errors import body_of
from kvrelay.router.faces.http.exchange import Events, caller_of
from kvrelay.router.faces.page.view import about, fleet
from kvrelay.router.placing.registry import WorkerRegistry
from kvrelay.router.records.requests import RECENT, EndedRequest
from kvrelay.router.shares import Seats

MAX_VIEWERS = 16
"""Pages that may be open at once: each gets a few events a second. A newcomer takes the place of another client's
oldest page if that client has two more than it has."""
FLEET_SECONDS = 0.2
"""Seconds between two looks at the workers."""
JSONS_A_TURN = 10
"""Requests whose JSON is made in one turn of the event loop, some 0.1 ms each."""
SILENCE_SECONDS = 10.0
"""Seconds after which an event is sent though nothing has changed, to notice a viewer that is gone."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY = {
    # No script, style or connection that isn't the router's own, and no frame around the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Page:
    """The page of one router."""

    def __init__(self, front: Front, registry: WorkerRegistry, router: str) -> None:
        """
        Args:
            router: name of the router.
        """
        self._front = front
        self._registry = registry
        self._router = router
        self._viewers = Seats(MAX_VIEWERS, "pages")
        self._fleets: dict[str, tuple[float, bytes]] = {}
        """Latest `fleet` event of each tenant that views, and the time at which it was made."""
        folder = files(__package__) / "assets"
        self._assets = {asset.name: asset.read_bytes() for asset in folder.iterdir() if asset.is_file()}

    def routes(self) -> list[web.RouteDef]:
        """The routes of the page on the HTTP face."""
        return [
            web.get("/", partial(self._asset, "index.html")),
            *(web.get(f"/page/{name}", partial(self._asset, name)) for name in self._assets),
            web.get("/page/about", self._about),
            web.get("/page/events", self._events),
            web.get("/page/requests/{id:.+}", self._request),
        ]

    async def _asset(self, name: str, _: web.Request) -> web.Response:
        kind = TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._assets[name], content_type=kind, charset="utf-8", headers=SECURITY)

    async def _about(self, request: web.Request) -> web.Response:
        self._front.tenant(caller_of(request))
        shown = about(self._front, self._router, self._registry)
        return web.Response(body=to_json(shown), content_type="application/json", headers=SECURITY)

    async def _request(self, request: web.Request) -> web.Response:
        tenant = self._front.tenant(caller_of(request))
        name = request.match_info["id"]
        found = self._front.requests.lives(tenant, name, self._front.dispatch.clock())
        if not found:
            raise NotKept(
                f"request {shorten(name)} is not known to {self._router}, which keeps the running requests of a caller "
                f"and the latest {RECENT} that have ended since it started"
            )
        return web.Response(body=to_json(found), content_type="application/json", headers=SECURITY)

    # The viewer's stream.

    async def _events(self, request: web.Request) -> web.StreamResponse:
        caller = caller_of(request)
        tenant = self._front.tenant(caller)
        events = Events(request, self._front.config.idle_timeout_seconds)
        try:
            async with self._viewers.seat(self._front.holder(caller)):
                await self._show(tenant, events)
            return await events.end(_event("over", {}))
        except SlowReader:
            raise asyncio.CancelledError from None  # nobody reads an error either
        except RequestError as error:
            if events.begun:
                return await events.end(b"event: error\ndata: " + body_of(error) + b"\n\n")
            raise
        finally:
            events.close()

    async def _show(self, tenant: str, events: Events) -> None:
        """Sends what a viewer of this tenant sees, until the router drains."""
        recent = self._front.requests.recent(tenant)
        seen = recent[-1].number if recent else 0
        await events.write(_event_of("recent", b"[%s]" % b",".join([each async for each in _jsons(recent)])))
        sent, said = b"", 0.0
        while not self._front.draining:
            ended = self._front.requests.recent(tenant, seen)
            seen = ended[-1].number if ended else seen
            async for data in _jsons(ended):
                await events.write(_event_of("ended", data))
            now = self._front.dispatch.clock()
            shown = self._fleet(tenant, now)
            if shown != sent or now - said >= SILENCE_SECONDS:
                await events.write(shown)
                sent, said = shown, now
            await asyncio.sleep(FLEET_SECONDS)

    def _fleet(self, tenant: str, now: float) -> bytes:
        """The event of the workers and the running requests, made once for all viewers of a tenant."""
        made, event = self._fleets.get(tenant, (-inf, b""))
        if now - made >= FLEET_SECONDS / 2:
            event = _event("fleet", fleet(self._front, self._registry, tenant, now))
            self._fleets = {name: kept for name, kept in self._fleets.items() if now - kept[0] < FLEET_SECONDS}
            self._fleets[tenant] = now, event
        return event


async def _jsons(requests: list[EndedRequest]) -> AsyncIterator[bytes]:
    """The JSON of each request. Yields to the event loop after every few that had to be made."""
    for number, ended in enumerate(requests, 1):
        yield ended.json
        if number % JSONS_A_TURN == 0:
            await asyncio.sleep(0)


def _event(name: str, value: object) -> bytes:
    """A server-sent event of a value."""
    return _event_of(name, to_json(value))


def _event_of(name: str, data: bytes) -> bytes:
    """A server-sent event of JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
