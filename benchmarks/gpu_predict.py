"""What a kernel's limit lets one expect on a GPU that isn't here; see `gpu.py --predict`.

    seconds = launches * LAUNCH_SECONDS
              + max(bytes / (bytes_per_second * COPY_SHARE), flops / (flops_per_second * PRODUCT_SHARE))

Rates are those of the data sheets: dense bfloat16 products, and the memory. The shares are what a plain copy and a
large product by cuBLAS reach of them on one H200 (4.3 of 4.8 TB/s, 788 of 989 TFLOP/s), and are taken for the others.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

COPY_SHARE, PRODUCT_SHARE = 0.9, 0.8
LAUNCH_SECONDS = 3e-6
"""From the begin of a kernel to its end if it does next to nothing."""


class Work(Protocol):
    """What `gpu_measure.Case` has."""

    name: str
    shape: dict[str, Any]
    bytes: int
    flops: int
    launches: int


@dataclass(frozen=True)
class Hardware:
    """A GPU's data sheet."""

    name: str
    """Part of the name that the driver gives it."""
    processors: int
    bytes_per_second: float
    flops_per_second: float
    """Of dense bfloat16 products."""

    def predict(self, case: Work) -> dict[str, Any]:
        """What the case moves and computes, how long that takes at best, and which of the two is the limit."""
        memory = case.bytes / (self.bytes_per_second * COPY_SHARE)
        arithmetic = case.flops / (self.flops_per_second * PRODUCT_SHARE)
        return {
            "bytes": case.bytes,
            "flops": case.flops,
            "predicted_s": case.launches * LAUNCH_SECONDS + max(memory, arithmetic),
            "limit": "memory" if memory >= arithmetic else "arithmetic",
        }


@dataclass(frozen=True)
class FramePath:
    """What a sender does for each frame of KV, and how far that keeps a link from its bandwidth."""

    name: str
    launches: int
    passes: int
    """How often its bytes are read or written in the GPU's memory."""
    waits: int
    """Of the host for the device, one after the other."""

    def seconds(self, nbytes: int, bytes_per_second: float) -> float:
        """Of the sender alone, for a frame."""
        fixed = self.launches * FRAME_LAUNCH_SECONDS + self.waits * WAIT_SECONDS
        return fixed + self.passes * nbytes / (bytes_per_second * COPY_SHARE)

    def share(self, nbytes: int, bytes_per_second: float, link: float) -> float:
        """Share of the link's bandwidth with two buffers: while one is on the link, the other is filled."""
        on_link = nbytes / link
        return on_link / max(on_link + FRAME_LAUNCH_SECONDS, self.seconds(nbytes, bytes_per_second))


FRAME_LAUNCH_SECONDS, WAIT_SECONDS = 5e-6, 10e-6
"""As a thread of Python takes them beside an engine that launches, without waiting for the interpreter's lock."""
LINK_BYTES_PER_SECOND = {"nvlink": 400e9, "infiniband": 50e9}
FRAME_PATHS = (
    FramePath("copied, then summed", launches=5, passes=3, waits=4),
    FramePath("in one pass", launches=6, passes=2, waits=1),
    # The trailer is a message of its own on such a link.
    FramePath("summed where it lies", launches=7, passes=1, waits=1),
)


def predict_frames(hardware: "Hardware", sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """By size of a frame, path and link: the sender's own time, and the share of the link's bandwidth that is left."""
    rate = hardware.bytes_per_second
    return [
        {
            "case": f"frame, {path.name}",
            "shape": {"mib": size // 2**20, "link": link},
            "bytes": path.passes * size,
            "flops": 0,
            "predicted_s": path.seconds(size, rate),
            "link_share": path.share(size, rate, speed),
        }
        for size in sizes
        for path in FRAME_PATHS
        for link, speed in LINK_BYTES_PER_SECOND.items()
    ]


HARDWARE = {
    "a100": Hardware("A100", 108, 2.04e12, 312e12),
    "h100": Hardware("H100", 132, 3.35e12, 989e12),
    "h200": Hardware("H200", 132, 4.8e12, 989e12),
    "b200": Hardware("B200", 148, 8.0e12, 2250e12),
}


def hardware_of(name: str) -> Hardware | None:
    """The entry of the GPU that the driver gives this name; None if there is none."""
    return next((hardware for hardware in HARDWARE.values() if hardware.name in name), None)


class PredictedMachine:
    """Stands in for `gpu_measure.Machine`: cases have their true sizes, and tensors without memory."""

    dry = False
    device = torch.device("meta")
    dtype = torch.bfloat16

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.processors = hardware.processors

    def measure(self, case: Work) -> dict[str, Any]:
        return {"case": case.name, "shape": case.shape, **self.hardware.predict(case)}
