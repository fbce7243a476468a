"""Which process of the cluster is meant."""

from typing import NamedTuple


class WorkerId(NamedTuple):
    """One incarnation of one worker: what every part of kvrelay knows a worker by."""

    name: str
    """Unique in the cluster, e.g. `prefill-0`; stays the same when the worker is replaced."""
    incarnation: str
    """Drawn when the process starts, so a message meant for an earlier process of this name can be refused."""

    def __str__(self) -> str:
        return f"{self.name} {self.incarnation}"
