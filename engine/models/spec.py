"""Facts about a model that the other rooms use. No torch."""

import hashlib
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.kv.layout import FloatDtype
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.stored import StoredFormat

ContextLimit = Literal["model", "option", "pool"]


class ModelFacts(Protocol):
    """Facts of a model's config, on either path; `ModelConfig` has the docstrings."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def stored(self) -> StoredFormat | None: ...

    @property
    def form(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a worker serves it. Two workers can exchange KV only if their fingerprints are equal."""

    architecture: str
    """The model's class as config.json names it, e.g. "LlamaForCausalLM"."""
    vocab_size: int
    max_context: int
    """Largest number of tokens of a prompt and its completion together."""
    eos_token_ids: tuple[int, ...]
    dtype: FloatDtype
    """Dtype of the weights as they run, whatever the files hold."""
    fingerprint: str
    """Fingerprint of the config and the weights, SHA-256 in hexadecimal; see `Checkpoint.fingerprint`. Models that
    rotate keys differently, because they are served with longer contexts, have different ones."""
    context_limit: ContextLimit = "model"
    """Origin of `max_context`: the model itself, the option `max_context`, or the size of the KV pool."""
    weights: str = ""
    """Format of the layers' weights, for people: `dtype`, a value of the option `quantization`, or the quantization
    method that the checkpoint names."""
    way: str = ""
    """How transformers' own code runs: its way, its version, and the groups of layers. Empty on the fast path."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: ModelFacts,
        dtype: FloatDtype,
        options: EngineConfig,
        way: str = "",
    ) -> "ModelSpec":
        """The spec of a checkpoint, not yet limited by its KV pool (`within`).

        Args:
            way: see the attribute; it is a part of the fingerprint, as KV of other code may be something else.
        """
        limited = 0 < options.max_context < config.max_positions
        fingerprint = checkpoint.fingerprint()
        if form := config.form or way:
            fingerprint = hashlib.sha256(f"{fingerprint} {form}".encode()).hexdigest()
        return cls(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_context=options.max_context if limited else config.max_positions,
            eos_token_ids=config.eos_token_ids,
            dtype=dtype,
            fingerprint=fingerprint,
            context_limit="option" if limited else "model",
            weights=_weights(config, dtype, options.quantization),
            way=way,
        )

    @property
    def context_reason(self) -> str:
        """The origin of `max_context`, in words."""
        if self.context_limit == "pool":
            return f"the KV pool (engine.kv_memory_bytes) holds {self.max_context} tokens"
        return "the option engine.max_context" if self.context_limit == "option" else "the model's own limit"

    def within(self, pool_tokens: int) -> "ModelSpec":
        """This spec, limited by a KV pool for so many tokens."""
        if pool_tokens >= self.max_context:
            return self
        return replace(self, max_context=pool_tokens, context_limit="pool")


def _weights(config: ModelFacts, dtype: FloatDtype, quantization: Quantization) -> str:
    if quantization == "dense":
        return dtype
    if config.stored is not None:
        return config.stored.method
    return dtype if quantization == "none" else quantization
