"""Why a request has to wait in the router, in words for an operator."""

from collections.abc import Sequence

from kvrelay.router.placement import AHEAD_PROMPTS, Demand, WorkerView


def reason(demand: Demand, workers: Sequence[WorkerView], ahead_tokens: float) -> str:
    """What keeps the request from being placed, by the workers' state now.

    Args:
        ahead_tokens: tokens that a worker has to compute from which on it gets no other prompt.
    """
    ready = [worker for worker in workers if worker.ready]
    if not any(worker.role != "prefill" for worker in ready):
        return "no worker that decodes was ready"
    computing = [worker for worker in ready if worker.role != "decode"] or ready
    if all(worker.busy(ahead_tokens) for worker in computing):
        names = ", ".join(worker.id.name for worker in computing)
        return f"{names} had {ahead_tokens:g} tokens or more of other prompts to compute, or {AHEAD_PROMPTS} prompts"
    capacities = [worker.capacity for worker in ready if worker.role == "decode" and worker.capacity is not None]
    if capacities and not any(capacity.fits(demand) for capacity in capacities):
        if all(capacity.promised_requests >= capacity.free_slots for capacity in capacities):
            return "all decode slots were taken"
        return f"no decode worker had KV blocks free for {demand.most_expected} tokens, beside what it has to grow"
    return "other requests were before it"
