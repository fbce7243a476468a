"""Options of a router that can't be used are refused by name, value and limit."""

import re
from typing import Any

import pytest

from kvrelay.router.config import RouterConfig, Service, ServiceClass

NO_ORIGINS = ("", "chat.example.org", "https://a.example/path", "https://u@a.example", "https://")
NO_PROXIES = ("", "10.0.0.0/33", "example.org", "10.0.0.1:80")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"header_timeout_seconds": 0.0}, "header_timeout_seconds is 0.0; allowed: 0.1 to 3600"),
        ({"request_timeout_seconds": 0.0}, "request_timeout_seconds is 0.0; allowed: 0.1 to 3600"),
        ({"http_idle_seconds": -1.0}, "http_idle_seconds is -1.0; allowed: 0.1 to 86400"),
        ({"grpc_idle_seconds": 0.0}, "grpc_idle_seconds is 0.0; allowed: 0.1 to 86400"),
        ({"max_connections_per_address": 0}, "max_connections_per_address is 0; allowed: 1 to 1000000"),
        ({"spare_descriptors": 7}, "spare_descriptors is 7; allowed: 8 to 1000000"),
        (
            {"max_arriving_bytes": 20 * 2**20 - 1},
            "max_arriving_bytes is 20971519; allowed: at least 20971520, five times",
        ),
        ({"tls_certificate": "c"}, "tls_key is ''; allowed: a file exactly if tls_certificate is one"),
        ({"tls_key": "k"}, "tls_key is 'k'"),
        ({"tls_client_ca": "ca"}, "tls_client_ca is 'ca'; allowed: with tls_certificate only"),
        *(({"cors_origins": ("*", origin)}, f"cors_origins has '{origin}'") for origin in NO_ORIGINS),
        *(
            ({"trusted_proxies": ("10.0.0.1", proxy)}, f"trusted_proxies has '{proxy}'; allowed: addresses, and")
            for proxy in NO_PROXIES
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        RouterConfig(**options)


def test_classes_have_what_is_configured_and_else_their_own_defaults() -> None:
    assert RouterConfig(first_token_timeout_seconds=7.0).services() == {
        "default": Service("default", 0, 1.0, first_token_timeout_seconds=7.0),
        "interactive": Service("interactive", 0, 1.0, 2.0, 0.1, 7.0),
        "batch": Service("batch", 1, 1.0, first_token_timeout_seconds=7.0),
    }
    classes = {
        "batch": ServiceClass(weight=2.0, first_token_timeout_seconds=600.0),
        "chat": ServiceClass(tpot_target_seconds=0.05),
        "interactive": ServiceClass(priority=-3, ttft_target_seconds=1.0),
    }
    assert RouterConfig(classes=classes).services() == {
        "default": Service("default", -3),
        "interactive": Service("interactive", -3, 1.0, 1.0, 0.1),
        "batch": Service("batch", 1, 2.0, first_token_timeout_seconds=600.0),
        "chat": Service("chat", 0, tpot_seconds=0.05),
    }
    assert RouterConfig(classes={"default": ServiceClass(priority=5)}).services()["default"].rank == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": 1001}, "priority is 1001; allowed: -1000 to 1000, or null"),
        ({"ttft_target_seconds": 0.0}, "ttft_target_seconds is 0.0; allowed: 0.001 to 3600, or null"),
        ({"tpot_target_seconds": 61.0}, "tpot_target_seconds is 61.0; allowed: 0.0001 to 60, or null"),
    ],
)
def test_options_of_a_class_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ServiceClass(**options)
