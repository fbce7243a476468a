"""What the rest of the system knows about a model."""

from dataclasses import dataclass

from kvrelay.engine.kv.layout import KVDtype


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a worker serves it. Two workers can exchange KV only if their fingerprints are equal."""

    name: str
    """The checkpoint folder's name."""
    architecture: str
    """`model_type` of its config.json."""
    vocab_size: int
    max_context: int
    """Prompt plus completion, in tokens, at most."""
    eos_token_ids: tuple[int, ...]
    dtype: KVDtype
    """Of weights and KV as they run, whatever the files hold."""
    fingerprint: str
    """Hexadecimal SHA-256 over the config and the weights; see `Checkpoint.fingerprint`."""
