"""Lets web pages of other origins call the HTTP API from a browser (CORS)."""

from collections.abc import Iterable

import aiohttp_cors
from aiohttp import web

PREFLIGHT_SECONDS = 600
"""How long a browser may remember what it was allowed."""


def allow(app: web.Application, origins: Iterable[str]) -> None:
    """Allows `origins` every route that the application has so far. No cookies: an API key is a header."""
    options = aiohttp_cors.ResourceOptions(  # type: ignore[no-untyped-call]  # its signature has no types
        allow_headers="*", expose_headers="*", max_age=PREFLIGHT_SECONDS
    )
    allowed = aiohttp_cors.setup(app, defaults=dict.fromkeys(origins, options))
    for route in list(app.router.routes()):
        allowed.add(route)
