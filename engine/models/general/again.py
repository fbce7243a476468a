"""Ways that compute a sequence again from its tokens, which are kept as if they were KV."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvrelay.engine.models.general.inputs import Inputs
from kvrelay.engine.models.general.reading import set_attention
from kvrelay.engine.models.general.step import Step, host
from kvrelay.engine.models.general.store import Store


class AgainWay:
    """Implements `Way` without a cache: each step computes the whole of each sequence."""

    name = "again"

    def __init__(self, model: PreTrainedModel, store: Store, team: object = None) -> None:
        self._model, self._store = model, store
        self._inputs = Inputs(model)

    def run(self, step: Step, wanted: NDArray[np.int64]) -> Tensor:
        """See `Way.run`."""
        set_attention(self._model, "eager")
        self._store.write_tokens(step)
        device = self._store.device
        found = []
        for row, (first, start, length) in enumerate(
            zip(step.firsts.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True)
        ):
            own = wanted[(wanted >= first) & (wanted < first + length)] - first + start
            if not len(own):
                continue
            tokens = host(self._store.sequence(step, row), device)[None]
            positions = torch.arange(tokens.shape[1], device=device)[None]
            found.append(self._inputs.call(tokens, positions, None, host(own, device), {})[0])
        return torch.cat(found) if found else torch.empty(0, 0)
