"""Guesses by Medusa heads: small networks on the model's last hidden state, each of which guesses one token further.

From h, the normed last state of the token whose successor the model chose last, head k guesses the k-th token behind
that successor:

    x = h;  x = x + silu(W x + b) for each of the head's blocks;  logits = U x

Source: Cai et al., Medusa, 2024, section 2.1. The heads know nothing of one another's guesses. They are sampled with
the noise of the model's own choice at that position, as a draft model is (`draft.py`).

With the KV of a prompt that another worker has computed comes the state of its last token, so there are guesses from
the first step on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.engine.models.fast.parts import Parts
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.speculate.base import WARM_UP, Computed, Want
from kvrelay.engine.speculate.chains import draws_at, read_chains, wanting
from kvrelay.engine.speculate.tensors import Tensors
from kvrelay.kernels.ops import Linear

FILE = "medusa_lm_head.safetensors"
PREFIXES = ("medusa_head.", "medusa_heads.")
"""Prefixes of the names, where the heads were saved as a part of something larger."""


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHead:
    """One head."""

    blocks: tuple[Linear, ...]
    """hidden -> hidden."""
    output: Linear
    """hidden -> vocab."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] from normed hidden states [N, hidden]."""
        for block in self.blocks:
            hidden = hidden + functional.silu(block(hidden))
        return self.output(hidden).float()


def load_medusa(folder: Path, config: ModelConfig, parts: Parts) -> tuple[MedusaHead, ...]:
    """The heads in `folder`: tensors `HEAD.BLOCK.linear.weight`, `.bias` and `HEAD.BLOCKS.weight`.

    Args:
        config: of the model that they are for.

    Raises:
        ValueError: they can't be used with that model; names the tensor or field, and what is expected.
    """
    if config.traits.layer_norm:
        raise ValueError(
            f"speculation.method is medusa; allowed for {config.architecture}: others, as it has layer norms"
        )
    fields, tensors = Fields("config.json", read_json(folder / "config.json")), Tensors(folder, FILE, parts.device)
    for prefix in PREFIXES:
        tensors.rename(prefix, "")
    hidden = config.hidden_size
    heads: list[MedusaHead] = []
    while any(name.startswith(f"{len(heads)}.") for name in tensors.left):
        blocks: list[Linear] = []
        name = str(len(heads))
        while f"{name}.{len(blocks)}.linear.weight" in tensors.left:
            block = f"{name}.{len(blocks)}.linear"
            weight, bias = tensors.take(f"{block}.weight", hidden, hidden), tensors.take(f"{block}.bias", hidden)
            blocks.append(parts.linear(weight.to(parts.dtype), bias.to(parts.dtype)))
        output = tensors.take(f"{name}.{len(blocks)}.weight", config.vocab_size, hidden)
        heads.append(MedusaHead(tuple(blocks), parts.head(output.to(parts.dtype), None)))
    tensors.finish()
    if not heads:
        raise ValueError(f"{tensors.path}: holds no heads; expected: tensors 0.0.linear.weight and so on")
    # Some published checkpoints have more heads than their config says.
    if fields.integer("medusa_num_heads", default=1) > len(heads):
        fields.refuse("medusa_num_heads", f"as many heads as {tensors.path.name} has at most, {len(heads)}")
    return tuple(heads)


class MedusaProposer:
    """Implements `Proposer`."""

    last_state = True

    def __init__(self, heads: tuple[MedusaHead, ...], config: ModelConfig, norm: Tensor, parts: Parts) -> None:
        """
        Args:
            config: of the model.
            norm: [hidden] weights of the model's last norm.
        """
        self.layers = (config.layers,)
        self.most = len(heads)
        """Largest number of tokens of a guess."""
        self._heads = heads
        self._norm, self._eps = norm.float(), config.norm_eps
        self._parts = parts
        self._states: dict[int, tuple[int, Tensor]] = {}
        """Position of the last token that was computed, and its state [hidden], by handle."""

    def warm_up(self) -> None:
        self.observe([Computed(WARM_UP.handle, WARM_UP.tokens, 0, torch.ones(1, 1, len(self._norm)))])
        self.propose([WARM_UP])

    def observe(self, computed: Sequence[Computed]) -> bool:
        if computed:
            device = self._parts.device
            with self._parts.running():
                # All states of a step come in one copy, because the step has kept many more.
                copied = torch.stack([one.states[-1, 0].to(device, non_blocking=True) for one in computed]).unbind()
            for (handle, _, start, states), state in zip(computed, copied, strict=True):
                self._states[handle] = start + len(states) - 1, state
        return False

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """Guesses. A sequence has no guess until a step has computed the token before its last one here."""
        known = [(want, self._states.get(want.handle)) for want in wants]
        ready = [(want, state[1]) for want, state in known if state is not None and state[0] == len(want.tokens) - 2]
        if not ready:
            return [[] for _ in wants]
        ready.sort(key=lambda pair: -pair[0].most)
        found = self._guess([want for want, _ in ready], [state for _, state in ready])
        guesses = {want.handle: tokens for (want, _), tokens in zip(ready, found, strict=True)}
        return [guesses.get(want.handle, []) for want in wants]

    def forget(self, handle: int) -> None:
        self._states.pop(handle, None)

    def _guess(self, wants: list[Want], states: list[Tensor]) -> list[list[int]]:
        """Guesses of the heads from the last states, [hidden] each, for wants in descending order of their length."""
        levels: list[Tensor] = []
        with self._parts.running():
            normed = functional.rms_norm(torch.stack(states).float(), self._norm.shape, self._norm, self._eps)
            normed = normed.to(self._parts.activations)
            for level, head in enumerate(self._heads[: wants[0].most]):
                count = wanting(wants, level)
                levels.append(self._parts.guess(head.logits(normed[:count]), draws_at(wants[:count], level)))
            return read_chains(levels)
