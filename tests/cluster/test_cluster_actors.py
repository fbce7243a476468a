"""The actors' hosting of servers, without Ray."""

import os

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvrelay.cluster.actors import RouterActor
from kvrelay.router.config import RouterConfig
from kvrelay.rpc.security import TOKEN_VARIABLE


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_router_tells_others_an_address_at_which_they_reach_it(host: str) -> None:
    actor = RouterActor(RouterConfig(host=host, grpc_port=0), True, os.environ[TOKEN_VARIABLE])
    try:
        address = actor.address()
        assert address.startswith("127.0.0.1:")
        with grpc.insecure_channel(address) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
        assert answer.status == HealthCheckResponse.NOT_SERVING
    finally:
        actor.stop(0.0)
    assert actor.watch(5.0) is not None
