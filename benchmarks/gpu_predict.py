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
