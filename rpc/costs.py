"""A worker's costs as a message."""

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.step import StepCost
from kvrelay.costs.worker import WorkerCosts
from kvrelay.internal.v1.worker_pb2 import Costs, KvWindow, Link

_STEP = ("fixed", "sequence", "context", "guess", "prompt_fixed", "token", "pair")
_OWN = ("chunk", "step_seconds", "decode_error", "prompt_error", "extra")


def costs_message(costs: WorkerCosts) -> Costs:
    """The message with these costs."""
    return Costs(
        **{name: getattr(costs.step, name) for name in _STEP},
        **{name: getattr(costs, name) for name in _OWN},
        kv_token=costs.kv.token,
        kv_fixed=costs.kv.fixed,
        kv_windows=[KvWindow(token=token, tokens=tokens) for token, tokens in costs.kv.windows],
        links=[Link(worker=name, fixed=link.fixed, byte=link.byte) for name, link in costs.links.items()],
    )


def read_costs(message: Costs) -> WorkerCosts:
    """The costs in a message."""
    return WorkerCosts(
        StepCost(**{name: getattr(message, name) for name in _STEP}),
        **{name: getattr(message, name) for name in _OWN},
        kv=KvBytes(message.kv_token, tuple((each.token, each.tokens) for each in message.kv_windows), message.kv_fixed),
        links={link.worker: LinkCost(link.fixed, link.byte) for link in message.links},
    )
