"""`kvrelay down`: asks the owner of the cluster to end it; a cluster without an owner is ended from here."""

import logging
import os
import signal
from typing import TYPE_CHECKING

from kvrelay.cluster import state
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.processes import processes
from kvrelay.cluster.ray import environment as rayenv

if TYPE_CHECKING:
    from kvrelay.cluster.up.report import Report

OWNER_SECONDS = 60.0
"""Seconds for a cluster and its Ray to end, beyond the time for its requests."""


def down(report: "Report") -> bool:
    """Ends the cluster that was started from this machine; False if there is none.

    Raises:
        RunError: it did not end as it should.
    """
    current = state.current()
    if current is None:
        return False
    report.phase("stopping")
    if current.pid is None:
        _end_detached(current)
        return True
    owner = processes.find(current.pid)
    again = state.current()
    if owner is None or again is None or again.pid != current.pid:
        return False  # the owner has ended just now: the process that was found may be another one with its pid
    os.kill(owner.pid, signal.SIGTERM)
    # A killed owner takes Ray's local processes with it.
    seconds = current.drain_seconds + OWNER_SECONDS
    if processes.end([owner], seconds):
        state.forget()
        raise RunError(f"pid {owner.pid} did not end within {seconds:g} s and was killed")
    return True


def _end_detached(current: state.ClusterState) -> None:
    """Ends a cluster that was left on a shared Ray cluster."""
    rayenv.prepare()
    import ray  # takes half a second, which the owner of a local cluster has spent already

    from kvrelay.cluster.ray import supervisor_actor

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        problem = f"Ray at {current.ray_address} is gone"
        supervisor_actor.connect(problem, address=current.ray_address, namespace=current.namespace)
    except RunError:
        state.forget()
        raise
    supervisor_actor.end(current.namespace, current.drain_seconds)
    ray.shutdown()
    state.forget()
