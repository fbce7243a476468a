"""The identity of a process in the cluster, and addresses as text, host:port."""

from typing import NamedTuple


class WorkerId(NamedTuple):
    """One incarnation of one worker. Every part of kvrelay identifies a worker by it."""

    name: str
    """Unique in the cluster, e.g. `worker-0`; a replacement of the worker keeps it."""
    incarnation: str
    """Drawn when the process starts: a message for an earlier process of this name can be refused."""

    def __str__(self) -> str:
        return f"{self.name} {self.incarnation}"


def join(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
