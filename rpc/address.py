"""Addresses, host:port as text, and taking one."""

import grpc


def join(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, option: str = "port") -> int:
    """Binds `server`; the port that it got, which `port` 0 leaves to the system.

    Raises:
        OSError: it can't be bound; names `option`, the configuration's name for it.
    """
    try:
        return server.add_insecure_port(join(host, port))
    except RuntimeError as error:
        raise OSError(f"{option} {port}: already in use, or not to be bound, on {host}") from error
