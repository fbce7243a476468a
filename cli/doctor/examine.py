"""Examines the running cluster: asks the supervisor, the routers and the dashboards, then runs every check."""

import socket
import urllib.error
import urllib.request
from dataclasses import asdict
from typing import Any

from kvrelay.cli.doctor import cluster_checks, machine_checks
from kvrelay.cli.doctor.finding import WRONG, Check, Examined, Finding, Reached
from kvrelay.cluster.asking.status import get_descriptions, get_status, serves
from kvrelay.cluster.state import ClusterState

CHECKS: dict[str, Check] = {
    "members": cluster_checks.members,
    "versions": cluster_checks.versions,
    "pairs": cluster_checks.pairs,
    "formats": cluster_checks.formats,
    "clocks": cluster_checks.clocks,
    "limits": machine_checks.limits,
    "transports": cluster_checks.transports,
    "protection": cluster_checks.protection,
    "certificates": machine_checks.certificates,
    "GPUs": machine_checks.gpus,
    "kernels": machine_checks.kernels,
    "RDMA": machine_checks.rdma,
    "KV pools": cluster_checks.pools,
    "disks": machine_checks.disks,
    "reachable": cluster_checks.reachable,
}
"""All checks by their names, in the order in which they are shown."""

CONNECT_SECONDS = 5.0


def examine(state: ClusterState) -> Examined:
    """The cluster as it is now.

    Raises:
        RunError: the supervisor refuses this caller.
    """
    status = get_status(state)
    described = get_descriptions(state) if status is not None else None
    return Examined(state, status, described, tuple(_reach(state)))


def diagnose(cluster: Examined) -> dict[str, list[Finding]]:
    """The findings of each check, by its name; checks that find nothing are left out."""
    found = {name: list(check(cluster)) for name, check in CHECKS.items()}
    return {name: findings for name, findings in found.items() if findings}


def well(findings: dict[str, list[Finding]]) -> bool:
    """Whether no finding is an error or a warning."""
    return not any(finding.severity in WRONG for each in findings.values() for finding in each)


def as_json(findings: dict[str, list[Finding]]) -> dict[str, Any]:
    """The output of `kvrelay doctor --json`."""
    checks = {name: [asdict(finding) for finding in each] for name, each in findings.items()}
    return {"ok": well(findings), "checks": checks}


def _reach(state: ClusterState) -> list[Reached]:
    """Tries to reach each router and dashboard."""
    found = [
        Reached(f"router {router}", "" if serves(router, state.router_tls) else "it places no requests now")
        for router in filter(None, state.router.split(","))
    ]
    for address in filter(None, state.http.split(",")):
        what = "page" if state.page else "HTTP"
        found.append(Reached(f"{what} {address}", _connect(address)))
    if state.dashboard:
        found.append(Reached(f"Ray's dashboard {state.dashboard}", _get(state.dashboard)))
    return found


def _connect(address: str) -> str:
    """Reason why a connection fails; empty if it succeeds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _get(url: str) -> str:
    """The reason why there is no answer; empty if there is one, a refusal for want of a token included."""
    try:
        urllib.request.urlopen(url, timeout=CONNECT_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""
