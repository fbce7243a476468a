"""Changes that an actor makes to its server's options."""

import pytest

from kvrelay.cluster.ray.actors import reachable
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from support.router_fakes import run


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")],
)
def test_a_router_tells_others_an_address_at_which_they_reach_it(host: str, told: str) -> None:
    async def test() -> None:
        router = RouterServer(reachable(RouterConfig(host=host, grpc_port=0, http_port=None), local=True))
        port = await router.start()
        try:
            assert router.address == f"{told}:{port}"
        finally:
            await router.stop(0.0)

    run(test)
