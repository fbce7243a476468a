"""Conversion between the relay's messages and the engine's types."""

import json
import math
from typing import cast

from kvrelay.engine.constrain.grammar import Constraint
from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import FloatDtype
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.request import Request, SamplingParams, Urgency
from kvrelay.engine.states import StatesLayout
from kvrelay.internal.v1.supervisor_pb2 import HiddenStates, Member
from kvrelay.internal.v1.worker_pb2 import Begin, Cancel, ModelInfo, RequestEvent, Sampling, Submit
from kvrelay.rpc.identity import WorkerId, context_limit

PATIENCE_SECONDS = 10.0
"""Seconds after which a request whose class has no target counts as late: those of classes with targets and the same
rank don't overtake it for ever."""


def model_info(name: str, spec: ModelSpec) -> ModelInfo:
    """The model `name` on the wire."""
    return ModelInfo(
        name=name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        eos_token_ids=spec.eos_token_ids,
        dtype=spec.dtype,
        fingerprint=spec.fingerprint,
        context_limit=context_limit(spec.context_limit),
    )


def sampling_params(sampling: Sampling, spec: ModelSpec) -> SamplingParams:
    """`sampling` for the engine, for which an end-of-sequence token is a stop id like any other.

    A `top_k` that keeps the whole vocabulary becomes 0, which does the same: the largest on the wire is more than a
    GPU's 32-bit integers hold.
    """
    stop = frozenset(sampling.stop_token_ids)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k < spec.vocab_size else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=stop if sampling.ignore_eos else stop | frozenset(spec.eos_token_ids),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        # Absent in a message that asks for none.
        repetition_penalty=sampling.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        bad_words=tuple([tuple(word.ids) for word in sampling.bad_words]),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        constraint=_constraint(sampling),
    )


def _constraint(sampling: Sampling) -> Constraint | None:
    given = sampling.constraint
    match kind := given.WhichOneof("kind"):
        case None:
            return None
        case "json_object":
            return Constraint(kind, "")
        case "choice":
            return Constraint(kind, json.dumps(list(given.choice.texts)))
        case _:
            return Constraint(kind, getattr(given, kind))


def request_of(submit: Submit, spec: ModelSpec, received: float) -> Request:
    """`submit` for the engine, which checks it when it takes it.

    Args:
        received: time of its receipt on the scheduler's clock, in seconds.
    """
    urgency = submit.urgency
    left = urgency.first_token_seconds
    due = received + (left if left and math.isfinite(left) else PATIENCE_SECONDS)
    return Request(
        request_id=submit.request_id,
        attempt=submit.attempt,
        tokens=tuple(submit.token_ids),
        prompt_tokens=submit.prompt_tokens,
        sampling=sampling_params(submit.sampling, spec),
        tenant=submit.tenant,
        holder=submit.holder,
        expected_tokens=submit.expected_tokens,
        urgency=Urgency(urgency.rank, urgency.priority, due, urgency.yields),
    )


def key_of(message: Begin | Cancel | Submit | RequestEvent) -> tuple[str, int]:
    """(request_id, attempt)."""
    return message.request_id, message.attempt


def peer_of(submit: Submit) -> WorkerId | None:
    """The other worker of the request's hand-off; None if there is none."""
    return WorkerId(submit.peer.name, submit.peer.incarnation) if submit.peer.name else None


def degree_of(member: Member) -> Degree:
    """The ranks of a member."""
    return Degree(max(1, member.tensor_ranks), max(1, member.pipeline_stages))


def states_message(states: StatesLayout) -> HiddenStates:
    """The hidden states that a member wants, as its entry lists them."""
    return HiddenStates(layers=states.layers, hidden_size=states.hidden_size, dtype=states.dtype, last=states.last)


def states_of(member: Member) -> StatesLayout | None:
    """The hidden states that a member wants; None if it wants none."""
    if not member.HasField("states"):
        return None
    found = member.states
    return StatesLayout(tuple(found.layers), found.hidden_size, cast(FloatDtype, found.dtype), found.last)
