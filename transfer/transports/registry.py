"""The choice of transports: those that this worker can use, the one that a pair uses, and why others can't be used."""

from collections.abc import Callable, Mapping, Sequence

from kvrelay.rpc.certificates import CertificateFiles
from kvrelay.transfer.config import Encrypt
from kvrelay.transfer.protocol.ports import NoTransportError
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.gloo import GlooTransport
from kvrelay.transfer.transports.nccl import NcclTransport, nccl_missing, not_between
from kvrelay.transfer.transports.nixl import NixlTransport, nixl_missing
from kvrelay.transfer.transports.shm import SharedMemoryTransport, shm_missing
from kvrelay.transfer.transports.tcp import TcpTransport

ON_GPU = ("nccl", "nixl", "shm", "tcp", "gloo")
"""Transports for a KV pool on a GPU, best first; from shm on, KV goes through host memory."""

ON_CPU = ("shm", "tcp", "gloo", "nixl")
"""Transports for a KV pool in host memory, best first. NIXL is last because its waits poll, on cores that also compute;
an operator whose network suits NIXL sets `transfer.transport: nixl`."""

_MISSING: dict[str, Callable[[], str | None]] = {
    "nccl": nccl_missing,
    "nixl": nixl_missing,
    "shm": shm_missing,
    "tcp": lambda: None,
    "gloo": lambda: None,
}
"""Checks, by transport, that say why this process can't use it; None if it can."""

_NO_MAC = "transfer.encrypt is 'integrity', but it moves GPU memory past the CPU, which would have to authenticate it"
_NOT_ON_GPU = "the KV pool is not on a GPU"
_NO_TLS = "transfer.encrypt is 'full', but it can't encrypt"
_SPREAD = "the worker's ranks are on several machines (engine.hosts), and all of them use the same transport"


def _unprotected(name: str, encrypt: Encrypt, gpu: bool) -> str | None:
    """Why a transport can't do what `transfer.encrypt` asks for; None if it can. Memory that two processes of one
    machine share (shm) is on no network.
    """
    if encrypt == "full" and name not in ("shm", "tcp"):
        return _NO_TLS
    if encrypt == "integrity" and (name == "nccl" or (name == "nixl" and gpu)):
        return _NO_MAC
    return None


def reasons(wanted: str, gpu: bool, encrypt: Encrypt, hosts: int = 1) -> dict[str, str | None]:
    """Why this worker doesn't use a transport, for each one, best first; None if it does.

    Args: those of `available_transports`.
    """
    order = ON_GPU if gpu else ON_CPU
    others = [name for name in ON_GPU if name not in order]
    return {
        name: (None if wanted in ("auto", name) else f"transfer.transport is {wanted!r}")
        or (_SPREAD if name == "shm" and hosts > 1 else None)
        or _unprotected(name, encrypt, gpu)
        or _MISSING[name]()
        or (None if name in order else _NOT_ON_GPU)
        for name in (*order, *others)
    }


def available_transports(
    host: str,
    wanted: str = "auto",
    gpu: bool = False,
    encrypt: Encrypt = "none",
    certificates: CertificateFiles | None = None,
    hosts: int = 1,
) -> dict[str, Transport]:
    """The transports of a worker by name, best first: its membership entry lists them, and its links use them.

    Args:
        host: address that links bind to, and by which others reach this worker.
        wanted: `TransferConfig.transport`; anything but "auto" leaves only that one.
        gpu: whether the KV pool is on a GPU, so that a link may carry device memory.
        encrypt: `TransferConfig.encrypt`; transports that can't do it are left out.
        certificates: this worker's, for encrypt full.
        hosts: machines of the worker's ranks.

    Raises:
        ValueError: this worker can't use the wanted one, or has no certificates for encrypt full.
        OSError: `host` can't be bound.
    """
    if encrypt == "full" and certificates is None:
        raise ValueError(
            "transfer.encrypt is 'full'; allowed with security.tls mutual only, whose certificates it uses"
        )
    found = reasons(wanted, gpu, encrypt, hosts)
    if wanted != "auto" and found[wanted] is not None:
        usable = ", ".join(
            ["auto", *(name for name, why in reasons("auto", gpu, encrypt, hosts).items() if why is None)]
        )
        raise ValueError(
            f"transfer.transport is {wanted!r}, which this worker can't do: {found[wanted]}; allowed: {usable}"
        )
    make: dict[str, Callable[[], Transport]] = {
        "nccl": NcclTransport,
        "nixl": lambda: NixlTransport("cuda" if gpu else "cpu", encrypt),
        "shm": lambda: SharedMemoryTransport(gpu),
        "tcp": lambda: TcpTransport(host, encrypt, certificates, gpu),
        "gloo": lambda: GlooTransport(host, encrypt, gpu),
    }
    return {name: make[name]() for name, why in found.items() if why is None}


def _apart(name: str, here: str, there: str) -> str | None:
    """Why two workers with these scopes of a transport can't be linked by it; None if they can."""
    if name == "nccl":
        return not_between(here, there)
    return None if here == there else "they don't share a machine"


def entries(transports: Mapping[str, Transport]) -> list[str]:
    """The transports as a membership entry lists them: the name, followed by @ and the scope if there is one."""
    return [f"{name}@{transport.scope}" if transport.scope else name for name, transport in transports.items()]


def choose(wanted: str, here: Sequence[str], there: Sequence[str]) -> str:
    """The name of a pair's transport: the one `wanted`, or for "auto" the best (first) of `here` that is also `there`.

    Args:
        here: `entries` of this worker.
        there: those of the other.

    Raises:
        NoTransportError: there is none; the text says what each end can use, and why this one can use no other.
    """
    names = [entry.partition("@")[0] for entry in here]
    names_there = [entry.partition("@")[0] for entry in there]
    scopes = dict(entry.partition("@")[::2] for entry in there)
    reasons = []
    for name, _, scope in (entry.partition("@") for entry in here):
        if wanted in ("auto", name) and name in scopes:
            apart = _apart(name, scope, scopes[name])
            if apart is None:
                return name
            reasons.append(f"{name} not between these two: {apart}")
    reasons += [
        f"{name} not here: {_MISSING[name]() or 'not offered by this worker'}" for name in ON_GPU if name not in names
    ]
    raise NoTransportError(
        f"no transport for transfer.transport = {wanted}: this worker can do {', '.join(names) or 'none'},"
        f" the other {', '.join(names_there) or 'none'} ({'; '.join(reasons)})"
    )
