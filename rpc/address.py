"""Addresses as text, host:port, and binding to one."""

import grpc


def join(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, option: str = "port") -> int:
    """Binds `server` and returns its port; `port` 0 takes a free one.

    Raises:
        OSError: the port can't be bound; the text names `option`, the port's name in the configuration.
    """
    try:
        return server.add_insecure_port(join(host, port))
    except RuntimeError as error:
        raise OSError(f"{option} {port}: already in use, or not to be bound, on {host}") from error
