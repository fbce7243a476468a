"""Metrics that Prometheus scrapes from the processes of a running cluster."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from expressions import RULES, dashboards, queries, rule_groups, series
from prometheus import prometheus, promtool, values
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.asking.status import as_json
from kvrelay.rpc.metrics.families import BUILD_NAME, FAMILIES
from support.faults import OUT, PROMPT, Scene, prompt_of, scene
from support.hash_worker import WORKER_LAYOUT
from support.http_calls import fetched
from support.processes import wait_until

SECONDS = 30.0
REQUESTS = 6
PORT = {"metrics_port": 0}


DRAFTS = ("proposed", "accepted")


@dataclass(frozen=True, slots=True)
class Watched:
    """A cluster whose processes serve their metrics, after some load."""

    scene: Scene

    def get(self, address: str, path: str = "/metrics", accept: str = "") -> str:
        return fetched(f"http://{address}{path}", **({"Accept": accept} if accept else {}))

    @property
    def supervisor(self) -> str:
        return self.scene.cluster.status().metrics_address

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the metrics of each process, by its name."""
        members = {status.member.name: status.member for status in self.scene.cluster.status().members}
        return {name: member.metrics_address for name, member in members.items()} | {"supervisor": self.supervisor}

    def metrics(self, name: str) -> dict[str, Metric]:
        return {metric.name: metric for metric in text_string_to_metric_families(self.get(self.addresses[name]))}

    def value(self, process: str, series: str, **labels: str) -> float:
        """The sum of the series of a process that have these labels."""
        found = values(self.get(self.addresses[process]), series, labels)
        assert found, f"{process} has no {series} with {labels}"
        return sum(found)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    router = {"http_port": 0, **PORT}
    with scene(
        tmp_path_factory.mktemp("watched"), prefill=1, decode=1, worker=PORT, router=router, supervisor=PORT
    ) as it:
        it.ask_all([f"request {number}" for number in range(REQUESTS)])
        # Again, so that its prompt is in the prefix cache.
        again = prompt_of(f"request 0 of test {it.turn}")
        list(it.client.generate(again, max_tokens=OUT, ignore_eos=True))
        it.settle(SECONDS)
        yield Watched(it)


def test_every_process_serves_the_families_of_its_part(watched: Watched) -> None:
    parts = {"router-0": "router", "prefill-0": "worker", "decode-0": "worker", "supervisor": "supervisor"}
    for process, part in parts.items():
        found = watched.metrics(process)
        for family in (family for family in FAMILIES if family.part == part):
            metric = found.pop(family.name.removesuffix("_total"))
            assert (metric.type, metric.documentation) == (family.kind, family.help), process
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    assert set(sample.labels) - {"le"} == set(family.label_names)
                    assert sample.name in series(family)
        rest = {name for name in found if not name.startswith("process_") and not name.endswith("_created")}
        assert rest == {BUILD_NAME}


def test_promtool_finds_nothing_to_say(watched: Watched) -> None:
    for address in watched.addresses.values():
        assert promtool("check", "metrics", stdin=watched.get(address).encode()) == ""


def test_prometheus_own_format_is_served_on_demand(watched: Watched) -> None:
    text = watched.get(watched.supervisor, accept="application/openmetrics-text; version=1.0.0")
    assert text.rstrip().endswith("# EOF")


def test_a_routers_http_serves_the_same(watched: Watched) -> None:
    member = watched.scene.cluster.member("router-0").member
    names = [set(watched.metrics("router-0"))]
    names.append({each.name for each in text_string_to_metric_families(watched.get(member.http_address))})
    assert names[0] == names[1]


def test_requests_tokens_and_hand_offs_are_counted_once(watched: Watched) -> None:
    count, value = REQUESTS + 1, watched.value
    assert value("router-0", "kvrelay_router_requests_total") == count
    assert value("router-0", "kvrelay_router_requests_total", outcome="length", **{"class": "default"}) == count
    assert value("router-0", "kvrelay_router_tenant_requests_total", tenant="anonymous") == count
    assert value("router-0", "kvrelay_router_completion_tokens_total") == count * OUT
    assert value("router-0", "kvrelay_router_prompt_tokens_total") == count * PROMPT
    assert value("router-0", "kvrelay_router_attempts_total") == count
    assert value("router-0", "kvrelay_router_retries_total") == 0
    for histogram in ("ttft", "tpot", "e2e", "queue"):
        assert value("router-0", f"kvrelay_router_{histogram}_seconds_count") == count, histogram
    gaps = value("router-0", "kvrelay_router_itl_seconds_count")
    assert count <= gaps <= count * (OUT - 1)
    assert value("router-0", "kvrelay_router_ready_workers", role="decode") == 1
    assert value("router-0", "kvrelay_router_prediction_error_tokens_count") == count
    cached = value("router-0", "kvrelay_router_cached_tokens_total")
    assert cached == value("prefill-0", "kvrelay_worker_prefix_hit_tokens_total") > 0

    assert value("prefill-0", "kvrelay_worker_prefill_seconds_count") == count
    assert value("decode-0", "kvrelay_worker_decode_queue_seconds_count") == count
    computed = count * PROMPT - cached
    assert value("prefill-0", "kvrelay_worker_computed_tokens_total") == computed
    drafts = {which: value("decode-0", "kvrelay_worker_draft_tokens_total", event=which) for which in DRAFTS}
    wrong = drafts["proposed"] - drafts["accepted"]
    assert value("decode-0", "kvrelay_worker_computed_tokens_total") == count * (OUT - 1) + wrong
    for worker in ("prefill-0", "decode-0"):
        steps = value(worker, "kvrelay_worker_step_seconds_count")
        assert steps == value(worker, "kvrelay_worker_launches_total") > 0
        tokens = value(worker, "kvrelay_worker_computed_tokens_total")
        assert tokens == value(worker, "kvrelay_worker_batch_tokens_sum")
        assert value(worker, "kvrelay_worker_kv_blocks", state="held") == 0
        assert value(worker, "kvrelay_transfer_leases") == 0
        assert value(worker, "kvrelay_transfer_duration_seconds_count") == count
        assert value(worker, "kvrelay_transfer_failures_total") == 0
    assert value("decode-0", "kvrelay_worker_step_seconds_count", kind="prefill") == 0
    sent = value("prefill-0", "kvrelay_transfer_sent_bytes_total")
    assert sent == value("decode-0", "kvrelay_transfer_received_bytes_total")
    assert (count - 1) * PROMPT * WORKER_LAYOUT.token_bytes <= sent <= count * PROMPT * WORKER_LAYOUT.token_bytes

    assert value("supervisor", "kvrelay_supervisor_ready") == 1
    assert value("supervisor", "kvrelay_supervisor_members", state="ready") == 3
    assert value("supervisor", "kvrelay_supervisor_heartbeat_age_seconds", member="decode-0") < SECONDS


def test_status_and_the_supervisor_say_where_to_scrape(watched: Watched) -> None:
    shown = as_json(watched.scene.cluster.status())
    workers = {worker["name"]: worker["metrics"] for worker in shown["workers"]}
    routers = {router["name"]: router["metrics"] for router in shown["routers"]}
    assert {**workers, **routers, "supervisor": shown["metrics"]} == watched.addresses
    targets = json.loads(watched.get(watched.supervisor, "/targets"))
    assert {entry["labels"]["member"]: entry["targets"] for entry in targets} == {
        name: [address] for name, address in watched.addresses.items()
    }


def test_what_a_router_refuses_and_what_clients_give_up_is_counted(watched: Watched) -> None:
    before = watched.value("router-0", "kvrelay_router_requests_total", outcome="invalid")
    with pytest.raises(Exception, match="max_tokens"):
        list(watched.scene.client.generate([1], max_tokens=10**9))
    assert watched.value("router-0", "kvrelay_router_requests_total", outcome="invalid") == before + 1
    running = watched.scene.begin("given up", count=2000)
    wait_until(lambda: running.tokens, "it runs", SECONDS)
    running.cancel()

    def counted() -> bool:
        return watched.value("router-0", "kvrelay_router_requests_total", outcome="cancelled") == 1

    wait_until(counted, "the cancellation is counted", SECONDS)
    watched.scene.settle(SECONDS)


@pytest.mark.more
def test_a_prometheus_that_scrapes_the_cluster_answers_every_query(watched: Watched, tmp_path: Path) -> None:
    for path in RULES.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("interval: 30s", "interval: 1s"))
    config = f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{tmp_path}/recording.yaml, {tmp_path}/alerts.yaml]
scrape_configs:
  - job_name: kvrelay
    http_sd_configs: [{{url: "http://{watched.supervisor}/targets", refresh_interval: 1s}}]
"""
    with prometheus(tmp_path, config) as server:
        wait_until(lambda: len(server.query("up == 1")) == len(watched.addresses), "all are scraped", SECONDS)
        expressions = [text for each in dashboards().values() for text in queries(each)]
        expressions += [rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule]
        empty = expressions

        def answered() -> bool:
            nonlocal empty
            watched.scene.ask_all([f"again {number} {len(empty)}" for number in range(3)])
            empty = [text for text in empty if not server.query(text)]
            return not empty

        wait_until(answered, lambda: f"no data for {empty}", 3 * SECONDS)
        firing = server.query('ALERTS{alertstate="firing"}')
        assert firing == [], firing
