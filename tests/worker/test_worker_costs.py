"""Costs that a worker measures, keeps and reports."""

import asyncio
import json
from pathlib import Path

import pytest

from kvrelay.costs.step import StepWork
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.internal.v1.worker_pb2 import Load, WorkerHello
from kvrelay.models import resolve
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.worker.first_costs import begin_costs, keep_costs
from kvrelay.worker.load import CostReports, kv_bytes
from kvrelay.worker.relay.stream import RelayStream

OPTIONS = EngineConfig(kv_memory_bytes=2**22, threads=1)


@pytest.fixture
def built() -> tuple[Engine, Runner]:
    return build_engine(resolve("pico"), "float32", OPTIONS.on("cpu"))


def file_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_worker_begins_with_measured_costs_and_the_next_one_with_those(
    built: tuple[Engine, Runner], tmp_path: Path
) -> None:
    engine, runner = built
    begin_costs(engine, runner, tmp_path)
    cost = engine.scheduler.fit.cost()
    assert cost is not None
    assert cost.seconds(StepWork(sequences=1, context_tokens=9)) > 0
    assert cost.prefill(256, 0, 512) >= cost.prefill(16, 0, 512) > 0
    # Nothing of it is left.
    engine.scheduler.check_integrity(idle=True)
    assert engine.scheduler.prefix.pool.cached == 0
    assert (engine.steps, engine.computed_tokens, engine.has_work) == (0, 0, False)
    again, other = build_engine(resolve("pico"), "float32", OPTIONS.on("cpu"))
    begin_costs(again, other, tmp_path)
    kept = again.scheduler.fit.cost()
    assert kept is not None
    assert kept.prefill(256, 0, 512) == pytest.approx(cost.prefill(256, 0, 512), rel=0.2)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"decode": [[1]], "prompt": []}', '{"decode": 7, "prompt": 8}'])
@pytest.mark.some(2)
def test_a_damaged_file_is_measured_anew(
    text: str, built: tuple[Engine, Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_costs(*built, tmp_path)
    path = file_in(tmp_path)
    path.write_text(text)
    begin_costs(*built, tmp_path)
    assert "kept costs are damaged" in caplog.text
    assert built[0].scheduler.fit.cost() is not None
    assert json.loads(path.read_text()).keys() == {"decode", "prompt"}


def test_bytes_follow_from_the_groups() -> None:
    full = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="float32")
    window = LayerGroup("window", (full,), window=32)
    kv = kv_bytes(CacheLayout((LayerGroup("full", (full,)), window), 16))
    assert (kv.token, kv.windows, kv.fixed) == (full.token_bytes, ((full.token_bytes, 32),), 0.0)


async def test_each_router_hears_of_costs_once_and_again_when_they_change(built: tuple[Engine, Runner]) -> None:
    engine, runner = built
    times = iter(range(100))
    reports = CostReports(engine, kv_bytes(runner.cache_layout), lambda: 10.0 * next(times))
    assert reports.now() is None, "nothing was computed"
    engine.scheduler.add(Request("r", 1, (5, 6, 7), 3, SamplingParams(max_tokens=2, temperature=0.0)))
    while engine.has_work:
        engine.step()
    told = reports.now()
    assert told is not None
    assert reports.now() is told, "nothing has changed"
    first, second = (RelayStream(name, Load, reports.now) for name in ("router-0", "router-1"))
    for stream in (first, second):
        messages = stream.messages()
        assert stream.first(WorkerHello()).load.costs == told, "also while the worker idles, and reports no other load"
        stream.submits_seen += 1
        stream.report()
        assert not (await asyncio.wait_for(anext(messages), 5)).load.HasField("costs")
    for size in (10, 2000) * 8:
        stats = TransferStats(1.0, 0.01 + 1e-6 * size, size, sender="prefill-0", exposed_nbytes=size)
        reports.received(stats)
    new = reports.now()
    assert new is not None
    assert new is not told
    (link,) = new.links
    assert link.worker == "prefill-0"
    assert link.fixed + 1000 * link.byte == pytest.approx(0.011, rel=0.05)
    errors = reports.errors()
    assert errors.keys() == {"decode", "prompt", "handoff"}
    assert 0 < errors["handoff"] < 1
