"""The options of a router, and those of one router process."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from kvrelay.machine.options import Options, Port
from kvrelay.router.addresses import network
from kvrelay.router.text.tools.formats import ReasoningParserName, ToolParserName
from kvrelay.rpc.security import SecurityConfig

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+|null")


PlacementName = Literal["predicted", "least_work", "round_robin", "random"]

DEFAULT_CLASS, INTERACTIVE, BATCH = "default", "interactive", "batch"
BUILT_IN = (DEFAULT_CLASS, INTERACTIVE, BATCH)
"""The classes of service that every router has; DEFAULT_CLASS is that of requests that name none."""
BATCH_PRIORITY = 1
"""Priority of BATCH, unless configured: behind that of all other classes."""
TTFT_TARGET_SECONDS, TPOT_TARGET_SECONDS = 2.0, 0.1
"""Targets of INTERACTIVE, unless configured."""


@dataclass(frozen=True, slots=True)
class ServiceClass(Options):
    """A class of service, which requests ask for by its name."""

    priority: Annotated[int, Interval(ge=-1000, le=1000)] | None = None
    """Rank among the classes: requests of a class with a smaller one go first, and others get what these leave. null: 1
    for `batch`, that of `interactive` for `default`, 0 for all others."""

    weight: Annotated[float, Interval(ge=0.001, le=1000)] = 1.0
    """Share of the workers for this class while requests wait, relative to the other classes of the same tenant and
    priority."""

    ttft_target_seconds: Annotated[float, Interval(ge=0.001, le=3600)] | None = None
    """Target in seconds for the time from receipt to the first token (TTFT). null: 2.0 for `interactive`, which is
    scaling's target, too; none for all others."""

    tpot_target_seconds: Annotated[float, Interval(ge=0.0001, le=60)] | None = None
    """Target in seconds for the mean time between two tokens (TPOT). null: 0.1 for `interactive`, which is scaling's
    target, too; none for all others."""

    first_token_timeout_seconds: Annotated[float, Interval(ge=0, le=86400)] = 0.0
    """Seconds from receipt to the first token after which a request fails with DEADLINE_EXCEEDED; 0: the router's
    `first_token_timeout_seconds`."""


@dataclass(frozen=True, slots=True)
class Service:
    """A class of service with everything that counts for its requests."""

    name: str = DEFAULT_CLASS
    rank: int = 0
    """Priority of the class: the smallest goes first."""
    weight: float = 1.0
    """Share relative to the other classes of the same tenant and rank."""
    ttft_seconds: float = math.inf
    """Target for the time to the first token; infinite for none."""
    tpot_seconds: float = math.inf
    """Target for the mean time between two tokens; infinite for none."""
    first_token_timeout_seconds: float = 120.0
    """Limit of the time to the first token."""

    @property
    def has_targets(self) -> bool:
        return min(self.ttft_seconds, self.tpot_seconds) < math.inf


DEFAULT_SERVICE = Service()
"""DEFAULT_CLASS as it is without a configuration."""


@dataclass(frozen=True, slots=True)
class RouterOptions(Options):
    """The options of a router that an operator chooses."""

    host: str = "127.0.0.1"
    """Address that the public gRPC and HTTP bind to."""

    grpc_port: Port = 50051
    """Port of the public gRPC; 0 takes a free one, and another one when the router is replaced."""

    http_port: Port | None = 8000
    """Port of the OpenAI-compatible HTTP; 0 takes a free one, and another one when the router is replaced. null: no
    HTTP."""

    page: bool = True
    """Whether HTTP has the page at `/`: a playground, the stages of each request, the map of the workers. It shows no
    text of anybody's requests. Whoever opens it needs an API key where calls need one."""

    cors_origins: tuple[str, ...] = ()
    """Origins (`https://chat.example.org`) whose web pages may call the HTTP API from a browser; `*` allows every one.
    Empty: none but the router's own page."""

    served_model_name: tuple[str, ...] = ()
    """Names that requests may give the model, the first of which answers have; empty: the name of its folder."""

    chat_template: str = ""
    """File with the Jinja template of chats; empty: the model's own."""

    tool_parser: ToolParserName = "auto"
    """Format in which the model writes tool calls: hermes (also Qwen), llama3, mistral, none; auto takes the one that
    its chat template shows."""

    reasoning_parser: ReasoningParserName = "auto"
    """Way to split reasoning from the answers of the HTTP API: think takes <think>...</think> at their beginning, none
    doesn't split; auto splits if the chat template has such tags."""

    max_requests: Annotated[int, Interval(ge=1, le=1_000_000)] = 1024
    """Calls in flight at once, from the headers of their requests on; each prompt of a list, and each completion of a
    prompt, counts as one while it runs or waits for workers. A sixteenth of them is for clients that have less than an
    equal share. With one more, the tenant, or client address, that has most of them loses one that has not begun:
    prompts of a list then wait, and another call is refused with RESOURCE_EXHAUSTED, as one more of that client is."""

    max_queued_bytes: Annotated[int, Interval(ge=10240, le=2**40)] = 256 * 2**20
    """Bytes that the requests in flight may hold in the router, half of it those of one tenant or client address; one
    more is refused with RESOURCE_EXHAUSTED, or displaces those of a client that holds more. A request counts with its
    size as sent and one to three bytes per token of its prompt, and until it is tokenized with five times its size. At
    least ten times max_message_bytes."""

    max_queue: Annotated[int, Interval(ge=0, le=1_000_000)] = 512
    """Requests that may wait in the router for workers with capacity. With one more, the latest of the tenant, or of
    the client address, that has most of them is refused with RESOURCE_EXHAUSTED; one of a list of prompts waits."""

    admission: Literal["none", "room", "predicted"] = "room"
    """Requests that are refused with RESOURCE_EXHAUSTED before anything is computed, and with the delay after which to
    try again. room: those beyond max_queue, and those that find no room within first_token_timeout_seconds. predicted:
    also those that can't meet the targets of their class, by what is predicted of them and of all that is before them;
    it needs placement predicted, and is as room otherwise. none: as room, without the limit of max_queue."""

    placement: PlacementName = "least_work"
    """Rule by which requests are placed on workers. least_work: where the load and the request's own work are least,
    counted in tokens. predicted: where a request is predicted to cost least, itself and those that it delays, by the
    costs that the workers report; as least_work while these aren't known. round_robin, random: for comparison."""

    backlog_share: Annotated[float, Interval(ge=0, le=1)] = 0.25
    """Largest share (0 to 1) of the prefill workers' KV memory that may hold computed prompts for which there will soon
    be room on a decode worker, as requests there are about to end. With 0, a prompt is sent only if it fits on a decode
    worker now, so decode waits for a prefill whenever a request ends. With a large share, finished prompts may fill
    prefill memory."""

    prefill_ahead_tokens: Annotated[int, Interval(ge=1, le=2**40)] = 8192
    """When a worker has this many prompt tokens pending, further prompts for it wait in the router, where each tenant
    gets its share. Too few let the worker wait for a prompt."""

    prefix_index_tokens: Annotated[int, Interval(ge=0, le=2**40)] = 8 * 2**20
    """Tokens in workers' prefix caches that the router remembers, to place prompts where their beginning was computed;
    about 8 bytes each. 0: placement by load only."""

    max_message_bytes: Annotated[int, Interval(ge=1024, le=2**30)] = 4 * 2**20
    """Largest size of a request; a larger one is refused with INVALID_ARGUMENT. gRPC itself refuses one that is more
    than a quarter larger, with RESOURCE_EXHAUSTED."""

    request_timeout_seconds: Annotated[float, Interval(ge=0.1, le=3600)] = 15.0
    """Time for a request to arrive: the message of a gRPC call, or the body of an HTTP request, once its headers are
    there."""

    header_timeout_seconds: Annotated[float, Interval(ge=0.1, le=3600)] = 10.0
    """Time for a new connection's TLS handshake and the headers of its first request, and for those of each later one
    from their first byte. A gRPC connection is closed if no whole request has come on it within this time and
    request_timeout_seconds together."""

    http_idle_seconds: Annotated[float, Interval(ge=0.1, le=86400)] = 90.0
    """Time for which an HTTP connection that has served a request may wait for the next one. Longer than proxies keep
    their connections, so that none of them sends a request on one that is just being closed."""

    grpc_idle_seconds: Annotated[float, Interval(ge=0.1, le=86400)] = 300.0
    """Time for which a gRPC connection may wait for the next request; its client is told before it is closed."""

    max_connections_per_address: Annotated[int, Interval(ge=1, le=1_000_000)] = 256
    """Connections that one client address may have to the gRPC port, and as many to the HTTP port. A further one takes
    the place of the address's connections on which no request runs; if there are none, it is closed. An IPv6 network of
    64 bits is one address."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks (`10.0.0.0/8`) of proxies and load balancers that clients come through. They have no limit
    of connections, and the address of a client behind them is that of `X-Forwarded-For` (in gRPC as metadata)."""

    spare_descriptors: Annotated[int, Interval(ge=8, le=1_000_000)] = 64
    """File descriptors that client connections leave for everything else, such as connections to workers. The rest is
    shared by gRPC and HTTP; a face that has used up its half closes connections without a request to make room for new
    ones."""

    max_arriving_bytes: Annotated[int, Interval(ge=5120, le=2**40)] = 20 * 2**20
    """Bytes that the gRPC requests which are on their way to the router may hold, each of which counts as one and a
    quarter times max_message_bytes; further ones wait at their senders. One tenant, or client address, has three
    quarters of it at most. At least five times max_message_bytes."""

    first_token_timeout_seconds: Annotated[float, Interval(ge=0.1, le=86400)] = 120.0
    """Time from receipt to the first token after which a request fails: with RESOURCE_EXHAUSTED, and the time after
    which to try again, if it has waited for room in KV pools, else with DEADLINE_EXCEEDED."""

    classes: Mapping[str, ServiceClass] = field(default_factory=dict)
    """Classes of service by name, each with `priority`, `weight`, `ttft_target_seconds`, `tpot_target_seconds` and
    `first_token_timeout_seconds`. `default`, for requests that name none, `interactive` and `batch` are there in any
    case. Requests of one tenant and class wait by their own priority, then by the time at which their target passes,
    then in the order of arrival."""

    coalesce_ms: Annotated[float, Interval(ge=0, le=1000)] = 10.0
    """Longest time that a token waits for others, to be sent with them, while the router has many streams: up to
    0.16 ms for each stream, and up to this. A router that has more to do than it can lets tokens gather for longer. The
    first tokens of a stream never wait. 0: none does."""

    worker_wait_seconds: Annotated[float, Interval(ge=0, le=86400)] = 30.0
    """Time that a new request waits while a role has no worker that is ready: a replacement may be starting. 0 refuses
    it with UNAVAILABLE at once."""

    idle_timeout_seconds: Annotated[float, Interval(ge=0.1, le=86400)] = 30.0
    """Time without a token after which a running stream's workers are given up. It doesn't run while a live worker says
    that the request waits there, e.g. for KV blocks that others have."""

    max_attempts: Annotated[int, Interval(ge=1, le=100)] = 4
    """Placements of one request, the first one included."""

    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector's gRPC, e.g. `http://collector:4317`, that gets a trace of each request. Needs
    the extra `otel`. Empty: none."""

    trace_share: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share (0 to 1) of the traces which begin at a router that are sent. Those that a caller has begun (`traceparent`)
    are sent if the caller records them."""

    api_keys: str = ""
    """File with a line for each API key: the tenant, the SHA-256 of the key in hexadecimal, and options (`classes`,
    `weight`, `requests_per_minute`, `tokens_per_minute`, `concurrent`); read again when it changes. Calls must then
    carry a key, as `authorization: Bearer KEY`, and share limits and prefix cache only with calls of the same tenant.
    Empty, without tls_client_ca: anybody may call, and all are one tenant."""

    tls_certificate: str = ""
    """File with the public ports' certificate, in PEM; read again when it changes. Empty: clients use plaintext."""

    tls_key: str = ""
    """File with the key of the public ports' certificate."""

    tls_client_ca: str = ""
    """File with the authorities whose certificates clients must show. A certificate's common name is the tenant, unless
    there are api_keys."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError(f"tls_key is {self.tls_key!r}; allowed: a file exactly if tls_certificate is one")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError(f"tls_client_ca is {self.tls_client_ca!r}; allowed: with tls_certificate only")
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError(f"http_port is {self.http_port}; allowed: another one than grpc_port")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins has {origin!r}; allowed: '*', or scheme://host or scheme://host:port, without a path"
                )
        for proxy in self.trusted_proxies:
            try:
                network(proxy)
            except ValueError:
                raise ValueError(
                    f"trusted_proxies has {proxy!r}; allowed: addresses, and networks such as '10.0.0.0/8'"
                ) from None
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; allowed: http://HOST:PORT, https://..., or empty"
            )
        if not all(self.served_model_name):
            raise ValueError("served_model_name has an empty name; allowed: names of at least 1 character")
        for name, times, words in (("max_queued_bytes", 10, "ten"), ("max_arriving_bytes", 5, "five")):
            if getattr(self, name) < times * self.max_message_bytes:
                least = f"{times * self.max_message_bytes}, {words} times max_message_bytes"
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")

    def services(self) -> dict[str, Service]:
        """All classes of service by name, with the defaults filled in."""
        ranks = {DEFAULT_CLASS: self.classes.get(INTERACTIVE, ServiceClass()).priority, BATCH: BATCH_PRIORITY}
        targets = {INTERACTIVE: (TTFT_TARGET_SECONDS, TPOT_TARGET_SECONDS)}
        services = {}
        for name in (*BUILT_IN, *(name for name in self.classes if name not in BUILT_IN)):
            given = self.classes.get(name, ServiceClass())
            rank = ranks.get(name) if given.priority is None else given.priority
            ttft, tpot = targets.get(name, (math.inf, math.inf))
            services[name] = Service(
                name,
                rank or 0,
                given.weight,
                given.ttft_target_seconds or ttft,
                given.tpot_target_seconds or tpot,
                given.first_token_timeout_seconds or self.first_token_timeout_seconds,
            )
        return services


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterOptions):
    """One router's identity and options: the JSON file of `python -m kvrelay.router --config FILE`."""

    name: str = "router-0"
    """Name of the router; unique in the cluster."""

    model: str = "pico"
    """The model as the workers have it: the router reads its tokenizer and chat template."""

    supervisor: str = ""
    """host:port of the supervisor, which tells the router its workers."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Credentials of the router for calls to the supervisor and the workers."""

    share_port: bool = False
    """Whether other routers on this machine have the same ports. Each connection is one router's."""

    advertised_host: str = ""
    """Host under which others are told to reach the public gRPC, where `host` binds to all addresses; empty: `host`."""

    metrics_port: Port | None = None
    """Port of a second place for `/metrics`, without a key, beside that of `http_port`; 0 takes a free one. None: no
    such port."""

    drain_seconds: Annotated[float, Interval(ge=0, le=3600)] = 30.0
    """Time that streams are given to finish when the router is to end; it takes no new requests then. Those that are
    left end with UNAVAILABLE, and their clients may continue them at another router."""

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        if self.share_port and not self.grpc_port:
            raise ValueError("grpc_port is 0; allowed: 1 to 65535 with share_port")
