"""Which transports this worker can do."""

from kvrelay.transfer.gloo import GlooTransport
from kvrelay.transfer.nccl import NcclTransport, nccl_is_available
from kvrelay.transfer.transport import Transport


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
    transports: dict[str, Transport] = {}
    if wanted == "nccl" or (wanted == "auto" and gpu and nccl_is_available()):
        transports[NcclTransport.name] = NcclTransport()
    if wanted != "nccl":
        transports[GlooTransport.name] = GlooTransport(host)
    return transports
