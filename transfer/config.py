"""The options of the KV hand-off."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from kvrelay.machine.options import Options, Removed, require

Transport = Literal["auto", "gloo", "nccl", "nixl", "shm", "tcp"]
Encrypt = Literal["none", "integrity", "full"]
Seconds = Annotated[float, Interval(ge=0.01, le=3600)]

BETWEEN_GPUS = frozenset({"nccl"})
"""Transports from GPU memory to GPU memory. To open a link takes longer than a frame may, because NCCL makes a
communicator."""
LINK_BUFFERS = 2
"""Number of frames that a link's end has memory for."""


@dataclass(frozen=True, slots=True)
class TransferConfig(Options):
    """Options of the hand-off between a prefill and a decode worker."""

    transport: Annotated[Transport, Removed("cuda_ipc", "auto, nccl or shm")] = "auto"
    """Transport of KV bytes; auto takes the best one that both workers can use.

    nccl: from GPU to GPU, within a machine too; two workers on one GPU need NCCL 2.30. nixl: over RDMA where there is
    such a network; needs the extra kvrelay[nixl]. shm: shared memory of one machine (of one pod), for GPUs through the
    host. tcp: from host memory to host memory, anywhere. gloo: the same through torch's Gloo.
    """

    frame_bytes: Annotated[int, Interval(ge=2**16, le=2**26)] = 8 * 2**20
    """KV bytes of one frame at most; 64 KiB to 64 MiB. A larger KV block is sent in several frames, by layers."""

    gpu_frame_bytes: Annotated[int, Interval(ge=2**16, le=2**28)] = 64 * 2**20
    """KV bytes of one frame from GPU to GPU (nccl) at most; 64 KiB to 256 MiB. Each end of a link takes GPU memory for
    two frames."""

    gpu_buffer_bytes: int = 4 * 2**30
    """GPU memory for the frames of all links from GPU to GPU, beside `kv_memory_bytes`. A link that doesn't fit closes
    an idle one, and is refused if there is none; at least two frames."""

    checksum: bool = True
    """Verify a 64-bit checksum of every frame before its KV is used. Switch it off only to measure its cost."""

    encrypt: Encrypt = "none"
    """Protection of KV on the network between two machines; `auto` takes only transports that can do it.

    none: for a trusted network; checksums find accidental damage. integrity: tcp, gloo, and nixl from host memory carry
    a keyed MAC (AES-GMAC) in the checksum's place, so nobody can change KV unnoticed. full: tcp uses TLS 1.3 with the
    certificates of `security`, so nobody can read it either; needs security.tls mutual. nccl can do none of it,
    so between GPUs of one machine KV then goes through its host memory (shm), which is on no network.
    """

    convert_dtype: bool = True
    """Convert KV where the decode worker's dtype or `kv_dtype` differs from the prefill worker's; off refuses such a
    pair."""

    states_bytes: Annotated[int, Interval(ge=0)] = 2**30
    """Host memory at either end for hidden states of prompts, which come with the KV where the decode worker guesses
    from them (medusa, eagle3). Where they don't fit, it guesses without. 0 on the decode worker: none are sent."""

    lease_seconds: Seconds = 5.0
    """Seconds that a sender keeps exported blocks without a message of the receiver."""

    frame_timeout_seconds: Seconds = 3.0
    """Seconds that one frame may take on a link before the link is given up; also for opening a link between hosts."""

    dial_timeout_seconds: Seconds = 20.0
    """Seconds that opening a link between GPUs (nccl) may take: the first one starts NCCL."""

    grant_timeout_seconds: Seconds = 120.0
    """Seconds that an offer may wait for free blocks on the decode worker."""

    prefill_timeout_seconds: Seconds = 120.0
    """Seconds that the decode worker keeps blocks reserved for a prompt that is not computed yet."""

    transfer_timeout_seconds: Seconds = 60.0
    """Seconds that a hand-off may take from the end of prefill to its commit."""

    max_links: Annotated[int, Interval(ge=1, le=4096)] = 64
    """Largest number of workers that links are open to at once; those of the least recently used one are closed first.
    """

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        least, size = LINK_BUFFERS * self.gpu_frame_bytes, self.gpu_buffer_bytes
        require(least <= size, "gpu_buffer_bytes", size, f"{least} (two of gpu_frame_bytes) or more")
