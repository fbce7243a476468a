"""Sampling of the requests of the faults' tests. Nothing here needs torch, whose import takes seconds."""

import random
from typing import Any

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
BIAS = {5: 2.0, 77: -1.5, 200: 1.0}


def sampling_options(seed: int | None) -> dict[str, Any]:
    """Sampling options as a client gives them. One seed in three makes each token depend even more on those before
    it."""
    if seed is None:
        return {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    return drawn if seed % 3 else {**drawn, **PENALTIES, "logit_bias": BIAS}


def seed_of(name: str) -> int | None:
    """Draws a request's seed of sampling; None, which means greedy decoding, for one name in four."""
    draw = random.Random(f"seed of {name}")
    return draw.getrandbits(64) if draw.random() < 0.75 else None
