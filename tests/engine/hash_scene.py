"""Engines on the hash model, and requests to them."""

import dataclasses
from collections.abc import Sequence

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.speculate.base import Proposer
from support.hash_runner import GREEDY, LAYOUT, HashRunner, hash_spec

FIXED = SpeculationConfig("ngram", max_tokens=4, adaptive=False)
SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=5, logprobs=2),
    SamplingParams(seed=1, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.3),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=((3, 3.0), (4, 3.5)), prompt_logprobs=2),
    SamplingParams(seed=2, bad_words=((7,), (8, 9), (1, 2, 3)), logit_bias=tuple((token, 4.0) for token in range(10))),
)
"""Each way of changing logits, and of asking for log-probabilities."""


def hash_engine(
    proposer: Proposer | None = None,
    *,
    blocks: int = 40,
    lag: int = 0,
    step_tokens: int = 32,
    max_sequences: int = 8,
    prefix_cache: bool = True,
) -> Engine:
    """
    Args:
        lag: of the runner; with 1, the engine plans a step ahead.
    """
    options = EngineConfig(
        block_size=LAYOUT.block_size,
        max_batch_tokens=step_tokens,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        speculation=SpeculationConfig() if proposer is None else FIXED,
    )
    return engine_on(HashRunner(blocks, spec=hash_spec(blocks * LAYOUT.block_size), lag=lag), options, proposer)


def request(name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, max_tokens: int = 30) -> Request:
    return Request(name, 1, tuple(prompt), len(prompt), dataclasses.replace(sampling, max_tokens=max_tokens))
