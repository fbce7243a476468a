"""Which transports this worker can do, which of them a pair uses, and why others can't be used."""

from collections.abc import Callable, Mapping, Sequence

from kvrelay.transfer.ports import NoTransportError
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.cuda_ipc import cuda_ipc_missing, cuda_ipc_transport
from kvrelay.transfer.transports.gloo import GlooTransport
from kvrelay.transfer.transports.nccl import NcclTransport, nccl_missing
from kvrelay.transfer.transports.nixl import NixlTransport, nixl_missing
from kvrelay.transfer.transports.shm import shm_missing, shm_transport
from kvrelay.transfer.transports.tcp import TcpTransport

ON_GPU = ("cuda_ipc", "nccl", "nixl", "shm", "tcp", "gloo")
"""Best first, where the KV pool lies on a GPU."""

ON_CPU = ("shm", "tcp", "gloo", "nixl")
"""Best first, where it lies in host memory. NIXL comes last, since its waits poll, on cores that compute: who has a
network that it is made for says `transfer.transport: nixl`."""

_MISSING: dict[str, Callable[[], str | None]] = {
    "cuda_ipc": cuda_ipc_missing,
    "nccl": nccl_missing,
    "nixl": nixl_missing,
    "shm": shm_missing,
    "tcp": lambda: None,
    "gloo": lambda: None,
}


def available_transports(host: str, wanted: str = "auto", gpu: bool = False) -> dict[str, Transport]:
    """The transports of a worker by name, best first: what its membership entry lists, and what its links use.

    Args:
        host: address that links bind to, and by which others reach this worker.
        wanted: `TransferConfig.transport`; anything but "auto" leaves only that one.
        gpu: whether the KV pool lies on a GPU, so that a link may carry device memory.

    Raises:
        ValueError: the one that is wanted can't be done here.
        OSError: `host` can't be bound.
    """
    order = ON_GPU if gpu else ON_CPU
    names = order if wanted == "auto" else (wanted,)
    missing = {name: _why_not(name, order) for name in names}
    if wanted != "auto" and missing[wanted] is not None:
        possible = ", ".join(["auto", *(name for name in order if _why_not(name, order) is None)])
        raise ValueError(
            f"transfer.transport is {wanted!r}, which this worker can't do: {missing[wanted]}; allowed: {possible}"
        )
    make: dict[str, Callable[[], Transport]] = {
        "cuda_ipc": cuda_ipc_transport,
        "nccl": NcclTransport,
        "nixl": lambda: NixlTransport("cuda" if gpu else "cpu"),
        "shm": shm_transport,
        "tcp": lambda: TcpTransport(host),
        "gloo": lambda: GlooTransport(host),
    }
    return {name: make[name]() for name in names if missing[name] is None}


def entries(transports: Mapping[str, Transport]) -> list[str]:
    """How a membership entry lists them: the name, and behind an @ the scope where there is one."""
    return [f"{name}@{transport.scope}" if transport.scope else name for name, transport in transports.items()]


def choose(wanted: str, here: Sequence[str], there: Sequence[str]) -> str:
    """The name of a pair's transport: the one `wanted`, or for "auto" the best (first) of `here` that is also `there`.

    Args:
        here: `entries` of this worker.
        there: those of the other.

    Raises:
        NoTransportError: there is none; the text says what either end can do, and why this one can do no more.
    """
    for entry in here:
        name = entry.partition("@")[0]
        if wanted in ("auto", name) and entry in there:
            return name
    elsewhere = {entry.partition("@")[0] for entry in there} & {entry.partition("@")[0] for entry in here}
    notes = [f"{name} not between these two: they don't share a machine or its GPUs" for name in sorted(elsewhere)]
    known = {entry.partition("@")[0] for entry in here}
    notes += [
        f"{name} not here: {_MISSING[name]() or 'not offered by this worker'}" for name in ON_GPU if name not in known
    ]
    raise NoTransportError(
        f"no transport for transfer.transport = {wanted}: this worker can do {_shown(here)}, the other {_shown(there)}"
        f" ({'; '.join(notes)})"
    )


def _why_not(name: str, order: Sequence[str]) -> str | None:
    reason = _MISSING[name]()
    if reason is None and name not in order:
        return "the KV pool is not on a GPU"
    return reason


def _shown(entries: Sequence[str]) -> str:
    return ", ".join(entry.partition("@")[0] for entry in entries) or "none"
