"""gRPC options of channels between kvrelay's processes, and of all servers."""

from collections.abc import Sequence

Option = tuple[str, int | str]

HELLO_SECONDS = 5.0
"""How long either end of an internal stream waits for the first message of the other end."""

# keepalive_timeout_ms alone, without ping_timeout_ms, notices a frozen peer only after a minute.
_KEEPALIVE: tuple[Option, ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(max_message_bytes: int = 4 * 2**20) -> Sequence[Option]:
    """Options of a channel between kvrelay's own processes: notices a dead or frozen peer within three seconds."""
    return (
        *_KEEPALIVE,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


def server_options(max_message_bytes: int = 4 * 2**20) -> Sequence[Option]:
    """Options of a server. Without so_reuseport=0, a second server could bind its port and take half of its calls."""
    return (
        *_KEEPALIVE,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    )
