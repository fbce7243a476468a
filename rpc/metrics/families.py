"""The table of all metrics. docs/metrics.md, the dashboards and the tests of the rules are made from it."""

from dataclasses import dataclass
from typing import Literal

from kvrelay.internal.v1.supervisor_pb2 import MemberState
from kvrelay.rpc.identity import ROLES, WORKER_ROLES

Part = Literal["router", "worker", "supervisor"]
"""The kind of process that records a metric."""
Kind = Literal["counter", "gauge", "histogram"]

COMMON: dict[Part, tuple[str, ...]] = {
    "router": ("router", "model_name"),
    "worker": ("worker", "role", "model_name"),
    "supervisor": (),
}
"""Labels that every metric of a part has, with the same values for the whole process."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Buckets from a millisecond to 100 seconds, for stages of a request."""
SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
"""Buckets for times once per token or per step, in seconds."""
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class Label:
    """A label beside the common ones."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values, each exported from the start; empty if they are known only at run time."""
    bound: str = ""
    """Bound on the number of its values, in words, if they are known only at run time."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric, with all of its series."""

    part: Part
    name: str
    """Name in the form kvrelay_<part>_<what>_<unit>; a counter has `_total` behind it."""
    kind: Kind
    help: str
    unit: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets; empty unless it is a histogram."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, the common ones first."""
        return (*COMMON[self.part], *(label.name for label in self.labels))


OUTCOMES = ("stop", "length", "cancelled", "invalid", "exhausted", "unavailable", "deadline", "internal")
OUTCOME = Label("outcome", OUTCOMES)
CLASS = Label(
    "class",
    bound="default, interactive, batch and the classes of router.classes; `none` for requests that failed before",
)
TENANT = Label("tenant", bound="the first 50 tenants that come, `anonymous`, and `other` for all later ones")
ATTEMPT_REASON = Label(
    "reason", ("lost", "silent", "peer_lost", "draining", "link", "refused", "trial", "full", "internal", "other")
)
HANDOFF_REASON = Label(
    "reason",
    (
        "cancelled",
        "closed",
        "corrupt",
        "draining",
        "incompatible",
        "internal",
        "link",
        "manifest",
        "no_capacity",
        "protocol",
        "timeout",
        "unknown_peer",
    ),
)
FACE = Label("face", ("http", "grpc"))
STEP = Label("kind", ("prefill", "decode", "mixed"))
STATES = tuple(name.removeprefix("MEMBER_STATE_").lower() for name, number in MemberState.items() if number)
MEMBER_ROLE = Label("role", tuple(ROLES))
POOL = Label("role", ("prefill", "decode"))

PARTS: dict[str, Part] = {"router": "router", "worker": "worker", "transfer": "worker", "supervisor": "supervisor"}
"""The part whose processes record a metric, by the first word of its name."""
FAMILIES: list[Family] = []
"""All families, in the order of docs/metrics.md."""


def _family(name: str, help: str, *labels: Label, unit: str = "", buckets: tuple[float, ...] = ()) -> Family:
    """Adds a metric. Its name says which part records it, its kind (`_total`: a counter), and its unit, unless that is
    given; with buckets it is a histogram."""
    stem = name.removesuffix("_total")
    kind: Kind = "histogram" if buckets else "counter" if stem != name else "gauge"
    part = PARTS[stem.partition("_")[0]]
    family = Family(part, f"kvrelay_{name}", kind, help, unit or stem.rpartition("_")[2], labels, buckets)
    FAMILIES.append(family)
    return family


# Routers.

REQUESTS = _family("router_requests_total", "Completions that have ended.", OUTCOME, CLASS)
TENANT_REQUESTS = _family("router_tenant_requests_total", "Completions that have ended, by tenant.", TENANT)
TENANT_TOKENS = _family(
    "router_tenant_tokens_total",
    "Tokens of prompts and of completions, by tenant.",
    TENANT,
    Label("kind", ("prompt", "completion")),
)
TTFT = _family("router_ttft_seconds", "From a request's arrival to its first token (TTFT).", CLASS, buckets=SECONDS)
TPOT = _family(
    "router_tpot_seconds",
    "Mean time between two tokens of a completion after its first (TPOT).",
    CLASS,
    buckets=SHORT_SECONDS,
)
TTFT_ATTAINED = _family(
    "router_ttft_attained_total",
    "Completions whose TTFT was within the target of their class; of classes with a target only.",
    CLASS,
    unit="requests",
)
TPOT_ATTAINED = _family(
    "router_tpot_attained_total",
    "Completions whose TPOT was within the target of their class; of classes with a target only.",
    CLASS,
    unit="requests",
)
REFUSED = _family(
    "router_refused_total",
    "Completions that were refused, as they could not have met the targets of their class (`router.admission`).",
    CLASS,
    unit="requests",
)
ITL = _family(
    "router_itl_seconds",
    "Time between two messages with tokens of one completion (ITL). While the router has many streams, a message may "
    "have several tokens.",
    buckets=SHORT_SECONDS,
)
E2E = _family(
    "router_e2e_seconds",
    "From a request's arrival to its last message, of requests that were not refused.",
    CLASS,
    buckets=SECONDS,
)
QUEUE = _family(
    "router_queue_seconds",
    "Waited in the router for workers with capacity, of requests that were placed.",
    CLASS,
    buckets=SECONDS,
)
QUEUE_REQUESTS = _family(
    "router_queue_requests",
    "Requests that wait in the router: for workers with capacity, or for workers without another request on trial.",
    Label("queue", ("capacity", "trial")),
)
RUNNING_REQUESTS = _family("router_running_requests", "Calls in the router that don't wait in its queues.")
PROMPT_TOKENS = _family("router_prompt_tokens_total", "Tokens of prompts.")
CACHED_TOKENS = _family("router_cached_tokens_total", "Tokens of prompts that were found in prefix caches.")
COMPLETION_TOKENS = _family("router_completion_tokens_total", "Tokens of completions, sent by this router.")
REQUEST_PROMPT = _family(
    "router_request_prompt_tokens", "Tokens of the prompt of a completion that was placed.", buckets=TOKENS
)
REQUEST_COMPLETION = _family(
    "router_request_completion_tokens", "Tokens of a completion that was placed.", buckets=TOKENS
)
ATTEMPTS = _family("router_attempts_total", "Placements of requests on workers.")
ATTEMPT_FAILURES = _family(
    "router_attempt_failures_total",
    "Placements that failed, by what the router or the worker says of it.",
    ATTEMPT_REASON,
    unit="attempts",
)
CONNECTIONS = _family("router_connections", "Open connections of clients.", FACE)
CLOSED_CONNECTIONS = _family(
    "router_closed_connections_total",
    "Connections that the router closed or refused: before their first request, in a request's headers or body, idle "
    "HTTP, for the limit of their address, or to make room.",
    FACE,
    Label("reason", ("first", "header", "request", "idle", "address", "descriptors")),
)
RETRIES = _family("router_retries_total", "Placements after a failed one.", unit="attempts")
MIGRATIONS = _family("router_migrations_total", "Placements of requests whose worker drains.", unit="attempts")
RESUMES = _family("router_resumes_total", "Calls that continue a request whose earlier call was lost.", unit="requests")
FENCES = _family(
    "router_fences_total",
    "Calls that ended because their client continues the request by a later one.",
    unit="requests",
)
PREDICTION_ERROR = _family(
    "router_prediction_error_tokens",
    "Difference between the prompt tokens that placement expected in the worker's prefix cache and those that were "
    "there.",
    buckets=(0.0, *TOKENS),
)
LATENCY_ERROR = _family(
    "router_latency_error_ratio",
    "Difference between a latency that was predicted when a request was placed and the one that came, as a share of "
    "the latter; of requests that were placed once.",
    Label("latency", ("ttft", "tpot")),
    buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)
API_KEY_MISTAKES = _family(
    "router_api_key_mistakes",
    "Lines of the file of API keys that can't be read and grant nothing; 1 if it is gone or holds no key, so that "
    "nobody may call.",
    unit="lines",
)
READY_WORKERS = _family(
    "router_ready_workers", "Workers that take requests from this router.", Label("role", WORKER_ROLES)
)

# Workers.

KV_BLOCKS = _family(
    "worker_kv_blocks",
    "Blocks of the KV pool: free; cached, which the prefix cache gives up when needed; held by requests, leases and "
    "reservations.",
    Label("state", ("free", "cached", "held")),
)
WORKER_REQUESTS = _family(
    "worker_requests",
    "Requests in the engine, and those that a decode worker expects the KV of (promised).",
    Label("state", ("waiting", "running", "promised")),
)
PENDING_TOKENS = _family("worker_pending_tokens", "Tokens of the engine's requests that are still to be computed.")
COST_ERROR = _family(
    "worker_cost_error_ratio",
    "Mean difference between the predicted and the measured time of the latest steps without prompts, steps with them, "
    "and hand-offs to this worker, as a share of the latter.",
    Label("cost", ("decode", "prompt", "handoff")),
)
COMPUTED_TOKENS = _family("worker_computed_tokens_total", "Tokens computed, drafts among them.")
PREFIX_QUERIES = _family("worker_prefix_queried_tokens_total", "Tokens that were looked up in the prefix cache.")
PREFIX_HITS = _family("worker_prefix_hit_tokens_total", "Tokens that were found in the prefix cache.")
EVICTIONS = _family("worker_kv_evictions_total", "Cached blocks that were given to requests.", unit="blocks")
PREEMPTIONS = _family("worker_preemptions_total", "Requests that gave their blocks up and start over.", unit="requests")
LAUNCHES = _family(
    "worker_launches_total",
    "Steps that were launched: as captured graphs, in one or several pieces, or kernel by kernel (always so on a CPU).",
    Label("mode", ("graph", "kernels")),
    unit="steps",
)
DRAFTS = _family(
    "worker_draft_tokens_total",
    "Guessed tokens that steps checked, and those of them that were kept because the model chose the same.",
    Label("event", ("proposed", "accepted")),
)
DRAFT_STEPS = _family("worker_draft_steps_total", "Decode steps that checked guessed tokens.")
DRAFT_STEP_TOKENS = _family("worker_draft_step_tokens_total", "Tokens that these steps yielded.")
DRAFT_SECONDS = _family(
    "worker_draft_step_seconds_total",
    "Time of the decode steps with guessed tokens, that of guessing included (on a CPU, CPU time of the engine's "
    "thread): as it was, and as their tokens would have taken without, by steps without guesses. The difference "
    "was saved. Steps count once one without guesses was measured.",
    Label("case", ("with_guesses", "without")),
)
EXPERT_TOKENS = _family(
    "worker_expert_tokens_total",
    "Tokens that chose an expert, by its number, added up over the layers. Counted on CPUs, where "
    "ranks have whole experts every 32 steps, and on GPUs where experts are quantized. The experts of the last layer "
    "mostly compute only the tokens behind which one is chosen.",
    Label("expert", bound="experts of a layer, from 0 to 511; later ones are left out"),
)
EXPERT_IMBALANCE = _family(
    "worker_expert_imbalance_ratio",
    "Tokens of the busiest expert of a layer, as a multiple of the mean over its experts, of about the last minute.",
    Label("layer", bound="the model's layers with experts, from 0 on"),
)
EXPERT_RANK_IMBALANCE = _family(
    "worker_expert_rank_imbalance_ratio",
    "Tokens of the busiest rank's experts as a multiple of the mean over the ranks, layers weighed by their tokens, of "
    "about the last minute: how much longer experts take than if ranks had as much to do. With the spare copies of "
    "experts, and as it would be without them. 0 without experts.",
    Label("copies", ("with", "without")),
)
STEP_SECONDS = _family(
    "worker_step_seconds",
    "Time of a step. It is a prefill step if every row is a part of a prompt, a decode step if every row is one token.",
    STEP,
    buckets=SHORT_SECONDS,
)
BATCH_SEQUENCES = _family("worker_batch_sequences", "Sequences of a step.", buckets=ROWS)
BATCH_TOKENS = _family("worker_batch_tokens", "Tokens of a step.", buckets=TOKENS)
PREFILL_QUEUE = _family(
    "worker_prefill_queue_seconds", "From a prompt's arrival at the worker to its first step.", buckets=SECONDS
)
PREFILL = _family("worker_prefill_seconds", "From a prompt's first step to its first token.", buckets=SECONDS)
DECODE_QUEUE = _family(
    "worker_decode_queue_seconds",
    "From the commit of a request's KV to its first step on the decode worker.",
    buckets=SECONDS,
)
REQUEST_FAILURES = _family(
    "worker_request_failures_total",
    "Requests that the worker gave back to a router.",
    Label("code", ("invalid", "retry", "internal", "full", "fenced")),
    unit="requests",
)

# The hand-off, as each of its two workers sees it.

SENT_BYTES = _family("transfer_sent_bytes_total", "KV that was sent and acknowledged.")
RECEIVED_BYTES = _family("transfer_received_bytes_total", "KV that was received and verified.")
SENT_STATES = _family("transfer_sent_states_bytes_total", "Hidden states of prompts that were sent with their KV.")
RECEIVED_STATES = _family(
    "transfer_received_states_bytes_total", "Hidden states of prompts that were received with their KV and verified."
)
TRANSFER = _family(
    "transfer_duration_seconds",
    "Time of a hand-off. Prefill worker: from the first frame to the acknowledgement. Decode worker: from the grant of "
    "its blocks to the commit.",
    buckets=SECONDS,
)
EXPOSED = _family(
    "transfer_exposed_seconds",
    "The part of a hand-off that no computation hid: from the end of prefill on.",
    buckets=SECONDS,
)
HANDOFF_FAILURES = _family(
    "transfer_failures_total", "Hand-offs that failed at this end.", HANDOFF_REASON, unit="attempts"
)
CHECKSUM_FAILURES = _family(
    "transfer_checksum_failures_total",
    "Frames whose bytes were not those that the sender read. No token is ever computed from them.",
    unit="frames",
)
FENCED_MESSAGES = _family(
    "transfer_fenced_messages_total", "Messages of earlier attempts, links or incarnations, which were dropped."
)
LEASES = _family("transfer_leases", "Hand-offs in progress, each with a lease on blocks or about to.", unit="attempts")
LEASES_EXPIRED = _family(
    "transfer_leases_expired_total",
    "Hand-offs that were ended because a lease or another deadline of theirs had passed.",
    unit="attempts",
)
IN_PLACE_BYTES = _family(
    "transfer_in_place_bytes_total",
    "KV sent over nixl from where it lay in the pool, without a copy to a link's buffer before.",
)
LINKS_ENDED = _family(
    "transfer_links_ended_total",
    "Links to other workers that have ended: they broke, could not be made, or were closed for want of use.",
    unit="links",
)

# The supervisor.

MEMBERS = _family("supervisor_members", "Members by role and state.", MEMBER_ROLE, Label("state", STATES))
READY = _family("supervisor_ready", "1 if a router and workers that can serve a request are ready.", unit="boolean")
HEARTBEAT_AGE = _family(
    "supervisor_heartbeat_age_seconds",
    "Time since the last heartbeat of a member.",
    Label("member", bound="the members of the cluster"),
)
DEATHS = _family(
    "supervisor_deaths_total",
    "Members that ended without having been asked to, or were declared dead.",
    MEMBER_ROLE,
    unit="members",
)
REPLACEMENTS = _family(
    "supervisor_replacements_total", "Members that came back as another incarnation.", MEMBER_ROLE, unit="members"
)
INCARNATION_FENCES = _family(
    "supervisor_fences_total",
    "Heartbeats of incarnations that were declared dead or replaced; their processes are told to end.",
    unit="heartbeats",
)
DRAINS = _family("supervisor_drains_total", "Members that have begun to drain.", MEMBER_ROLE, unit="members")
ROLE_CHANGES = _family(
    "supervisor_role_changes_total",
    "Members that have changed their role, by the new one.",
    MEMBER_ROLE,
    unit="members",
)
PRESSURE = _family(
    "supervisor_pressure_ratio",
    "Latency predicted for the next 20 s over its target: above 1, targets are missed. 0 while too little is known.",
    POOL,
)
ATTAINED = _family(
    "supervisor_attained_ratio",
    "Share of the last seconds' requests that met the target of scaling. 1 without requests.",
    Label("latency", ("ttft", "tpot")),
)
POOL_QUEUE_SECONDS = _family(
    "supervisor_queue_seconds_total",
    "Time that requests have waited for workers of a role, in the routers and on the workers.",
    POOL,
)
SCALING_DECISIONS = _family(
    "supervisor_scaling_decisions_total",
    "Decisions of scaling: to give workers another role, to change their number, or either but refused.",
    Label("kind", ("roles", "workers", "refused")),
)

# Every process has it.

BUILD_NAME = "kvrelay_build_info"
BUILD_HELP = "1; the labels say which version runs, and in which part."
BUILD_LABELS = ("version", "part", "name")
