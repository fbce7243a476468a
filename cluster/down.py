"""`kvrelay down`: the owner of the cluster is told to end it; one left on a shared Ray cluster is ended from here."""

import logging
import os
import signal
from typing import TYPE_CHECKING

from kvrelay.cluster import processes, rayenv, state
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.state import ClusterState

if TYPE_CHECKING:
    from kvrelay.cluster.report import Report

OWNER_SECONDS = 60.0


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
        _end_left_running(current)
        return True
    owner = processes.find(current.pid)
    if owner is None or not state.held():
        return False  # it has ended just now
    os.kill(owner.pid, signal.SIGTERM)
    # Killed, it takes Ray's local processes with it.
    if processes.end([owner], OWNER_SECONDS):
        state.forget()
        raise RunError(f"pid {owner.pid} did not end within {OWNER_SECONDS:g} s and was killed")
    return True


def _end_left_running(current: ClusterState) -> None:
    rayenv.prepare()
    import ray  # takes half a second, which the owner of a local cluster has spent already

    from kvrelay.cluster import ray_launcher

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address=current.ray_address, namespace=current.namespace, log_to_driver=False, configure_logging=False)
    except ray_launcher.JOIN_ERRORS as error:
        state.forget()
        raise RunError(f"Ray at {current.ray_address} is gone: {ray_launcher.why_not_joined(error)}") from None
    supervisor = ray_launcher.find_supervisor(current.namespace)
    if supervisor is not None:
        ray_launcher.end(supervisor)
    ray_launcher.remove_all(current.namespace)
    ray.shutdown()
    state.forget()
