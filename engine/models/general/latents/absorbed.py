"""Absorbed attention: a layer's weights, the interface of the attention by them, and that attention in plain torch.

transformers' modules have a function `expand_kv` that makes the keys and values of all heads from what is kept. It is a
linear map, which its results for unit vectors show. Its weights are absorbed into queries and results, so attention is
over the latents themselves.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from kvrelay.engine.models.general.places import LayerPlaces
from kvrelay.engine.models.general.step import Step, UnfitError
from kvrelay.engine.models.general.store import Store
from kvrelay.kernels.reference import latent_attention

EXPAND = "expand_kv"
"""Name of the function of transformers' modules: latents [1, 1, T, C] and rotated keys [1, 1, T, R] to keys
[1, H, T, D] and values [1, H, T, Dv]."""
UNLIMITED = 2**30
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def intercept(model: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
    """Makes modules leave latents for which `keeps` is true as they are."""
    for module in model.modules():
        if callable(getattr(type(module), EXPAND, None)) and not isinstance(getattr(module, EXPAND), Kept):
            setattr(module, EXPAND, Kept(getattr(module, EXPAND), keeps))


class Kept:
    """`expand_kv` of a module, which leaves some latents as they are."""

    def __init__(self, expand: Expand, keeps: Callable[[Tensor], bool]) -> None:
        self.expand, self.keeps = expand, keeps

    def __call__(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return (latents, rotated) if self.keeps(latents) else self.expand(latents, rotated)


class Absorbed:
    """The weights of an `expand_kv`: a head's key of a latent is `keys[h] . latent`, then the rotated key."""

    def __init__(self, expand: Expand, latent: int, rotated: int, like: Tensor) -> None:
        """
        Args:
            latent, rotated: C and R.
            like: has the type and device of latents.

        Raises:
            UnfitError: it isn't such a map.
        """
        self.expand, self.latent, self.rotated = expand, latent, rotated

        def unit(size: int) -> Tensor:
            return torch.eye(size, dtype=like.dtype, device=like.device)[None, None]

        def zeros(tokens: int, size: int) -> Tensor:
            return like.new_zeros((1, 1, tokens, size))

        keys, values = expand(unit(latent), zeros(latent, rotated))
        turned, nothing = expand(zeros(rotated, latent), unit(rotated))
        self.heads, self.dim = keys.shape[1], keys.shape[3]
        self.plain = self.dim - rotated
        own = unit(rotated).expand(1, self.heads, rotated, rotated)
        if (
            self.plain < 1
            or keys[..., self.plain :].any()
            or nothing.any()
            or turned[..., : self.plain].any()
            or not torch.equal(turned[..., self.plain :], own)
        ):
            raise UnfitError("keys aren't products of latents beside the rotated ones")
        # [H, plain, C] and [H, C, Dv]
        self.keys = keys[0, :, :, : self.plain].transpose(1, 2).contiguous()
        self.values = values[0].contiguous()
        width = self.values.shape[2]
        saved = 2 * latent + rotated - self.dim - width
        self.most = latent * (self.plain + width) // saved if saved > 0 else UNLIMITED
        """Tokens of the longest row for which absorbed attention takes less arithmetic than to expand all its latents,
        if the row is a part of a long sequence."""

    def absorb(self, queries: Tensor) -> Tensor:
        """[T, H, C + R] of queries [T, H, D]."""
        plain, rotated = queries[..., : self.plain], queries[..., self.plain :]
        return torch.cat((torch.einsum("thd,hdc->thc", plain, self.keys), rotated), -1)

    def release(self, sums: Tensor) -> Tensor:
        """[T, H, Dv] of weighted sums of latents [T, H, C]."""
        return torch.einsum("thc,hcv->thv", sums, self.values)


class Attending(Protocol):
    """Writes and attends to latents, absorbed."""

    most: int
    """Tokens of the longest row that it is for."""

    def plan(self, step: Step) -> None:
        """Begins a step."""
        ...

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """[T, H, Dv] of queries [T, H, D], after latents [T, C] and rotated keys [T, R] have been written."""
        ...


class PlainLatents:
    """Implements `Attending` by torch's operations."""

    most = UNLIMITED

    def __init__(self, store: Store) -> None:
        self._store = store
        self._step: Step | None = None

    def plan(self, step: Step) -> None:
        """See `Attending.plan`."""
        self._step = step

    def run(
        self, places: LayerPlaces, weights: Absorbed, queries: Tensor, latents: Tensor, rotated: Tensor, scaling: float
    ) -> Tensor:
        """See `Attending.run`."""
        step = self._step
        if step is None or places.keys is None or places.values is None:
            raise UnfitError("latents are attended to outside of a step")
        write(self._store, step, places, latents, rotated)
        absorbed, sums = weights.absorb(queries), []
        table = step.tables[self._store.groups[places.keys.track]]
        for row, (first, length, end) in enumerate(zip(step.firsts, step.lengths, step.contexts, strict=True)):
            held, turned = (
                self._store.read_range(place, table[row], 0, int(end), torch.float32)[:, 0]
                for place in (places.keys, places.values)
            )
            sums.append(latent_attention(absorbed[first : first + length], held, turned, scaling))
        return weights.release(torch.cat(sums).to(queries.dtype))


def write(store: Store, step: Step, places: LayerPlaces, latents: Tensor, rotated: Tensor) -> None:
    """Writes a layer's latents [T, C] and rotated keys [T, R]."""
    for place, numbers in ((places.keys, latents), (places.values, rotated)):
        if place is not None:
            store.write(place, store.slots(step, place.track), numbers[:, None])
