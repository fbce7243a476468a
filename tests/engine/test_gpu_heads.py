"""Hidden states and heads on the GPU's runner, on CPU tensors and with kernels interpreted, equal those on the CPU's.

Graphs are recorded and replayed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.build import engine_on, state_proposer
from kvrelay.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepOutput
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import ModelRunner, Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from kvrelay.kernels import sample as sample_kernel
from support.checkpoints import COMMON, VOCAB_SIZE, make_checkpoint
from support.guesses import Recorded
from support.heads import eagle_config, eagle_tensors, handed_over, medusa_tensors, wanted_by, write_eagle, write_medusa
from support.launches import RecordedGraphs
from support.paged import GREEDY, PagedSequences, make_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
OPTIONS = EngineConfig(
    block_size=16, kv_memory_bytes=2**20, max_batch_tokens=48, max_sequences=8, graph_tokens=20, threads=1
)
SMALL = replace(OPTIONS, max_sequences=2, graph_tokens=16)
HIDDEN = COMMON["hidden_size"]
LAYERS = 2
KEEP = (0, 1, 2)
METHODS: tuple[SpeculationMethod, ...] = ("medusa", "eagle3")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the lanes of a block as well."""
    monkeypatch.setattr(sample_kernel, "SLICE", 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[SpeculationMethod, Path]:
    folder = tmp_path_factory.mktemp("heads")
    tensors = eagle_tensors(HIDDEN, VOCAB_SIZE, 200)
    config = eagle_config(tensors, VOCAB_SIZE) | {"eagle_aux_hidden_state_layer_ids": list(KEEP)}
    return {
        "medusa": write_medusa(folder / "medusa", medusa_tensors(3, 1, HIDDEN, VOCAB_SIZE)),
        "eagle3": write_eagle(folder / "eagle3", tensors, config),
    }


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple((7 * place + 11 * seed) % VOCAB_SIZE for place in range(length))


def kept_by(runner: Runner, keep: tuple[int, ...]) -> list[StepOutput]:
    """The outputs of a chunk with a whole prompt, a decode row beside a chunk, and two decode rows."""
    sequences = PagedSequences(runner)  # type: ignore[arg-type]  # it has what they need
    first, second = sequences.add(prompt(9, 1), extra=4), sequences.add(prompt(16, 2), extra=4)
    found = []
    for lengths in ((9, 7), (1, 9), (1, 1)):
        plan = make_plan([(first, lengths[0], GREEDY), (second, lengths[1], GREEDY)])
        out = runner.launch(replace(plan, keep=keep)).result()
        found.append(out)
        for sequence, length, token in zip((first, second), lengths, out.tokens, strict=True):
            sequence.computed += length
            if sequence.computed == len(sequence.tokens):
                assert token is not None
                sequence.tokens.append(token)
    return found


@pytest.fixture(scope="module")
def captured(model: Path) -> GpuRunner:
    """Its graphs keep the layers KEEP."""
    plain = build_gpu_runner(model, "float32", SMALL, device="cpu")
    runner = GpuRunner(plain.spec, plain.model, plain.pool, SMALL, capture=RecordedGraphs())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_kernel, "SLICE", 512)
        runner.warm_up(KEEP)
    return runner


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("keep", [KEEP, (1,), ()], ids=str)
def test_states_equal_the_cpus(
    model: Path, request: pytest.FixtureRequest, keep: tuple[int, ...], graphs: bool
) -> None:
    """Of chunks and of single tokens. Graphs that keep other layers aren't used; plans that keep nothing use all."""
    runner = request.getfixturevalue("captured") if graphs else build_gpu_runner(model, "float32", SMALL, device="cpu")
    expected = kept_by(build_cpu_runner(model, "float32", SMALL), keep)
    for out, true in zip(kept_by(runner, keep), expected, strict=True):
        assert out.tokens == true.tokens
        assert out.graph == (graphs and keep in (KEEP, ()))
        assert (out.states is None) == (true.states is None) == (keep == ())
        if out.states is not None:
            torch.testing.assert_close(out.states, true.states, atol=2e-5, rtol=1e-4)


def engine_with(runner: ModelRunner, folder: Path, method: SpeculationMethod, heads: Path) -> tuple[Engine, Recorded]:
    config = SpeculationConfig(method, str(heads), max_tokens=3, adaptive=False)
    options = replace(OPTIONS, speculation=config)
    engine = engine_on(runner, options, state_proposer(options, folder, runner))
    return engine, Recorded(engine)


def asked() -> list[Request]:
    """Greedy and drawn, one of several steps. With a step in flight, the first guess comes behind 32 or 64 tokens."""
    params = (
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, temperature=0.9, top_k=100, top_p=0.9, min_p=0.01, seed=2**63),
    )
    prompts = [prompt(length, length) for length in (31, 63)]
    return [Request(str(index), 1, tokens, len(tokens), params[index]) for index, tokens in enumerate(prompts)]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.scheduler.add(request)
    heard: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            if report.token is not None:
                heard[report.sequence.request.request_id].append(report.token)
    engine.scheduler.check_integrity(idle=True)
    return heard


@pytest.mark.parametrize("handoff", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "hand-off"])
@pytest.mark.parametrize("method", METHODS)
def test_guesses_and_streams_equal_the_cpus(
    model: Path, heads: dict[SpeculationMethod, Path], method: SpeculationMethod, handoff: bool
) -> None:
    """Behind prompts of one step and of several, in steps with other rows, and a step ahead; also where the prompts'
    states come from another worker.
    """

    def serve(engine: Engine) -> dict[str, list[int]]:
        return handed_over(engine, asked(), wanted_by(engine)) if handoff else run(engine, asked())

    cpu = build_cpu_runner(model, "float32", OPTIONS)
    engine, expected = engine_with(cpu, model, method, heads[method])
    streams = serve(engine)
    assert run(engine_on(cpu, OPTIONS), asked()) == streams
    engine, found = engine_with(build_gpu_runner(model, "float32", OPTIONS, device="cpu"), model, method, heads[method])
    assert serve(engine) == streams
    assert_alike(found, expected)


def assert_alike(found: Recorded, expected: Recorded) -> None:
    """The room for guesses differs, so those of one are the beginning of the other's."""
    pairs = [(found.guesses[place], expected.guesses[place]) for place in found.guesses.keys() & expected.guesses]
    pairs = [pair for pair in pairs if all(pair)]
    for ours, theirs in pairs:
        common = min(len(ours), len(theirs))
        assert ours[:common] == theirs[:common]
    assert len(pairs) > 8
    assert max(min(len(ours), len(theirs)) for ours, theirs in pairs) == 3
