"""The metrics that a router records; `kvrelay.rpc.metrics.families` describes each."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from kvrelay.router.config import DEFAULT_SERVICE, Service
from kvrelay.router.placing.placement import WorkerView
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import WORKER_ROLES
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.metric_set import MetricSet

MAX_TENANTS = 50
"""Most tenants with series of their own. Each costs a few hundred bytes here, and a series in Prometheus for ever."""
ANONYMOUS, OTHER, NO_CLASS = "anonymous", "other", "none"


class RouterMetrics:
    """A router's metrics. Used on the event loop only."""

    def __init__(self, router: str, model_name: str, services: Mapping[str, Service]) -> None:
        """
        Args:
            router, model_name: labels of each metric.
            services: classes of service by name.
        """
        self.metrics = metrics = MetricSet("router", router=router, model_name=model_name)
        self._services = services
        for service in (*services, NO_CLASS):
            for outcome in families.OUTCOMES:
                metrics.counter(families.REQUESTS, outcome, service)
        self._tenants: set[str] = set()
        self._attempts = metrics.counter(families.ATTEMPTS)
        for face in ("http", "grpc"):
            for reason in ("first", "header", "request", "idle", "address", "descriptors"):
                metrics.counter(families.CLOSED_CONNECTIONS, face, reason)
        self._itl = metrics.histogram(families.ITL)
        self._prompt_tokens = metrics.counter(families.PROMPT_TOKENS)
        self._cached_tokens = metrics.counter(families.CACHED_TOKENS)
        self._completion_tokens = metrics.counter(families.COMPLETION_TOKENS)
        self._request_prompt = metrics.histogram(families.REQUEST_PROMPT)
        self._request_completion = metrics.histogram(families.REQUEST_COMPLETION)
        self._retries = metrics.counter(families.RETRIES)
        self._migrations = metrics.counter(families.MIGRATIONS)
        self._resumes = metrics.counter(families.RESUMES)
        self._fences = metrics.counter(families.FENCES)
        self._prediction_error = metrics.histogram(families.PREDICTION_ERROR)

    def watch(
        self,
        waiting: Callable[[], tuple[int, int]],
        running: Callable[[], int],
        workers: Callable[[], Sequence[WorkerView]],
        key_mistakes: Callable[[], int],
        connections: Callable[[], tuple[int, int]],
    ) -> None:
        """Has the gauges follow what these return, whenever they are read.

        Args:
            waiting: requests in the queue for capacity, and in the one for workers without a trial.
            running: calls in the router that don't wait.
            key_mistakes: lines of the API keys' file that can't be read.
            connections: those of clients over HTTP, and over gRPC.
        """
        metrics = self.metrics

        def update() -> None:
            for queue, count in zip(("capacity", "trial"), waiting(), strict=True):
                metrics.gauge(families.QUEUE_REQUESTS, queue).set(count)
            metrics.gauge(families.RUNNING_REQUESTS).set(running())
            for face, count in zip(("http", "grpc"), connections(), strict=True):
                metrics.gauge(families.CONNECTIONS, face).set(count)
            ready: list[str] = [worker.role for worker in workers() if worker.ready]
            for role in WORKER_ROLES:
                metrics.gauge(families.READY_WORKERS, role).set(ready.count(role))
            metrics.gauge(families.API_KEY_MISTAKES).set(key_mistakes())

        metrics.before_scrape(update)

    def attempted(self) -> None:
        """Counts a placement of a request."""
        self._attempts.inc()

    def attempt_failed(self, reason: str) -> None:
        """Counts a failed placement; the reason is one of `families.ATTEMPT_REASON`."""
        self.metrics.counter(families.ATTEMPT_FAILURES, reason).inc()

    def connection_closed(self, face: str, reason: str) -> None:
        """Counts a client's connection that the router has closed or refused."""
        self.metrics.counter(families.CLOSED_CONNECTIONS, face, reason).inc()

    def refused(self, service: str) -> None:
        """Counts a request of this class that was refused, since it could not have met the targets."""
        self.metrics.counter(families.REFUSED, service).inc()

    def superseded(self) -> None:
        """Counts a call that ended because a later one continues its request."""
        self._fences.inc()

    def gap(self, seconds: float) -> None:
        """Records the time between two messages with tokens of a completion."""
        self._itl.observe(seconds)

    def ended(self, trace: RequestTrace) -> None:
        """Records the figures of an ended completion."""
        metrics, service, tenant = self.metrics, trace.service or NO_CLASS, self._tenant(trace.tenant)
        usage = trace.usage()
        metrics.counter(families.REQUESTS, str(trace.outcome), service).inc()
        metrics.counter(families.TENANT_REQUESTS, tenant).inc()
        metrics.counter(families.TENANT_TOKENS, tenant, "prompt").inc(usage.prompt_tokens)
        metrics.counter(families.TENANT_TOKENS, tenant, "completion").inc(usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._completion_tokens.inc(usage.completion_tokens)
        self._retries.inc(trace.retries)
        self._migrations.inc(trace.migrations)
        self._resumes.inc(trace.resumes > 0)
        for each in trace.tries:
            if each.prefill is not None:
                self._prediction_error.observe(abs(each.expected_tokens - each.prefill.cached_tokens))
        for latency, error in trace.prediction_errors().items():
            metrics.histogram(families.LATENCY_ERROR, latency).observe(error)
        if not trace.attempts:
            return
        self._request_prompt.observe(usage.prompt_tokens)
        self._request_completion.observe(usage.completion_tokens)
        metrics.histogram(families.QUEUE, service).observe(trace.router_queue_seconds)
        metrics.histogram(families.E2E, service).observe(trace.total_seconds)
        targets = self._services.get(trace.service, DEFAULT_SERVICE)
        if trace.ttft_seconds is not None:
            metrics.histogram(families.TTFT, service).observe(trace.ttft_seconds)
            if targets.ttft_seconds < inf:
                metrics.counter(families.TTFT_ATTAINED, service).inc(trace.ttft_seconds <= targets.ttft_seconds)
        if trace.tpot_seconds is not None:
            metrics.histogram(families.TPOT, service).observe(trace.tpot_seconds)
            if targets.tpot_seconds < inf:
                metrics.counter(families.TPOT_ATTAINED, service).inc(trace.tpot_seconds <= targets.tpot_seconds)

    def _tenant(self, name: str) -> str:
        """The label of a tenant."""
        if not name:
            return ANONYMOUS
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            self._tenants.add(name)
        return name
