"""The description that a process gives of itself and its machine when the supervisor asks (`describe.proto`)."""

import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from kvrelay.internal.v1.describe_pb2 import Amount, CertificateEnd, Description
from kvrelay.machine import VERSION
from kvrelay.machine.control_groups import memory_limits
from kvrelay.rpc.certificates import CertificateFiles

PACKAGES = ("torch", "ray", "grpcio", "protobuf", "triton", "numpy", "aiohttp")
UNLIMITED = -1.0
UNKNOWN = -1.0
SHARED_MEMORY = Path("/dev/shm")


def describe(certificates: Iterable[CertificateFiles | None] = ()) -> Description:
    """This process and its machine. Blocks for some milliseconds."""
    found = Description(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **versions(PACKAGES), "kvrelay": VERSION},
    )
    found.amounts.extend(amounts())
    for files in certificates:
        if files is not None:
            expires = files.current().expires.timestamp()
            found.certificates.append(CertificateEnd(file=str(files.paths[0]), expires_unix=expires))
    return found


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed, by name."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def amounts() -> list[Amount]:
    """The limits of this process, such as open files and memory, and how much of each is used."""
    found = [
        Amount(name="open files", used=psutil.Process().num_fds(), limit=_limit(resource.RLIMIT_NOFILE)),
        Amount(name="locked memory", used=UNKNOWN, limit=_limit(resource.RLIMIT_MEMLOCK)),
    ]
    limits = memory_limits()
    if limits:
        # The limit that is reached first.
        memory = min(limits, key=lambda group: group.limit - group.used)
        found.append(Amount(name="memory", used=memory.used, limit=memory.limit))
    places = {"shared memory": SHARED_MEMORY, "disk /": Path("/")}
    places[f"disk {tempfile.gettempdir()}"] = Path(tempfile.gettempdir())
    for name, path in places.items():
        try:
            space = shutil.disk_usage(path)
        except OSError:
            continue  # a machine may have no /dev/shm
        found.append(Amount(name=name, used=space.total - space.free, limit=space.total))
    return found


def _limit(resource_number: int) -> float:
    value = resource.getrlimit(resource_number)[0]
    return UNLIMITED if value == resource.RLIM_INFINITY else float(value)
