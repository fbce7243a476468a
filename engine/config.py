"""The options of an engine.

These are plain frozen dataclasses, so that an engine runs without pydantic. `__pydantic_config__` lets
`kvrelay.cluster.config` validate and document the same classes strictly.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int8", "int4", "fp8"]

STRICT: dict[str, bool | str] = {"extra": "forbid", "use_attribute_docstrings": True}
"""The `__pydantic_config__` of every class of options."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises ValueError naming the option, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one worker's engine."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    block_size: int = 16
    """Tokens per KV block; a power of two, 8 to 128."""

    kv_memory_bytes: int = 256 * 2**20
    """Bytes of the KV pool, allocated at start; it has as many blocks as fit."""

    max_batch_tokens: int = 512
    """Token budget of one step. Decode takes from it first, chunks of prompts get the rest."""

    max_sequences: int = 64
    """Sequences in one step at most."""

    max_context: int = 0
    """Prompt plus completion, in tokens, at most; 0 takes the model's own limit."""

    prefix_cache: bool = True
    """Keep computed blocks and reuse them for prompts of the same tenant with the same prefix."""

    quantization: Quantization = "none"
    """What weights are converted to when they are loaded. int8 and fp8 (E4M3) have a scale for each output; int4 has
    one for each 64 inputs, and an int8 head. On CPUs only. Activations and KV keep the model's dtype."""

    device: Device = "auto"
    """Where the model runs and the KV pool is; auto takes a GPU if the worker has one."""

    threads: int = 0
    """CPU threads of the forward pass; 0 divides the machine's cores among its workers."""

    def __post_init__(self) -> None:
        size = self.block_size
        require(8 <= size <= 128 and size & (size - 1) == 0, "block_size", size, "a power of two from 8 to 128")
        require(self.kv_memory_bytes > 0, "kv_memory_bytes", self.kv_memory_bytes, "more than 0")
        require(
            self.max_batch_tokens >= size, "max_batch_tokens", self.max_batch_tokens, f"at least block_size ({size})"
        )
        require(1 <= self.max_sequences <= 4096, "max_sequences", self.max_sequences, "1 to 4096")
        require(self.max_context >= 0, "max_context", self.max_context, "0 or more")
        choices = ", ".join(get_args(Quantization))
        require(self.quantization in get_args(Quantization), "quantization", self.quantization, choices)
        require(self.device in get_args(Device), "device", self.device, ", ".join(get_args(Device)))
        require(0 <= self.threads <= 1024, "threads", self.threads, "0 to 1024")
