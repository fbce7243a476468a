"""Hidden states that a proposer guesses from, as a value that two workers compare: which ones, in what form."""

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.engine.kv.layout import DTYPE_BYTES, FloatDtype


class StatesShape(NamedTuple):
    """Shape of the hidden states that a runner's steps can keep."""

    layers: int
    """Number of the model's layers; this number itself stands for the last one's output."""
    hidden_size: int
    last_only: bool = False
    """Whether only the last one's output can be kept."""


@dataclass(frozen=True, slots=True)
class StatesLayout:
    """The hidden states of a prompt that a decode worker's proposer guesses from."""

    layers: tuple[int, ...]
    """Layers whose inputs are wanted, as `Proposer.layers`."""
    hidden_size: int
    dtype: FloatDtype
    last: bool = False
    """Whether the states of the prompt's last token are enough."""

    def __post_init__(self) -> None:
        if len(set(self.layers)) != len(self.layers):
            raise ValueError(f"StatesLayout.layers is {self.layers}; none may be there twice")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states."""
        return len(self.layers) * self.hidden_size * DTYPE_BYTES[self.dtype]

    def layers_of(self, complete: bool) -> tuple[int, ...]:
        """Layers whose inputs are wanted of a step, which computes the prompt to its end if `complete`."""
        return self.layers if complete or not self.last else ()

    def first_of(self, tokens: int) -> int:
        """The first of so many tokens whose states are wanted."""
        return max(0, tokens - 1) if self.last else 0

    def misfit(self, shape: StatesShape | None) -> str | None:
        """The name of the field by which a runner of this shape can't keep these states, and why; None if it can."""
        if shape is None:
            return "states: this worker's steps keep no hidden states, which the other one's proposer needs"
        if self.hidden_size != shape.hidden_size:
            return f"states.hidden_size: {shape.hidden_size} here, {self.hidden_size} there"
        if shape.last_only and self.layers != (shape.layers,):
            return f"states.layers: {', '.join(map(str, self.layers))} there; allowed: {shape.layers}"
        if not all(0 <= layer <= shape.layers for layer in self.layers):
            return f"states.layers: {', '.join(map(str, self.layers))} there; allowed: 0 to {shape.layers}"
        return None
