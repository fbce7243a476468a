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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = psutil.Process().num_fds()
    found = [Amount(name="open files", used=files, limit=_limit(soft), hard_limit=_limit(hard))]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found.append(Amount(name="locked memory", used=UNKNOWN, limit=_limit(soft), hard_limit=_limit(hard)))
    limits = memory_limits()
    if limits:
        # The one that is reached first.
        memory = min(limits, key=lambda group: group.limit - group.used)
        found.append(Amount(name="memory", used=memory.used, limit=memory.limit, hard_limit=memory.limit))
    places = {"shared memory": SHARED_MEMORY, "disk /": Path("/")}
    places[f"disk {tempfile.gettempdir()}"] = Path(tempfile.gettempdir())
    for name, path in places.items():
        try:
            space = shutil.disk_usage(path)
        except OSError:
            continue  # a machine may have no /dev/shm
        found.append(Amount(name=name, used=space.total - space.free, limit=space.total, hard_limit=space.total))
    return found


def _limit(value: int) -> float:
    return UNLIMITED if value == resource.RLIM_INFINITY else float(value)
