"""A cluster's configuration: a line for each mistake, defaults that fit one machine, the options of each process."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.cluster.config.file import Override, dump, load
from kvrelay.cluster.config.options import MEMBER, ClusterConfig, schema
from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.engine.config import EngineConfig
from kvrelay.router.config import RouterConfig, ServiceClass
from kvrelay.rpc.identity import WORKER_ROLES
from kvrelay.worker.config import WorkerConfig

JOINED = {"ray": {"address": "auto"}}
"""A Ray cluster that others started."""


def worker_configs(config: ClusterConfig) -> list[WorkerConfig]:
    """The options of each worker that the cluster begins with."""
    return [config.worker_config(name, role) for name, role in config.members().items() if role != "router"]


def mistakes(tmp_path: Path, text: str, overrides: dict[str, Override] | None = None) -> list[str]:
    """The error lines of `load` for a file, without the file's name."""
    path = tmp_path / "kvrelay.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(path, overrides)
    assert caught.value.code == 2
    return [line.removeprefix(f"{path}: ") for line in caught.value.lines]


MISTAKES = {
    "prefill: {engine: {blocksize: 8}}": "prefill.engine.blocksize: unknown key; did you mean block_size?",
    "grpc_port: 1": "grpc_port: unknown key; did you mean router.grpc_port?",
    "scaling: {ttft_target_seconds: 0.5}": (
        "scaling.ttft_target_seconds is 0.5; allowed: router.classes.interactive.ttft_target_seconds in its place"
    ),
    "scaling: {tpot_target_seconds: 0.5}": (
        "scaling.tpot_target_seconds is 0.5; allowed: router.classes.interactive.tpot_target_seconds in its place"
    ),
    "model: {trust_remote_code: true}": (
        "model.trust_remote_code is True; allowed: false; kvrelay runs no code that comes with a model, only "
        "architectures that it has itself"
    ),
    "heartbeat: {zzz: 1}": (
        "heartbeat.zzz: unknown key; allowed: suspect_seconds, dead_seconds, step_suspect_seconds, step_dead_seconds"
    ),
    "decode: {engine: {block_size: 9}}": (
        "decode.engine.block_size is 9; allowed: auto, or a power of two from 8 to 128"
    ),
    "engine: {kv_memory_bytes: 8 EiBs}": (
        "engine.kv_memory_bytes is '8 EiBs'; allowed: auto, 1 or more bytes, or text such as 8GiB"
    ),
    "engine: {max_batch_tokens: 64, block_size: 128}": (
        "engine.max_batch_tokens is 64; allowed: at least block_size (128)"
    ),
    "prefill: {gpus: 8}": "prefill.gpus is 8; allowed: auto, or 0 to 1: each rank of a worker computes on one GPU",
    "ray: {gpus: 3}": (
        "ray.gpus is 3; allowed: auto, or at most 2, the number of workers' ranks: each computes on one GPU"
    ),
    "decode: {gpus: 0, engine: {device: cuda}}": (
        "decode.engine.device is 'cuda'; allowed: auto or cpu for workers without a GPU (gpus is 0)"
    ),
    "transfer: {gpu_buffer_bytes: 1000}": (
        "transfer.gpu_buffer_bytes is 1000; allowed: 134217728 (two of gpu_frame_bytes) or more"
    ),
    "model: {dtype: int3}": "model.dtype is 'int3'; allowed: 'auto', 'float32', 'bfloat16' or 'float16'",
    "prefill: {cpus: .nan}": "prefill.cpus is nan; allowed: a finite number",
    "prefill: {replicas: 0}": "prefill.replicas is 0; allowed: at least 1, unless colocated.replicas is",
    "engine: 5": "engine is 5; allowed: a mapping of keys to values",
    "heartbeat: {dead_seconds: 1}": "heartbeat.dead_seconds is 1.0; allowed: at least suspect_seconds (1.5)",
    "ray: {namespace: ''}": "ray.namespace is ''; allowed: at least 1 character",
    "ray: {address: host}": "ray.address is 'host'; allowed: local, auto or HOST:PORT",
    "engine: [": "expected the node content, but found '<stream end>'",
    "router: {replicas: 2, grpc_port: 65535}": "router.grpc_port is 65535; allowed: up to 65534 for 2 routers",
    "router: {replicas: 2, port_step: 0, http_port: 0}": (
        "router.port_step is 0; allowed: 1 or more, since the routers would share ports that are not chosen"
    ),
    "router: {replicas: 3, grpc_port: 8004, http_port: 8000, port_step: 2}": (
        "router.http_port is 8000; allowed: another one: 3 routers would have the ports 8004 to 8008 for gRPC "
        "and 8000 to 8004 for HTTP"
    ),
}
"""What a configuration that can't be used is refused with, by its text."""


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(tmp_path: Path, text: str) -> None:
    assert mistakes(tmp_path, text) == [f"line 1: {MISTAKES[text]}"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "router:\n  classes:\n    chat: {wieght: 2}\n\n    # one that is none\n    batch:\n      zzz: 2",
            [
                "line 3: router.classes.chat.wieght: unknown key; did you mean weight?",
                "line 7: router.classes.batch.zzz: unknown key; allowed: priority, weight, ttft_target_seconds, "
                "tpot_target_seconds, first_token_timeout_seconds",
            ],
        ),
        (
            "colocated: {replicas: 1}\nprefill: {replicas: 1}",
            ["decode.replicas is 0; allowed: at least 1 with prefill workers, which hand their KV over to decode "],
        ),
        ("ray: {address: auto}\ndecode: {cpus: 0}", ["line 2: decode.cpus is 0.0; allowed: more than 0, unless gpus "]),
        ("- a\n- b", ["holds a list; allowed: a mapping of sections"]),
        ("engine: {}\nengine: {}", ["line 2: key 'engine' is given twice"]),
        ("model:\n  path: 2024-13-45", ["line 2: 2024-13-45: month must be in 1..12"]),
        ("engine: {threads: 0x_}", ["line 1: 0x_: invalid literal for int()"]),
        ("engine: " + "[" * 5000, ["not YAML: it is nested too deeply"]),
        ("model: {dtype: x}\nprefill: {replicas: -1}\nengines: {}", ["line 1: ", "line 2: ", "line 3: "]),
        ("ray:\n  topology_labels:\n    - a\n    - 3", ["line 4: ray.topology_labels.1 is 3; allowed: a valid string"]),
        (
            "prefill: &same\n  replicas: 1\n  gpus: 8\ndecode:\n  <<: *same\n  gpus: 9",
            [
                f"line {line}: {role}.gpus is {gpus}; allowed: "
                for line, role, gpus in ((3, "prefill", 8), (6, "decode", 9))
            ],
        ),
    ],
)
def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path, text: str, lines: list[str]) -> None:
    found = mistakes(tmp_path, text)
    assert all(one.startswith(line) for one, line in zip(found, lines, strict=True)), found


def test_a_key_that_is_misspelled_anywhere_is_told_with_its_line_and_what_is_allowed(tmp_path: Path) -> None:
    lines = dump(ClusterConfig.model_validate({"router": {"classes": {"chat": {}}}})).splitlines()
    keys = {
        index: len(line) - len(line.lstrip())
        for index, line in enumerate(lines)
        if re.fullmatch(r" *[a-z_]+:.*", line) and "chat:" not in line
    }
    assert len(keys) > 100
    for depth in set(keys.values()):  # what is below a misspelled key isn't looked at
        wrong = [line.replace(":", "_zz:", 1) if keys.get(at) == depth else line for at, line in enumerate(lines)]
        found = [line for line in mistakes(tmp_path, "\n".join(wrong)) if "unknown key" in line]
        pattern = re.compile(r"line (\d+): [\w.]+_zz: unknown key; (?:did you mean|allowed:) .+")
        told = [pattern.fullmatch(line) for line in found]
        assert all(told), found
        assert sorted(int(each[1]) - 1 for each in told if each) == [at for at in keys if keys[at] == depth]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            load(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff")
    with pytest.raises(UsageError, match=r"byte 7 is not UTF-8"):
        load(binary)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, f"model: {{dtype: {'x' * 10_000}}}")
    assert len(line) < 200


def test_the_command_line_wins_over_the_file_and_its_mistakes_name_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("prefill: {replicas: 3, threads: 2}\nrouter: {grpc_port: 1}\n")
    config = load(path, {"prefill.replicas": Override("--prefill", 2), "router.grpc_port": Override("--grpc-port", 0)})
    assert config.prefill.replicas == 2
    assert config.prefill.threads == 2
    assert config.router.grpc_port == 0
    for key, flag, value in (("router.grpc_port", "--grpc-port", 70000), ("decode.replicas", "--decode", 0)):
        (line,) = mistakes(tmp_path, "", {key: Override(flag, value)})
        assert line.startswith(f"{flag} is {value}; allowed: ")


def test_sections_that_are_empty_are_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("engine:\nprefill:\n")
    assert load(path) == load()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"prefill": 1, "decode": 1, "colocated": 0}),
        ({"decode": {"replicas": 2}}, {"prefill": 1, "decode": 2, "colocated": 0}),
        ({"colocated": {"replicas": 2}}, {"prefill": 0, "decode": 0, "colocated": 2}),
        ({"colocated": {"replicas": 0}}, {"prefill": 1, "decode": 1, "colocated": 0}),
        (
            {"colocated": {"replicas": 1}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}},
            {"prefill": 1, "decode": 1, "colocated": 1},
        ),
    ],
)
def test_default_numbers_of_workers(given: dict[str, Any], expected: dict[str, int]) -> None:
    config = ClusterConfig.model_validate(given)
    assert {role: getattr(config, role).replicas for role in expected} == expected


def test_workers_get_the_options_of_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cluster.config.options.available_cores", lambda: 9)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "/m", "dtype": "float32"},
            "engine": {"block_size": 32, "max_sequences": 7},
            "transfer": {"lease_seconds": 2},
            "prefill": {"replicas": 2, "engine": {"kv_memory_bytes": 1000, "max_batch_tokens": 64}},
            "decode": {"threads": 5},
            "router": {"classes": {"interactive": {"ttft_target_seconds": 0.4}}},
            "scaling": {"enabled": True},
        }
    )
    workers = {worker.name: worker for worker in worker_configs(config)}
    assert list(workers) == ["worker-0", "worker-1", "worker-2"]
    assert [worker.role for worker in workers.values()] == ["prefill", "prefill", "decode"]
    for worker in workers.values():
        assert (worker.model, worker.dtype) == ("/m", "float32")
        assert (worker.engine.block_size, worker.engine.max_sequences) == (32, 7)
        assert worker.transfer.lease_seconds == 2
    assert workers["worker-1"].engine.kv_memory_bytes == 1000
    assert workers["worker-2"].engine.kv_memory_bytes == EngineConfig().kv_memory_bytes
    assert [worker.engine.threads for worker in workers.values()] == [3, 3, 5]
    classes = {"interactive": ServiceClass(ttft_target_seconds=0.4)}
    assert config.router_configs() == [RouterConfig(model="/m", classes=classes)]
    assert config.scaling_config() == ScalingConfig(enabled=True, ttft_target_seconds=0.4, tpot_target_seconds=0.1)


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 2**33), ("1.5 MiB", 3 * 2**19), ("8GB", 8 * 10**9), ("4096", 4096), ("auto", 0)]
)
def test_memory_is_given_in_bytes_or_as_text_or_left_to_the_worker(tmp_path: Path, text: str, size: int) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text(f"engine: {{kv_memory_bytes: {text}}}\ndecode: {{engine: {{kv_memory_bytes: {text}}}}}\n")
    config = load(path)
    assert [worker.engine.kv_memory_bytes for worker in worker_configs(config)] == [size, size]
    path.write_text(dump(config))
    assert load(path) == config


ON_CPU = {"engine": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("present", "given", "gpus", "parts"),
    [
        (0, {}, (0, 0), [0.5, 0.5]),
        (0, {"decode": {"replicas": 3}}, (0, 0), [0.25] * 4),
        (0, {"engine": {"memory_part": 0.2}}, (0, 0), [0.2, 0.2]),
        (1, {}, (0.5, 0.5), [0.5, 0.5]),
        (1, {"prefill": {"gpus": 0.5}, "decode": {"gpus": 0.5}}, (0.5, 0.5), [0.5, 0.5]),
        (1, {"decode": {"replicas": 2}}, (0.3333, 0.3333), [0.3333] * 3),
        (1, {"prefill": {"gpus": 1}}, (1, 0), [1.0, 1.0]),
        (1, {"prefill": {"gpus": 1}, "decode": {"replicas": 2}}, (1, 0), [1.0, 0.5, 0.5]),
        (1, {"prefill": ON_CPU}, (0, 1), [1.0, 1.0]),
        (2, {}, (1, 1), [1.0, 1.0]),
        (2, {"ray": {"gpus": 1}}, (0.5, 0.5), [0.5, 0.5]),
        (2, {"ray": {"gpus": 0}}, (0, 0), [0.5, 0.5]),
        (2, {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}, (1, 1), [1.0, 1.0]),
        (2, {"prefill": {"gpus": 1, **ON_CPU}, "decode": {"gpus": 1}}, (1, 1), [1.0, 1.0]),
        (8, {}, (1, 1), [1.0, 1.0]),
        (8, {"prefill": {"replicas": 2}, "decode": {"replicas": 8}}, (0.5, 0.5), [0.5] * 10),
        (0, JOINED, (0, 0), [0, 0]),  # each by the CPUs that it gets of its node
    ],
)
def test_gpus_and_memory_of_a_machine_are_shared_out(
    present: float, given: dict[str, Any], gpus: tuple[float, float], parts: list[float]
) -> None:
    """Each worker reserves its part of the GPUs, and one without computes on the CPU: Ray hides no GPU from it.

    One that is added later has what those of its role have, also by the configuration as the record has it.
    """
    fitted = ClusterConfig.model_validate(given).with_gpus(present)
    config = ClusterConfig.model_validate_json(fitted.model_dump_json())
    assert config == fitted
    assert (config.prefill.gpus, config.decode.gpus) == gpus
    assert config.total_resources().get("GPU", 0.0) <= present
    workers = worker_configs(config)
    assert [worker.engine.memory_part for worker in workers] == parts
    for worker in workers:
        reserved = config.bundle(worker.role).get("GPU", 0.0)
        assert reserved == config.role(worker.role).gpus
        on_cpu = reserved == 0 or "engine" in given.get(worker.role, {})
        assert worker.engine.device == ("cpu" if on_cpu else "auto")
        assert config.startable(worker.role, 4) == ""
        assert config.worker_config("worker-9", worker.role).engine == worker.engine
    if gpus[0] == gpus[1] and "engine" not in given.get("prefill", {}):
        # A role that no worker has at the start gets what the others have.
        engine = config.worker_config("worker-9", "colocated").engine
        assert (engine.device, engine.memory_part) == (workers[0].engine.device, parts[0])
        assert config.bundle("colocated").get("GPU", 0.0) == gpus[0]


@pytest.mark.parametrize("given", [{"prefill": {"gpus": 1}}, {"ray": {"gpus": 1}}, {"decode": {"gpus": 0.5}}])
def test_gpus_that_are_not_there_are_refused_on_this_machine_only(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gpus of all workers together are (1|0\.5); allowed: at most 0"):
        ClusterConfig.model_validate(given).with_gpus(0)
    joined = ClusterConfig.model_validate({**given, "ray": {**given.get("ray", {}), "address": "auto"}})
    assert joined.with_gpus(0).total_resources()["GPU"] > 0


def test_a_worker_can_be_added_on_cpus_but_not_without_the_gpu_that_it_asks_for() -> None:
    given: dict[str, Any] = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}, "colocated": {"gpus": 0}}
    engine = ClusterConfig.model_validate(given).with_gpus(2).worker_config("worker-9", "colocated").engine
    assert (engine.device, engine.memory_part) == ("cpu", 1.0)
    gpu = {"gpus": 1, "engine": {"device": "cuda"}}
    given = {"prefill": gpu, "decode": gpu, "colocated": {"gpus": 0, "engine": {"device": "cuda"}}}
    config = ClusterConfig.model_validate(given).with_gpus(2)
    assert config.startable("decode", 2) == ""
    assert "colocated.engine.device is 'cuda'; allowed: auto or cpu" in config.startable("colocated", 2)


def test_processes_on_one_machine_have_ports_of_their_own() -> None:
    ports = {"worker_port": 9400, "router_port": 9500}
    given = {"colocated": {"replicas": 1}, "metrics": ports, "router": {"port_step": 0}}
    here = ClusterConfig.model_validate(given)
    joined = ClusterConfig.model_validate({**given, **JOINED})
    assert here.startable("colocated", 0) == here.startable("router", 0) == ""
    assert here.startable("decode", 1) == (
        "metrics.worker_port is 9400; allowed: 0 or null, since 2 processes on one machine would share it"
    )
    assert "metrics.router_port is 9500; allowed: 0 or null" in here.startable("router", 1)
    last, next_ones = (
        ClusterConfig.model_validate({"router": {"grpc_port": 8001, "http_port": port}}) for port in (65534, 8000)
    )
    assert last.startable("router", 1) == next_ones.startable("router", 0) == ""
    assert last.startable("router", 2) == "router.http_port is 65534; allowed: up to 65533 for 3 routers"
    assert "router.http_port is 8000; allowed: another one" in next_ones.startable("router", 1)
    assert joined.startable("decode", 1) == joined.startable("router", 1) == ""
    assert here.cycled() == {*WORKER_ROLES, "router"}, "a successor would find the port in use"
    assert joined.cycled() == {"router"}


@pytest.mark.parametrize(
    ("section", "ports"),
    [
        ({}, [50051]),
        ({"replicas": 3}, [50051, 50052, 50053]),
        ({"replicas": 2, "grpc_port": 7000, "port_step": 10}, [7000, 7010]),
        ({"replicas": 2, "grpc_port": 0}, [0, 0]),
        ({"replicas": 2, "port_step": 0}, [50051, 50051]),
    ],
)
def test_routers_differ_by_name_and_port(section: dict[str, Any], ports: list[int]) -> None:
    config = ClusterConfig.model_validate({"router": section, **JOINED, "drain_seconds": 7})
    routers = config.router_configs()
    assert [router.grpc_port for router in routers] == ports
    assert [router.name for router in routers] == [f"router-{index}" for index in range(len(ports))]
    assert {router.drain_seconds for router in routers} == {7}
    assert config.total_resources()["CPU"] == 2 + len(ports)


def test_routers_on_one_machine_share_their_ports_or_have_their_own() -> None:
    for step, ports, shared in ((0, [(7000, 8000)] * 2, True), (10, [(7000, 8000), (7010, 8010)], False)):
        section = {"replicas": 2, "port_step": step, "grpc_port": 7000, "http_port": 8000, "classes": {"chat": {}}}
        routers = ClusterConfig.model_validate({"router": section}).router_configs()
        assert [(router.grpc_port, router.http_port) for router in routers] == ports
        assert {router.share_port for router in routers} == {shared}
        assert routers[0].classes == {"chat": ServiceClass()}


@pytest.mark.parametrize(
    ("cores", "given", "threads"),
    [
        (2, {"colocated": {"replicas": 1}}, [2]),
        (2, {"colocated": {"replicas": 2}}, [1, 1]),
        (2, {"colocated": {"replicas": 5}}, [1] * 5),
        (64, {"colocated": {"replicas": 3}}, [21] * 3),
        (64, {**JOINED, "prefill": {"cpus": 3.5}, "decode": {"cpus": 0, "resources": {"big": 1}}}, [3, 1]),
    ],
)
def test_workers_share_the_machines_cores_or_take_the_cpus_that_they_reserve(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, Any], threads: list[int]
) -> None:
    monkeypatch.setattr("kvrelay.cluster.config.options.available_cores", lambda: cores)
    workers = worker_configs(ClusterConfig.model_validate(given))
    assert [worker.engine.threads for worker in workers] == threads


def test_resources_are_what_the_sections_reserve() -> None:
    prefill = {"replicas": 2, "cpus": 4, "gpus": 1, "resources": {"big": 0.5}}
    config = ClusterConfig.model_validate({"prefill": prefill, "decode": {"cpus": 2}, **JOINED})
    assert config.bundle("prefill") == {"CPU": 4, "GPU": 1, "big": 0.5}
    assert config.bundle("decode") == {"CPU": 2}
    assert config.bundle("router") == {"CPU": 1}
    assert config.total_resources() == {"CPU": 11, "GPU": 2, "big": 1}


def test_ranks_that_fit_no_node_take_as_few_hosts_as_hold_them_unless_an_option_says_how_many() -> None:
    degree = {"tensor_parallel": 8}
    decode = {"gpus": 1, "cpus": 4, "resources": {"big": 1}, "engine": degree}
    for engine, others, largest, hosts in (
        ({}, {}, 8, 1),
        ({}, {}, 4, 2),
        ({}, {}, 3, 4),
        ({}, {}, 0, 1),
        ({"hosts": 1}, {}, 4, 1),
        ({"hosts": 8}, {}, 4, 8),
        ({}, {"transfer": {"encrypt": "integrity"}}, 4, 1),
        ({}, {"ray": {"address": "auto", "autoscaling": True}}, 4, 1),
    ):
        given = {**JOINED, "decode": {**decode, "engine": degree | engine}, **others}
        config = ClusterConfig.model_validate(given).with_gpus(16, largest)
        assert config.hosts("decode") == config.worker_config("worker-9", "decode").engine.hosts == hosts
        assert config.bundle("decode") == {"CPU": 4, "GPU": 8 / hosts, "big": 1}, "on each host"
        assert ClusterConfig.model_validate_json(config.model_dump_json()) == config


def test_on_one_machine_only_gpus_limit_the_members() -> None:
    section = {"cpus": 64, "gpus": 0.5, "resources": {"big": 1}}
    config = ClusterConfig.model_validate({"prefill": section, "decode": section, "router": {"cpus": 8}})
    assert config.bundle("prefill") == {MEMBER: 1, "GPU": 0.5}
    assert config.bundle("router") == {MEMBER: 1}


def test_a_dumped_configuration_loads_as_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("prefill: {replicas: 2, engine: {block_size: 64}, resources: {a: 1}}\nray: {address: auto}\n")
    config = load(path)
    path.write_text(dump(config))
    assert load(path) == config
    assert yaml.safe_load(dump(load())).keys() == ClusterConfig.model_fields.keys()


def test_every_key_is_documented() -> None:
    document = schema()
    sections = [document, *document["$defs"].values()]
    for section in sections:
        for key, field in section["properties"].items():
            assert field.get("description") or "$ref" in field, key
