"""An engine over pipeline stages yields what one process yields, and its stages compute at the same time."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from kvrelay.engine.build import build_engine, build_rank
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.constrain.grammar import Constraint
from kvrelay.engine.degree import Degree
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.writes import RankWrites
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import warm_up_plan
from kvrelay.engine.runner.cpu import CpuRunner
from kvrelay.engine.runner.leading import follow
from kvrelay.engine.scheduling.progress import Progress
from support.guesses import Recorded
from support.rank_threads import on_ranks, places, shared_places
from support.serving import check_same, reports_of, tokens_of

WIDE = {"num_attention_heads": 8, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 5}
PROMPTS = [[token * 7 % 300 for token in range(first, first + count)] for first, count in ((1, 70), (5, 3), (9, 41))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=6),
    SamplingParams(
        temperature=0.0, max_tokens=7, min_tokens=5, repetition_penalty=1.3, logit_bias=((7, 3.0), (311, 3.0))
    ),
]


class ThreadRanks:
    """Implements `Ranks`: the other ranks of a worker follow on threads of this process."""

    def __init__(self, place: Place) -> None:
        """`place` is rank 0's."""
        self.place, others = place, range(1, place.degree.ranks)
        self._messages: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in others]
        self.errors: list[BaseException] = []
        self.writes = [RankWrites() for _ in others]
        self._threads: list[threading.Thread] = []

    def start(self, runners: Sequence[Any]) -> None:
        """The other ranks' runners begin to follow."""
        self._threads = [
            threading.Thread(target=self._follow, args=each)
            for each in zip(runners, self._messages, self.writes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def committed(self, step: int) -> None:
        """Nothing here asks for KV."""

    def send(self, message: bytes) -> None:
        for messages in self._messages:
            messages.put(message)

    def _follow(self, runner: CpuRunner, messages: "queue.SimpleQueue[bytes | None]", writes: RankWrites) -> None:
        try:
            follow(runner, messages.get, lambda: None, writes.launched)
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.errors.append(error)
            runner.model.place.abort()

    def close(self) -> None:
        for messages in self._messages:
            messages.put(None)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def options(degree: Degree, **changes: Any) -> EngineConfig:
    # Steps are the same however slow the machine is: none is bounded by time.
    given = {"kv_memory_bytes": 2**22, "threads": 1, "max_batch_tokens": 32, "max_sequences": 8, "step_seconds": 0}
    parallel = {"tensor_parallel": degree.tensor, "pipeline_parallel": degree.pipeline}
    return EngineConfig(**{**given, **parallel, **changes}).on("cpu")


@dataclass
class Scene:
    """A worker of several ranks on threads."""

    engine: Engine
    runners: list[CpuRunner]


@contextmanager
def worker(folder: Path, ranks: list[Place], **changes: Any) -> Iterator[Scene]:
    config, others = options(ranks[0].degree, **changes), ThreadRanks(ranks[0])

    def build(place: Place) -> Any:
        if place.rank:
            return build_rank(folder, "float32", config, place)
        return build_engine(folder, "float32", config, ranks=others)

    (engine, leading), *runners = on_ranks(ranks, build)
    others.start(runners)
    try:
        engine.warm_up()
        yield Scene(engine, [leading._own, *runners])
    finally:
        others.close()
    assert not others.errors


def asked(prompts: Sequence[Sequence[int]] = PROMPTS, params: Sequence[SamplingParams] = PARAMS) -> list[Request]:
    pairs = zip(prompts, params, strict=True)
    return [Request(str(number), 0, tuple(prompt), len(prompt), one) for number, (prompt, one) in enumerate(pairs)]


def one_process(folder: Path, requests: Sequence[Request], **changes: Any) -> dict[str, list[Progress]]:
    return reports_of(build_engine(folder, "float32", options(Degree(), **changes))[0], requests)


@pytest.mark.parametrize("degree", [Degree(1, 2), Degree(2, 2), Degree(1, 3)], ids=str)
@pytest.mark.parametrize("decoder", ["torch", "native", "native with shared memory"])
@pytest.mark.some(2)
def test_stages_yield_what_one_process_yields(
    model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, degree: Degree, decoder: str
) -> None:
    folder = model_of("llama", num_key_value_heads=4, **WIDE)
    if decoder == "torch":
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    expected = one_process(folder, asked())
    ranks = shared_places(degree.tensor, degree.pipeline) if "shared" in decoder else places(degree)
    with worker(folder, ranks) as scene:
        assert {isinstance(runner.model, NativeDecoder) for runner in scene.runners} == {decoder != "torch"}
        check_same(reports_of(scene.engine, asked()), expected)


class Thirds:
    """A constraint that allows the multiples of 3; implements `Grammar` and `Matcher`."""

    def matcher(self, tokens: Sequence[int]) -> "Thirds":
        return self

    def push(self, token: int) -> None:
        assert token % 3 == 0

    def ready(self, *, surely: bool = False) -> bool:
        return True

    def mask(self, seconds: float = 0.0) -> "np.ndarray[Any, np.dtype[np.int32]]":
        return np.packbits(np.arange(16384) % 3 == 0, bitorder="little").view(np.int32)

    def after(self, token: int) -> "Thirds | None":
        return self if token % 3 == 0 else None


@pytest.mark.parametrize("degree", [Degree(1, 2), Degree(2)], ids=str)
def test_rank_0_applies_masks(model_of: Callable[..., Path], degree: Degree) -> None:
    folder = model_of("llama", **WIDE)
    params = SamplingParams(temperature=0.0, max_tokens=8, constraint=Constraint("regex", "x"))
    requests = [replace(each, grammar=Thirds()) for each in asked(PROMPTS, [params] * 3)]
    config = read_config(folder)
    assert config.vocab_size <= 16384
    expected = one_process(folder, requests)
    assert all(token % 3 == 0 for tokens in tokens_of(expected).values() for token in tokens)
    with worker(folder, shared_places(degree.tensor, degree.pipeline)) as scene:
        check_same(reports_of(scene.engine, requests), expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"speculation": SpeculationConfig(method="ngram")}),
    ],
    ids=["windows", "int8", "guesses"],
)
def test_stages_of_other_models_and_options(
    model_of: Callable[..., Path], family: str, changes: dict[str, Any]
) -> None:
    folder = model_of(family)
    params = [SamplingParams(temperature=0.0, max_tokens=12)] * 3
    expected = one_process(folder, asked(PROMPTS, params), **changes)
    with worker(folder, shared_places(1, 2), **changes) as scene:
        check_same(reports_of(scene.engine, asked(PROMPTS, params)), expected)


def test_a_stage_computes_a_chunk_while_the_one_before_computes_the_next(
    model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, begun, met = 4, Counter[tuple[int, int]](), []
    changed = threading.Condition()

    def forward(stage: int, compute: Callable[..., Tensor], plan: StepPlan, **given: Any) -> Tensor:
        """Ends when the other stage has begun the step that it is to compute meanwhile."""
        other = (1, plan.step - 1) if stage == 0 else (0, plan.step + 1)
        with changed:
            begun[stage, plan.step] += 1
            changed.notify_all()
            if 0 <= other[1] < chunks:
                met.append(changed.wait_for(lambda: begun[other], timeout=20))
        return compute(plan, **given)

    with worker(model_of("llama", **WIDE), shared_places(1, 2)) as scene:
        for stage, runner in enumerate(scene.runners):
            monkeypatch.setattr(runner, "forward", partial(forward, stage, runner.forward))
        params = SamplingParams(temperature=0.0, max_tokens=1)
        reports_of(scene.engine, asked([list(range(1, 32 * chunks + 1))], [params]))
    assert met == [True] * 2 * (chunks - 1)


def test_sequences_that_decode_are_divided_among_the_stages(model_of: Callable[..., Path]) -> None:
    with worker(model_of("llama", **WIDE), shared_places(1, 2)) as scene:
        rows: list[int] = []
        scene.engine.on_step = lambda plan, out, seconds: rows.append(plan.num_rows) if plan.kind == "decode" else None
        params = SamplingParams(temperature=0.0, max_tokens=20)
        reports_of(scene.engine, asked([[1], [2], [3], [4]], [params] * 4))
    assert rows.count(2) > 30


def test_a_lost_stage_ends_the_others(model_of: Callable[..., Path]) -> None:
    folder, config = model_of("llama", **WIDE), options(Degree(1, 2))
    runners = on_ranks(shared_places(1, 2), lambda place: build_rank(folder, "float32", config, place))
    threading.Timer(0.2, runners[1].model.place.abort).start()
    with pytest.raises(CollectiveError, match="aborted"):
        runners[0].launch(warm_up_plan(runners[0].cache_layout, 0, 0, 8)).result()


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_guesses_from_all_layers_states_are_refused(method: Any) -> None:
    speculation = SpeculationConfig(method=method, draft_model="heads")
    with pytest.raises(
        ValueError, match=r"speculation\.method is '\w+'; allowed: off, ngram, suffix, draft, for a worker of several"
    ):
        EngineConfig(speculation=speculation, pipeline_parallel=2)


@pytest.mark.parametrize("decoder", ["torch", "native"])
@pytest.mark.parametrize("method", ["medusa", "eagle3"])
@pytest.mark.some(2)
def test_heads_of_rank_0_guess_as_those_of_one_process(
    model_of: Callable[..., Path],
    heads_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    method: Any,
    decoder: str,
) -> None:
    """Their guesses are the same, and so are the tokens; the ranks share one copy of nothing but the layers."""
    folder, heads = model_of("llama", num_hidden_layers=8), heads_of(method)
    if decoder == "torch":
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    changes = {"speculation": SpeculationConfig(method, str(heads), max_tokens=3, adaptive=False)}
    one = build_engine(folder, "float32", options(Degree(), **changes))[0]
    alone = Recorded(one)
    expected = reports_of(one, asked())
    with worker(folder, places(Degree(2)), **changes) as scene:
        found = Recorded(scene.engine)
        check_same(reports_of(scene.engine, asked()), expected)
    assert found.guesses == alone.guesses
    assert sum(map(len, found.guesses.values())) > 10
