"""Prefill and decode workers of several ranks, end to end: router, engines, plans to ranks, links between their ranks.

Their tokens and log-probabilities are those of an engine in one process, which other tests compare with transformers.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs  # type: ignore[import-untyped]  # it ships no types

from kvrelay.client import Client, Completion
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import Degree
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.scheduling.progress import Progress
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.processes import ProcessCluster, process_cluster
from support.serving import token_reports

LAYERS, HEADS, HEAD_DIM = 3, 8, 16
SHAPE = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": 64, "num_hidden_layers": LAYERS}
ENGINE: dict[str, Any] = {"block_size": 16, "max_batch_tokens": 64, "kv_memory_bytes": 4 * 2**20, "threads": 1}
LENGTHS = (1, 16, 33, 64, 150)
"""Prompts in tokens: blocks, and chunks of several steps, that are full or not."""
OUT = 10
TOP = 20
"""Tokens whose log-probabilities are compared at each step."""
CLOSE = 1e-4
"""Largest difference of log-probabilities. Tokens of which the likelier one is no more certain are a tie."""


class Case(NamedTuple):
    """A pair of workers, and their model."""

    kind: str
    kv_heads: int
    prefill: Degree
    decode: Degree

    def __str__(self) -> str:
        degrees = (f"{degree.tensor}x{degree.pipeline}" for degree in (self.prefill, self.decode))
        return f"{self.kind} with {self.kv_heads} KV heads, {' to '.join(degrees)}"


ARCHITECTURES = {"dense": "llama", "moe": "mixtral"}
KV_HEADS, TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4), (1, 2)
Values = tuple[Any, ...]
"""Kind, KV heads, and tensor and pipeline degree of the prefill and of the decode worker."""
FACTORS: list[list[Sequence[Any]]] = [[(kind,), KV_HEADS, *2 * (TENSOR, PIPELINE)] for kind in ARCHITECTURES]
"""The values that the cases of each kind are made of."""
ALL: list[Values] = [values for factors in FACTORS for values in product(*factors)]
FEW: list[Values] = [
    ("dense", 2, 2, 1, 4, 1),
    ("dense", 4, 2, 2, 1, 2),
    ("dense", 8, 1, 1, 2, 1),
    ("moe", 4, 2, 1, 1, 1),
]
"""Cases of `make test`: to more ranks, of which two hold a KV head, from stages to stages, from one rank and to one."""
COVERING = {tuple(values) for factors in FACTORS for values in AllPairs(factors)}
"""Cases of `make test-all`: each combination of any two values is in one of them."""


def marked(values: Values) -> Any:
    """The case as a parameter: of `make test`, `make test-all`, or `make test-slow`."""
    mark = () if values in FEW else pytest.mark.more if values in COVERING else pytest.mark.slow
    case = Case(*values[:2], Degree(*values[2:4]), Degree(*values[4:]))
    return pytest.param(case, marks=mark, id=str(case))


CASES = [marked(values).id for values in ALL]


class Road:
    """Clusters for the cases, one after the other: workers stay as long as the next case has the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, int], tuple[Path, Engine]] = {}
        self._stack = ExitStack()
        self._cluster: ProcessCluster | None = None
        self._case: Case | None = None
        """Case of the cluster; None while its workers are replaced."""

    def model(self, kind: str, kv_heads: int) -> tuple[Path, Engine]:
        """A checkpoint, and an engine in this process."""
        if (kind, kv_heads) not in self._models:
            folder = self._folder / f"{kind} {kv_heads}"
            make_checkpoint(folder, ARCHITECTURES[kind], num_key_value_heads=kv_heads, **SHAPE)
            self._models[kind, kv_heads] = folder, build_engine(folder, "float32", EngineConfig(**ENGINE))[0]
        return self._models[kind, kv_heads]

    def expected(self, case: Case, prompts: list[list[int]]) -> list[list[Progress]]:
        """Reports of one process for each token."""
        sampling = SamplingParams(temperature=0.0, max_tokens=OUT, logprobs=TOP)
        requests = [
            Request(str(number), 1, tuple(prompt), len(prompt), sampling) for number, prompt in enumerate(prompts)
        ]
        return list(token_reports(self.model(case.kind, case.kv_heads)[1], requests).values())

    def found(self, case: Case, prompts: list[list[int]]) -> list[Completion]:
        """Answers of the case's workers."""
        cluster = self._at(case)
        with Client(cluster.router) as client, ThreadPoolExecutor(len(prompts)) as pool:

            def complete(prompt: list[int]) -> Completion:
                return client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, logprobs=TOP, timeout=60)

            found = list(pool.map(complete, prompts))
        cluster.wait_idle()
        return found

    def _at(self, case: Case) -> ProcessCluster:
        """The cluster, with the workers of this case."""
        before, self._case = self._case, None
        engines = {
            role: {**ENGINE, "tensor_parallel": degree.tensor, "pipeline_parallel": degree.pipeline}
            for role, degree in (("prefill", case.prefill), ("decode", case.decode))
        }
        if self._cluster is None or before is None or before[:2] != case[:2]:
            self.close()
            options = {"transfer": {"transport": "gloo"}}
            roles = {role: {"engine": engine} for role, engine in engines.items()}
            model = self.model(case.kind, case.kv_heads)[0]
            started = process_cluster(self._folder / f"cluster of {case}", model, worker=options, roles=roles)
            self._cluster = self._stack.enter_context(started)
        else:
            for role, engine in engines.items():
                if getattr(before, role) != getattr(case, role):
                    self._cluster.processes[f"{role}-0"].terminate()
                    self._cluster.replace(f"{role}-0", engine=engine)
        self._case = case
        return self._cluster

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    road = Road(tmp_path_factory.mktemp("degrees"))
    yield road
    road.close()


@pytest.mark.parametrize("case", [marked(values) for values in ALL])
def test_ranks_answer_as_one_process_does(road: Road, case: Case) -> None:
    dice = random.Random(str(case))  # other prompts than those that workers have in their prefix caches
    prompts = [dice.choices(range(2, VOCAB_SIZE), k=length) for length in LENGTHS]
    prompts[LENGTHS.index(1)] = [2 + CASES.index(str(case))]  # drawn at random, it could be an earlier case's
    expected, found = road.expected(case, prompts), road.found(case, prompts)
    held = sum(
        len(case.decode.kv_heads(rank, case.kv_heads)) * len(case.decode.layers(rank, LAYERS))
        for rank in range(case.decode.ranks)
    )
    for prompt, mine, other in zip(prompts, found, expected, strict=True):
        compare(mine, other)
        assert mine.timeline is not None
        assert mine.timeline.transfer_bytes == len(prompt) * held * 2 * HEAD_DIM * 4, "every rank has got its part"


EXCHANGE = {"expert_exchange": "all_to_all"}
APART: dict[str, tuple[Case, dict[str, Any], dict[str, Any]]] = {
    "heads over two hosts": (Case("dense", 4, Degree(1), Degree(2)), {}, {"hosts": 2}),
    "a stage on each host": (Case("dense", 4, Degree(1, 2), Degree(2, 2)), {"hosts": 2}, {"hosts": 2}),
    # From ranks that send rows to the experts of others to more of them, with room for copies.
    "whole experts": (
        Case("moe", 4, Degree(2), Degree(4)),
        {"expert_parallel": 2, "spare_experts": 1, **EXCHANGE},
        {"expert_parallel": 4, **EXCHANGE},
    ),
}
"""Cases with further options of both engines. A host is an agent here, whose ranks share no memory with others."""


@pytest.mark.more
@pytest.mark.parametrize("name", APART)
def test_ranks_apart_answer_as_one_process_does(road: Road, tmp_path: Path, name: str) -> None:
    case, *options = APART[name]
    prompts = [random.Random(length).choices(range(2, VOCAB_SIZE), k=length) for length in LENGTHS]
    roles = {
        role: {"engine": {**ENGINE, "tensor_parallel": degree.tensor, "pipeline_parallel": degree.pipeline, **further}}
        for role, degree, further in zip(("prefill", "decode"), (case.prefill, case.decode), options, strict=True)
    }
    folder = road.model(case.kind, case.kv_heads)[0]
    with process_cluster(tmp_path, folder, roles=roles) as cluster, Client(cluster.router) as client:
        for prompt, other in zip(prompts, road.expected(case, prompts), strict=True):
            compare(client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, logprobs=TOP), other)


def compare(found: Completion, expected: list[Progress]) -> None:
    """Tokens and log-probabilities of both are the same; behind a tie, texts may differ."""
    assert len(found.token_ids) == len(found.logprobs) == len(expected) == OUT
    for token, mine, report in zip(found.token_ids, found.logprobs, expected, strict=True):
        other = report.logprobs
        assert other is not None
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=CLOSE)
        if token != report.token:
            likely = dict(zip(other.top_ids, other.top_logprobs, strict=True))
            assert other.top_logprobs[0] - likely[token] < CLOSE
            return
