"""Calls of a model's `forward`, whatever arguments its class takes."""

import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrelay.engine.models.general.reading import parameters_of
from kvrelay.engine.models.general.step import UnfitError

POSITIONS = "_kvrelay_positions"
"""Attribute of a model: the positions int64 [B, T] that it computes, or None."""
OFFSET = "_kvrelay_offset"
"""Attribute of a model: the number of its first position, which isn't 0 for all models."""


class Inputs:
    """Calls a model with those of our arguments that its `forward` takes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._names = parameters_of(model)
        self._selects = "logits_to_keep" in self._names
        if not hasattr(model, POSITIONS):
            setattr(model, POSITIONS, None)
            for module in model.modules():
                if _counts_positions(module):
                    _give_positions(module, model)

    def call(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        wanted: Tensor,
        cache: Mapping[str, Any],
    ) -> Tensor:
        """float32 [B, N, V], the logits of the columns `wanted` of each row.

        Args:
            tokens: int64 [B, T].
            positions: int64 [B, T], from 0 on; None leaves them to the model.
            mask: int64 [B, past + T], 0 where there is padding.
            wanted: int64 [N].
            cache: by the name of its argument; empty to compute without one.
        """
        given: dict[str, Any] = {"input_ids": tokens, "return_dict": True, **cache}
        if "use_cache" in self._names:
            given["use_cache"] = bool(cache)
        if "position_ids" in self._names and positions is not None:
            given["position_ids"] = positions + getattr(self._model, OFFSET, 0)
        if mask is not None and "attention_mask" in self._names:
            given["attention_mask"] = mask
        if self._selects:
            given["logits_to_keep"] = wanted
        setattr(self._model, POSITIONS, positions)
        logits: Tensor = self._model(**given).logits
        if not self._selects or logits.shape[1] != len(wanted):
            if logits.shape[1] != tokens.shape[1]:
                raise UnfitError(f"it gives logits of {logits.shape[1]} tokens, not of all")
            logits = logits[:, wanted]
        return logits.float()


def _give_positions(module: torch.nn.Module, model: PreTrainedModel) -> None:
    """Makes an embedding of positions that counts from the cache's length take the true positions."""
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        positions: Tensor | None = getattr(model, POSITIONS)
        if positions is None or not args:
            return original(*args, **kwargs)  # type: ignore[no-any-return]  # transformers' code
        # Some models take the positions of one sequence only, so they get all rows as one sequence.
        embedded: Tensor = original(args[0], position_ids=positions.flatten())
        if embedded.dim() == 2 and len(positions) > 1:
            raise UnfitError("positions are the same for all rows")
        return embedded if embedded.dim() == 2 else embedded.view(*positions.shape, -1)

    module.forward = forward


def _counts_positions(module: torch.nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    counted = "past_key_values_length" in parameters or "cache_length" in parameters
    return counted and "position_ids" in parameters and next(iter(parameters)) != "position_ids"
