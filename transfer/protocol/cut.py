"""How a sender cuts the KV of a prompt into frames."""

from dataclasses import dataclass

from kvrelay.engine.kv.layout import KVLayout, LayerPart


@dataclass(frozen=True, slots=True)
class FrameCut:
    """As many whole blocks in a frame as fit; or, where not even one fits, a block in several frames, by layers."""

    tokens: int
    """Of a frame at most: a multiple of the block size."""
    parts: int
    """Frames in which the same tokens are sent."""
    nbytes: int
    """KV bytes of the largest frame."""

    @classmethod
    def of(cls, layout: KVLayout, frame_bytes: int) -> "FrameCut":
        """The cut for frames of at most `frame_bytes`; one layer of a block is a frame even if it is larger."""
        blocks = max(1, frame_bytes // layout.block_bytes)
        layers = max(1, min(layout.layers, frame_bytes * layout.layers // layout.block_bytes))
        parts = -(-layout.layers // layers)
        tokens = blocks * layout.block_size
        return cls(tokens, parts, max(layout.nbytes(tokens, LayerPart(index, parts)) for index in range(parts)))
