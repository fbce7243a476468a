"""What the rest of the system knows about a model. No torch."""

from dataclasses import dataclass

from kvrelay.engine.kv.layout import KVDtype
from kvrelay.engine.models.checkpoint import Checkpoint
from kvrelay.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a worker serves it. Two workers can exchange KV only if their fingerprints are equal."""

    name: str
    """The checkpoint folder's name."""
    architecture: str
    """The model's class as config.json names it, e.g. "LlamaForCausalLM"."""
    vocab_size: int
    max_context: int
    """Prompt plus completion, in tokens, at most."""
    eos_token_ids: tuple[int, ...]
    dtype: KVDtype
    """Of weights and KV as they run, whatever the files hold."""
    fingerprint: str
    """Hexadecimal SHA-256 over the config and the weights; see `Checkpoint.fingerprint`."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: ModelConfig, dtype: KVDtype, *context_limits: int) -> "ModelSpec":
        """The spec of a checkpoint.

        Args:
            context_limits: tokens that the context may have besides the model's own limit; 0 is no limit.
        """
        return cls(
            name=checkpoint.folder.resolve().name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_context=min(config.max_positions, *(limit for limit in context_limits if limit)),
            eos_token_ids=config.eos_token_ids,
            dtype=dtype,
            fingerprint=checkpoint.fingerprint(),
        )
