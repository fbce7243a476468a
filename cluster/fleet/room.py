"""Room for further members on a machine, or in a Ray cluster."""

import math
from collections.abc import Mapping, Sequence

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.machine.control_groups import free_memory
from kvrelay.machine.gguf import QUANTIZED
from kvrelay.models import resolve
from kvrelay.rpc.identity import MemberRole
from kvrelay.worker.config import WorkerConfig

PROCESS_BYTES = 300 * 2**20
"""Memory of a worker's process beside weights and KV, about."""
ROUTER_BYTES = 150 * 2**20
"""Memory of a router's process, about."""
LEAST_KV_BYTES = 2**26
"""KV of a worker whose pool takes its share of what is left."""
SHARES: Mapping[Quantization, float] = {
    "none": 1.0,
    "dense": 1.0,
    "int8": 0.55,
    "w8a8": 0.55,
    "fp8": 0.55,
    "int4": 0.35,
}
"""Memory of weights as held, as a share of 16 bits each, about; embeddings keep their type."""
GGUF_SHARE = 1.35
"""Memory of quantized weights of GGUF files as held, whose scales become float32, as a share of their bytes there."""
GIB = 2**30


def worker_bytes(config: WorkerConfig) -> int:
    """Memory that one worker on CPUs takes, about: weights as it holds them, and the KV and process of each rank."""
    engine = config.engine
    held = 0.0
    for tensor in Checkpoint(resolve(config.model)).tensors.values():
        size = tensor.end - tensor.begin
        if tensor.dtype not in QUANTIZED:
            held += size * SHARES[engine.quantization] * (2 if config.dtype == "float32" else 1)
        elif engine.quantization == "dense":
            held += math.prod(tensor.shape) * (4 if config.dtype == "float32" else 2)
        else:
            held += size * GGUF_SHARE
    return int(held) + ((engine.kv_memory_bytes or LEAST_KV_BYTES) + PROCESS_BYTES) * engine.degree.ranks


def lacks_memory(
    present: Mapping[MemberRole, int], wanted: Mapping[MemberRole, int], needs: Mapping[MemberRole, int]
) -> str:
    """The reason why this machine has no memory for the members that are `wanted`; empty if it has.

    Args:
        needs: bytes of one more member of each role that takes this machine's memory.
    """
    free = free_memory()
    left = free
    for role, count in wanted.items():
        more, each = max(0, count - present[role]), needs.get(role, 0)
        if more * each > left:
            fitting = present[role] + left // each
            return (
                f"{role} is {count}; allowed: at most {fitting}. One more takes about {each / GIB:.2f} GiB (weights, "
                f"KV and process), and {free / GIB:.2f} GiB of memory are free"
            )
        left -= more * each
    return ""


def fitting(bundle: Mapping[str, float], free: Sequence[Mapping[str, float]]) -> int:
    """The number of reservations of `bundle` that nodes with these free resources have room for."""

    def on(node: Mapping[str, float]) -> int:
        # Ray counts in parts of 1e-4.
        return min(math.floor(node.get(name, 0.0) / need + 1e-4) for name, need in bundle.items() if need)

    return sum(max(0, on(node)) for node in free)
