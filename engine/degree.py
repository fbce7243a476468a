"""How a worker's model is divided over its ranks, as a value that two workers can compare. No torch.

A worker of several ranks has a process for each. Rank `r` is part `r % tensor` of pipeline stage `r // tensor`: a stage
has some of the layers, and each of its ranks computes some heads, some columns and rows of the MLP, and a part of the
vocabulary.

    tensor 2, pipeline 2      layers 0 .. L/2 - 1     layers L/2 .. L - 1
    first half of the heads   rank 0                  rank 2
    second half               rank 1                  rank 3

Where there are more ranks in a stage than KV heads, neighbouring ranks hold the same head.
"""

from dataclasses import dataclass

MAX_RANKS = 64
"""Largest number of ranks of a worker."""


@dataclass(frozen=True, slots=True)
class Degree:
    """Numbers of ranks of a worker."""

    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages, each with its own layers."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"Degree.{name} is {getattr(self, name)}; it must be at least 1")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"Degree has {self.ranks} ranks ({self}); allowed: up to {MAX_RANKS}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"tensor {self.tensor}, pipeline {self.pipeline}"

    def layers(self, rank: int, layers: int) -> range:
        """The layers of a rank, in a model with so many `layers`: stages are as equal as possible."""
        stage = rank // self.tensor
        return range(stage * layers // self.pipeline, (stage + 1) * layers // self.pipeline)

    def kv_heads(self, rank: int, kv_heads: int) -> range:
        """The KV heads that a rank holds, in a model with so many `kv_heads`.

        Raises:
            ValueError: the degree neither divides the number of heads nor is a multiple of it.
        """
        place = rank % self.tensor
        if kv_heads % self.tensor == 0:
            each = kv_heads // self.tensor
            return range(place * each, (place + 1) * each)
        if self.tensor % kv_heads:
            raise ValueError(
                f"tensor parallel degree is {self.tensor}; allowed for {kv_heads} KV heads: a divisor or a multiple"
            )
        head = place // (self.tensor // kv_heads)
        return range(head, head + 1)

    def owner(self, layer: int, head: int, layers: int, kv_heads: int, wish: int) -> int:
        """A rank that holds this KV head of this layer.

        Args:
            layers, kv_heads: of the model.
            wish: chooses among the ranks that hold the same head; any number.
        """
        stage = next(s for s in range(self.pipeline) if layer in self.layers(s * self.tensor, layers))
        same = max(1, self.tensor // kv_heads)
        place = head * same + wish % same if same > 1 else head // (kv_heads // self.tensor)
        return stage * self.tensor + place


ONE = Degree()
"""The degree of a worker with one rank."""
