"""Choice of the attention that computes prompts on a GPU.

triton       `flash_prefill`: for every GPU, type and size
varlen_attn  PyTorch's, from 2.13 on: by FlashAttention 3 or 4, where that is installed
flashinfer   FlashInfer, where it is installed

With triton, what attention computes for a token of a prompt doesn't depend on the other tokens of the step, nor on
where the prompt was cut into chunks. With the others, the last bits may.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from kvrelay.engine.attention.flashinfer import FlashInferPrefill
from kvrelay.engine.attention.prefill import Prefill, Shapes, TritonPrefill
from kvrelay.engine.attention.varlen import VarlenPrefill
from kvrelay.engine.config import PrefillAttention, PrefillKernel
from kvrelay.engine.packages import Unavailable

logger = logging.getLogger(__name__)

FASTER = 0.97
"""Share of triton's time that another kernel may take at most for auto to prefer it."""

_MAKERS: Mapping[PrefillKernel, Callable[[Shapes], Prefill]] = {
    "triton": TritonPrefill,
    "varlen_attn": VarlenPrefill,
    "flashinfer": FlashInferPrefill,
}


def choose_prefill(wanted: PrefillAttention, shapes: Shapes) -> Sequence[Prefill]:
    """The kernel that is asked for; for auto all available ones, triton first.

    Raises:
        ValueError: the wanted one can't be had; the text says why.
    """
    if wanted != "auto":
        try:
            return [_MAKERS[wanted](shapes)]
        except Unavailable as reason:
            allowed = "auto, triton, or one that takes these shapes"
            raise ValueError(f"prefill_attention is {wanted!r}, but {reason}; allowed: {allowed}") from reason
    found = []
    for name in get_args(PrefillKernel):
        try:
            found.append(_MAKERS[name](shapes))
        except Unavailable as reason:
            logger.info("prefill attention by %s isn't timed: %s", name, reason)
    return found


def fastest(candidates: Sequence[Prefill], seconds: Callable[[Prefill], float]) -> Prefill:
    """The candidate that takes the least time; the first one unless another is faster than FASTER. Logs the times.

    Args:
        candidates: at least one.
        seconds: times one. If that fails, the candidate isn't taken; the first one must not fail.
    """
    first, *others = candidates
    times = {first.name: seconds(first)}
    for candidate in others:
        try:
            times[candidate.name] = seconds(candidate)
        except Exception as error:  # noqa: BLE001 - another package's kernel may raise anything
            logger.warning("prefill attention by %s failed and isn't taken: %s", candidate.name, error)
    best = min((candidate for candidate in candidates if candidate.name in times), key=lambda one: times[one.name])
    chosen = best if times[best.name] <= FASTER * times[first.name] else first
    account = ", ".join(f"{name} {1e3 * time:.2f} ms" for name, time in times.items())
    logger.info("prefill attention: %s, of a step of the largest size by %s", chosen.name, account)
    return chosen
