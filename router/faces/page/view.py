"""The data of the page, as values that become JSON. They hold nothing of a prompt or a completion."""

from dataclasses import dataclass

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_SUSPECT
from kvrelay.machine import VERSION
from kvrelay.router.entry.front import Front
from kvrelay.router.placing.placement import WorkerView
from kvrelay.router.placing.registry import WorkerRegistry
from kvrelay.router.records.life import Life, life
from kvrelay.rpc.identity import state_name

MAX_RUNNING = 40
"""Running requests that a view has, the latest ones."""


@dataclass(frozen=True, slots=True)
class WorkerShown:
    """A worker, by its latest report. Blocks: free + cached + held == total."""

    name: str
    role: str
    state: str
    ready: bool
    suspected: bool
    avoided: bool
    running: int
    waiting: int
    pending_tokens: int
    computed_tokens: int
    """Tokens that the worker has computed since it started."""
    block_size: int
    """Tokens per block; 0 before the first report, as are all other figures."""
    total: int
    free: int
    cached: int
    held: int


@dataclass(frozen=True, slots=True)
class LinkShown:
    """A pair of workers between which this router's requests have sent KV."""

    prefill: str
    decode: str
    nbytes: int
    transfers: int
    sending: int
    """Requests whose KV is on the way now."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The router and its workers at one moment."""

    ready: bool
    running: int
    """Completions and other calls in the router."""
    workers: tuple[WorkerShown, ...]
    links: tuple[LinkShown, ...]
    lives: tuple[Life, ...]
    """The running requests of the viewer's tenant."""


@dataclass(frozen=True, slots=True)
class About:
    """Facts about the router that don't change."""

    router: str
    version: str
    model: str
    """Name of the model; empty before a worker has told it."""
    max_context: int
    has_chat_template: bool


def about(front: Front, router: str, registry: WorkerRegistry) -> About:
    """The router and its model."""
    model = registry.model
    name = "" if model is None else front.asking().served_names[0]
    context = 0 if model is None else model.max_context
    return About(router, VERSION, name, context, front.tokenizer.has_chat_template)


def fleet(front: Front, registry: WorkerRegistry, tenant: str, now: float) -> Fleet:
    """The view of a tenant at `now`, on the monotonic clock."""
    requests = front.requests
    sending = requests.sending()
    used = requests.links()
    return Fleet(
        front.ready,
        front.running,
        tuple(sorted((_worker(view) for view in registry.view()), key=lambda worker: worker.name)),
        tuple(
            LinkShown(*pair, used[pair].nbytes, used[pair].transfers, sending.get(pair, 0))
            if pair in used
            else LinkShown(*pair, 0, 0, sending[pair])
            for pair in sorted(used.keys() | sending.keys())
        ),
        tuple(life(trace, now) for trace in requests.running(tenant, MAX_RUNNING)),
    )


def _worker(view: WorkerView) -> WorkerShown:
    load = view.report
    return WorkerShown(
        view.id.name,
        view.role,
        state_name(view.state),
        view.ready,
        view.state == MEMBER_STATE_SUSPECT,
        view.avoided,
        load.requests.running,
        load.requests.waiting,
        load.pending_tokens,
        load.computed_tokens,
        load.blocks.size,
        load.blocks.total,
        load.blocks.free,
        load.blocks.cached,
        load.blocks.held,
    )
