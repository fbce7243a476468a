"""The GPU's runner over several ranks, each in a process with CPU tensors: the tokens are those of one rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_scene import OPTIONS, greedy, interpreted, requests_of
from torch import Tensor
from torch.distributed import FileStore

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.process_group import GlooCollective
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.engine.runner.leading import LeadingRunner, follow
from support.forks import spawned
from support.launches import RecordedGraphs
from support.serving import run

pytestmark = interpreted
OPS: dict[str, GlooCollective] = {}
"""The group of this process."""


@torch.library.custom_op("kvrelay_tests::sum", mutates_args={"part"})
def sum_op(part: Tensor) -> None:
    OPS["group"].sum(part)


@torch.library.custom_op("kvrelay_tests::gather", mutates_args=())
def gather_op(part: Tensor) -> Tensor:
    return OPS["group"].gather(part)


class RecordedCollective:
    """A group whose calls are operations of torch, so that recorded graphs have them, as captured ones have NCCL's."""

    def __init__(self, path: Path, place: int, size: int) -> None:
        OPS["group"] = group = GlooCollective(FileStore(str(path), size), place, size, 60.0)
        self.place, self.size = place, size
        self.abort, self.check, self.ring, self.exchange = group.abort, group.check, group.ring, group.exchange

    def sum(self, part: Tensor) -> Tensor:
        sum_op(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        found: Tensor = gather_op(part)
        return found


def runner_of(folder: Path, options: EngineConfig, path: Path, rank: int, graphs: bool) -> GpuRunner:
    """One rank's runner, with graphs that are recorded if there are any."""
    group = RecordedCollective(path, rank, options.tensor_parallel)
    place = Place(Degree(options.tensor_parallel), rank, group, group)
    made = build_gpu_runner(folder, "float32", options, device="cpu", place=place)
    if not graphs:
        return made
    return GpuRunner(made.spec, made.model, made.cache_layout, made.pools, options, capture=RecordedGraphs())


def _follow(connection: Connection, *given: Any) -> None:
    torch.set_num_threads(1)
    runner = runner_of(*given)

    def receive() -> bytes | None:
        try:
            return connection.recv_bytes()
        except EOFError:
            return None

    follow(runner, receive, lambda: None, lambda step, writes: None)


class OtherRanks:
    """Implements `Ranks`."""

    def __init__(self, place: Place, connections: list[Connection]) -> None:
        self.place = place
        self._connections = connections

    def committed(self, step: int) -> None:
        """Nothing here asks for KV."""

    def send(self, message: bytes) -> None:
        for connection in self._connections:
            connection.send_bytes(message)


@contextmanager
def leading(folder: Path, options: EngineConfig, path: Path, graphs: bool = False) -> Iterator[LeadingRunner]:
    """Rank 0's runner of two."""
    options = replace(options, tensor_parallel=2)
    with spawned(_follow, folder, options, path, 1, graphs) as (_, connection):
        own = runner_of(folder, options, path, 0, graphs)
        yield LeadingRunner(own, OtherRanks(own.model.place, [connection]))


def check(folder: Path, path: Path, asked: list[Request], graphs: bool = False, **options: Any) -> None:
    given = replace(OPTIONS, **options)
    expected = run(engine_on(build_cpu_runner(folder, "float32", given), given), asked)
    with leading(folder, given, path, graphs) as runner:
        runner.warm_up()
        assert run(engine_on(runner, given), asked) == expected


MIXED = requests_of(
    (7, replace(greedy(5), min_tokens=4, stop_token_ids=frozenset({5, 9}))),
    (60, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=3)),
    (17, SamplingParams(max_tokens=3, temperature=0.7, top_k=20, min_p=0.01, seed=2**63)),
    # What shapes these is known to rank 0 only.
    (9, SamplingParams(max_tokens=5, seed=9, logit_bias=((5, 30.0), (326, 29.0)), logprobs=2)),
    (20, SamplingParams(max_tokens=5, seed=4, repetition_penalty=1.6, frequency_penalty=0.6, prompt_logprobs=1)),
)


# The parts of the vocabulary aren't equal, and end within a block; with one KV head, both ranks have it.
@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "kv_heads"), [("llama", 2), pytest.param("qwen3", 1, marks=pytest.mark.more)], ids=str
)
def test_two_ranks_serve_the_tokens_of_one(
    model_of: Callable[..., Path], tmp_path: Path, family: str, kv_heads: int
) -> None:
    """Chunked prompts, mixed steps, decode a step ahead; greedy, drawn and shaped rows, log-probabilities."""
    folder = model_of(family, num_hidden_layers=2, vocab_size=328, num_key_value_heads=kv_heads)
    check(folder, tmp_path / "store", MIXED)


@pytest.mark.more
@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_graphs_have_the_sums_and_gathers_of_their_steps(
    model_of: Callable[..., Path], tmp_path: Path, quantization: Any
) -> None:
    """Decode graphs and graphs in pieces; a replay meets the other rank's as often as the step would."""
    folder = model_of("llama", num_hidden_layers=1, vocab_size=328)
    asked = requests_of((5, greedy(4)), (9, SamplingParams(max_tokens=6, seed=1)), (30, greedy(3)))
    check(folder, tmp_path / "store", asked, graphs=True, graph_tokens=32, quantization=quantization)


def test_stages_on_a_gpu_are_refused(model_of: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel is 2; allowed: 1 on a GPU"):
        build_gpu_runner(model_of("llama"), "float32", OPTIONS, device="cpu", place=Place(Degree(1, 2)))


def test_a_degree_that_doesnt_divide_the_model_is_refused(model_of: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 3; allowed: 1, 2, 4, for 4 query heads and 2 KV heads"):
        build_gpu_runner(model_of("llama"), "float32", OPTIONS, device="cpu", place=Place(Degree(3)))
