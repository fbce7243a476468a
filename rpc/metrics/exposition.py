"""The HTTP port at which a process serves its metrics as Prometheus text."""

from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from kvrelay.rpc.metrics.metric_set import MetricSet

PATH = "/metrics"
CLOSE_SECONDS = 0.5
"""Seconds for answers to end when the process is to end."""


class MetricsPort:
    """Serves GET /metrics, and further pages for Prometheus."""

    def __init__(self, metrics: MetricSet, targets: Callable[[], list[dict[str, Any]]] | None = None) -> None:
        """
        Args:
            targets: what GET /targets answers, for Prometheus' HTTP service discovery.
        """
        app = web.Application()
        app.add_routes([web.get(PATH, make_aiohttp_handler(metrics.registry))])
        if targets is not None:

            async def answer(_: web.Request) -> web.Response:
                return web.json_response(targets())

            app.add_routes([web.get("/targets", answer)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)

    async def start(self, host: str, port: int) -> int:
        """Binds and serves; returns the port.

        Args:
            port: 0 for a free one.

        Raises:
            OSError: the port can't be bound; the text names the option.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise OSError(f"metrics_port {port}: already in use, or not to be bound, on {host}") from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Closes all connections."""
        await self._runner.cleanup()
