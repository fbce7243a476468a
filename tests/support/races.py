"""Races of two tokens that were drawn from the same logits: whether rounding may decide between them."""

import numpy as np
from torch import Tensor

from kvrelay.engine.sampling.noise import exponential, noise_keys
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.reference import token_probabilities


def is_near(logits: Tensor, draw: Draw, chosen: int, expected: int, near: float) -> bool:
    """Whether the two tokens are almost equal by the definition, in float64, or one is at the bound of a filter.

    Args:
        logits: [V].
        near: relative difference, of scores or of a probability and a bound, up to which rounding may decide.
    """
    params = draw.params
    noise = exponential(noise_keys([params.seed], [draw.position]), np.arange(len(logits), dtype=np.int32))[0].double()
    options = params.temperature, params.top_k, params.top_p, params.min_p
    scores = token_probabilities(logits, *options) / noise
    if scores[chosen] > 0 and scores[expected] > 0:
        return bool((scores[chosen] / scores[expected]).log().abs() < near)
    wider = token_probabilities(
        logits, params.temperature, params.top_k, min(1.0, params.top_p * (1 + near)), params.min_p * (1 - near)
    )
    narrower = token_probabilities(
        logits, params.temperature, params.top_k, params.top_p * (1 - near), params.min_p * (1 + near)
    )
    return bool(((wider > 0) != (narrower > 0)).any())
