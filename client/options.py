"""gRPC options of a client's channel."""

MAX_MESSAGE_BYTES = 64 * 2**20

# A router that is frozen, or behind a network that drops, is noticed in about 15 s; only while a call is under way.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
