"""Conversion between the relay's messages and the engine's types."""

from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.internal.v1.worker_pb2 import Cancel, ModelInfo, RequestEvent, Sampling, Submit


class InvalidSubmit(ValueError):
    """A Submit that this worker can't serve; the router should not have sent it."""


def model_info(spec: ModelSpec) -> ModelInfo:
    """`spec` on the wire."""
    return ModelInfo(
        name=spec.name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        eos_token_ids=spec.eos_token_ids,
        dtype=spec.dtype,
        fingerprint=spec.fingerprint,
    )


def sampling_params(sampling: Sampling, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """`sampling` for the engine, for which an end-of-sequence token is a stop id like any other."""
    stop = frozenset(sampling.stop_token_ids)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=stop if sampling.ignore_eos else stop | frozenset(eos_token_ids),
    )


def request_of(submit: Submit, spec: ModelSpec) -> Request:
    """`submit` for the engine.

    The router has validated the request; this checks what would break the engine if the router were wrong.

    Raises:
        InvalidSubmit: naming the field, the value and the limit.
    """
    tokens = tuple(submit.token_ids)
    if not 1 <= submit.prompt_tokens <= len(tokens):
        raise InvalidSubmit(f"prompt_tokens is {submit.prompt_tokens}; allowed: 1 to the {len(tokens)} token_ids")
    if max(tokens) >= spec.vocab_size:
        raise InvalidSubmit(f"token_ids holds {max(tokens)}; allowed: 0 to {spec.vocab_size - 1}")
    generated = len(tokens) - submit.prompt_tokens
    if submit.sampling.max_tokens <= generated:
        raise InvalidSubmit(f"sampling.max_tokens is {submit.sampling.max_tokens}; {generated} are generated already")
    whole = submit.prompt_tokens + submit.sampling.max_tokens
    if whole > spec.max_context:
        raise InvalidSubmit(f"prompt_tokens + sampling.max_tokens is {whole}; allowed: up to {spec.max_context}")
    return Request(
        request_id=submit.request_id,
        attempt=submit.attempt,
        tokens=tokens,
        prompt_tokens=submit.prompt_tokens,
        sampling=sampling_params(submit.sampling, spec.eos_token_ids),
        tenant=submit.tenant,
    )


def key_of(message: Cancel | Submit | RequestEvent) -> tuple[str, int]:
    """(request_id, attempt)."""
    return message.request_id, message.attempt
