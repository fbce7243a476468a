"""gRPC options of all channels and servers.

Internal connections, between kvrelay's own processes, notice a dead or frozen peer within three seconds: both ends
ping every second. On machines that stand still for a second, KVRELAY_PING_SECONDS gives the answers longer. Public
ones, between clients and routers, give the other end 20 s to answer: a healthy process that gets no CPU for some
seconds must not lose its streams.
"""

import math
import os
from collections.abc import Sequence

Option = tuple[str, int | str]

HELLO_SECONDS = 5.0
"""Longest time in seconds that either end of an internal stream waits for the first message of the other end."""

INTERNAL_MESSAGE_BYTES = 64 * 2**20
"""Largest message between kvrelay's own processes, in both directions. The largest ones are a Submit, at most five
bytes for each token of the context, and the events that a worker has gathered for a slow router."""

PUBLIC_RECEIVE_FACTOR = 1.25
"""Factor by which a request may be larger than the router's limit and still be refused by the router, which names the
limit, rather than by gRPC, which reads nothing of it."""

PUBLIC_WINDOW_BYTES = 65535
"""Bytes of a public connection that are taken before anybody reads them: the least that HTTP/2 allows. gRPC's own
window adapts to the client's speed, up to 4 MiB for each connection, which strangers could fill."""

SPARE_STREAMS = 100
"""Calls of one public connection beyond those that the router serves at once: they arrive, and are refused with a
reason. Further calls wait in the client."""

MAX_PENDING_CALLS = 1_000_000
"""Calls that have arrived and that the server has not begun to handle. gRPC's own default of 1,000 to 3,000 ends some
of them at random, as CANCELLED; the router refuses what is too much, with a reason."""

MAX_PENDING_SECONDS = 3600
"""Longest wait in seconds of such a call; gRPC's own default is 30 s, after which it ends as CANCELLED."""

PUBLIC_PING_SECONDS = 20
"""Silence after which either end of a public connection pings, and how long the answer may take."""

PING_VARIABLE = "KVRELAY_PING_SECONDS"
PING_LIMITS = (0.1, 60.0)

_PUBLIC_KEEPALIVE: tuple[Option, ...] = (
    ("grpc.keepalive_time_ms", PUBLIC_PING_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PUBLIC_PING_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PUBLIC_PING_SECONDS * 1000),
    ("grpc.http2.max_pings_without_data", 0),
)

# gRPC's default is 1: a second server could bind the same port by mistake, and take half of its calls.
_REUSE_PORT = "grpc.so_reuseport"

_SERVER: tuple[Option, ...] = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


def ping_seconds() -> float:
    """Seconds that the answer to a ping of an internal connection may take, by the environment.

    Raises:
        ValueError: they aren't allowed.
    """
    text, (least, most) = os.environ.get(PING_VARIABLE, "1"), PING_LIMITS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise ValueError(f"{PING_VARIABLE} is {text!r}; allowed: {least:g} to {most:g} seconds")
    return seconds


def _internal_keepalive() -> tuple[Option, ...]:
    milliseconds = round(1000 * ping_seconds())
    return (
        ("grpc.keepalive_time_ms", 1000),
        # This alone, without ping_timeout_ms, notices a frozen peer only after a minute.
        ("grpc.keepalive_timeout_ms", 2 * milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def channel_options() -> Sequence[Option]:
    """Options of a channel between kvrelay's own processes."""
    return (
        *_internal_keepalive(),
        *_message_limits(INTERNAL_MESSAGE_BYTES, INTERNAL_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


def server_options() -> Sequence[Option]:
    """Options of a server for kvrelay's own processes."""
    return (
        *_internal_keepalive(),
        *_SERVER,
        (_REUSE_PORT, 0),
        *_message_limits(INTERNAL_MESSAGE_BYTES, INTERNAL_MESSAGE_BYTES),
    )


def public_receive_bytes(max_message_bytes: int) -> int:
    """Largest message that a public server receives, if it refuses requests above `max_message_bytes` itself."""
    return math.ceil(PUBLIC_RECEIVE_FACTOR * max_message_bytes)


def public_server_options(max_message_bytes: int, max_requests: int, *, share_port: bool = False) -> Sequence[Option]:
    """Options of a server for clients, which refuses requests above `max_message_bytes` itself.

    Args:
        max_requests: calls that it serves at once.
        share_port: whether other processes serve the same port; the kernel spreads connections among them.
    """
    return (
        *_PUBLIC_KEEPALIVE,
        *_SERVER,
        (_REUSE_PORT, int(share_port)),
        *_message_limits(INTERNAL_MESSAGE_BYTES, public_receive_bytes(max_message_bytes)),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", PUBLIC_WINDOW_BYTES),
        ("grpc.max_concurrent_streams", max_requests + SPARE_STREAMS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
    )


def connection_options(handshake_seconds: float, idle_seconds: float, most: int) -> Sequence[Option]:
    """Options of a public server that bound its connections.

    Args:
        handshake_seconds: time for TLS and for the client's settings.
        idle_seconds: time without a call after which a connection is closed.
        most: connections that there may be; further ones are closed at once.
    """
    return (
        ("grpc.server_handshake_timeout_ms", math.ceil(handshake_seconds * 1000)),
        ("grpc.max_connection_idle_ms", math.ceil(idle_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", min(most, 2**31 - 1)),
    )


def _message_limits(send: int, receive: int) -> Sequence[Option]:
    return ("grpc.max_send_message_length", send), ("grpc.max_receive_message_length", receive)
