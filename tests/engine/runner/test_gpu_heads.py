"""Hidden states and heads on the GPU's runner, on CPU tensors and with kernels interpreted, equal those on the CPU's.

Graphs are recorded and replayed.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gpu_scene
import pytest
import torch
from gpu_scene import gpu_runner, interpreted, names_of, prompt, requests_of

from kvrelay.engine.attention.base import CPU
from kvrelay.engine.build import engine_on, state_proposer
from kvrelay.engine.config import SpeculationConfig, SpeculationMethod
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepOutput
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import ModelRunner, Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.fetches import Fetches
from kvrelay.engine.runner.gpu import GpuRunner
from kvrelay.engine.sampling.guesses import GpuGuesses
from kvrelay.engine.sampling.sampler import Draw, guessing, sample
from kvrelay.engine.speculate.base import WARM_UP, Computed, Proposer
from kvrelay.engine.speculate.chains import read_chains
from kvrelay.kernels.ops import NONFINITE
from kvrelay.kernels.triton.sample import Workspace
from support.checkpoints import VOCAB_SIZE
from support.guesses import Recorded
from support.heads import handed_over, wanted_by
from support.launches import Launches, RecordedGraphs
from support.paged import GREEDY, PagedSequences, step
from support.serving import run

pytestmark = interpreted
OPTIONS = replace(gpu_scene.OPTIONS, max_sequences=8, graph_tokens=20)
SMALL = replace(OPTIONS, max_sequences=2, graph_tokens=16)
LAYERS = 2
KEEP = (0, 1, 2)


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def heads(heads_of: Callable[..., Path]) -> dict[SpeculationMethod, Path]:
    return {"medusa": heads_of("medusa"), "eagle3": heads_of("eagle3", eagle_aux_hidden_state_layer_ids=list(KEEP))}


def kept_by(runner: Runner, keep: tuple[int, ...]) -> list[StepOutput]:
    """The outputs of a chunk with a whole prompt, a decode row beside a chunk, and two decode rows."""
    sequences = PagedSequences(runner)
    first, second = sequences.add(prompt(9, 1), extra=4), sequences.add(prompt(16, 2), extra=4)
    counts = (9, 7), (1, 9), (1, 1)
    return [step(runner, [(first, one, GREEDY), (second, other, GREEDY)], keep=keep) for one, other in counts]


@pytest.fixture(scope="module")
def graphs() -> RecordedGraphs:
    return RecordedGraphs()


@pytest.fixture(scope="module")
def captured(model: Path, graphs: RecordedGraphs, small_blocks: None) -> GpuRunner:
    """A runner whose graphs keep the layers KEEP."""
    runner = gpu_runner(model, SMALL, graphs=graphs)
    runner.warm_up(KEEP)
    return runner


@pytest.mark.more
@pytest.mark.parametrize(("keep", "use_graphs"), [(KEEP, False), (KEEP, True), ((1,), True), ((), True)], ids=str)
def test_states_equal_the_cpus(
    model: Path, request: pytest.FixtureRequest, keep: tuple[int, ...], use_graphs: bool
) -> None:
    """States of chunks and of single tokens are compared. A plan that keeps other layers than the graphs uses no graph;
    one that keeps nothing can use any."""
    runner = request.getfixturevalue("captured") if use_graphs else gpu_runner(model, SMALL)
    expected = kept_by(build_cpu_runner(model, "float32", SMALL), keep)
    for out, true in zip(kept_by(runner, keep), expected, strict=True):
        assert out.tokens == true.tokens
        assert out.graph == (use_graphs and keep in (KEEP, ()))
        assert (out.states is None) == (true.states is None) == (keep == ())
        if out.states is not None:
            wrong = torch.linalg.vector_norm(out.states - true.states, dim=-1)
            assert (wrong <= 1e-5 * torch.linalg.vector_norm(true.states, dim=-1)).all()


@pytest.mark.more
def test_a_captured_step_copies_each_kept_layer_once(captured: GpuRunner, graphs: RecordedGraphs, model: Path) -> None:
    """A runner that keeps nothing launches no copy."""
    other = RecordedGraphs()
    gpu_runner(model, replace(SMALL, max_sequences=1, graph_tokens=0), graphs=other).warm_up()
    without, one_row = names_of(other.captured[-1]), names_of(graphs.captured[1])
    assert sorted(one_row) == sorted([*without, *["aten.copy_.default"] * len(KEEP)])
    assert "aten.copy_.default" not in without


def engine_with(runner: ModelRunner, folder: Path, method: SpeculationMethod, heads: Path) -> tuple[Engine, Recorded]:
    config = SpeculationConfig(method, str(heads), max_tokens=3, adaptive=False)
    options = replace(OPTIONS, speculation=config)
    engine = engine_on(runner, options, state_proposer(options, folder, runner))
    return engine, Recorded(engine)


def asked(count: int) -> list[Request]:
    """Drawn and greedy, the second one of several steps. With a step in flight, guesses begin at 32 or 64 tokens."""
    params = (
        SamplingParams(max_tokens=8, temperature=0.9, top_k=100, top_p=0.9, min_p=0.01, seed=2**63),
        SamplingParams(max_tokens=8, temperature=0.0),
    )
    return requests_of((31, params[0]), (63, params[1]))[:count]


def let_nothing_be_read(proposer: Proposer) -> None:
    """From now on, the proposer may not wait for single numbers of the device when it gets hidden states."""
    observe = proposer.observe

    def unread(computed: Sequence[Computed]) -> bool:
        with Launches(reads=False):
            return observe(computed)

    proposer.observe = unread


@pytest.mark.more
@pytest.mark.parametrize(
    ("method", "count", "handoff"),
    [
        ("medusa", 1, False),
        pytest.param("medusa", 2, True, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, False, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, True, marks=pytest.mark.slow),
    ],
)
def test_guesses_and_streams_equal_the_cpus(
    model: Path, heads: dict[SpeculationMethod, Path], method: SpeculationMethod, count: int, handoff: bool
) -> None:
    """Guesses follow prompts of one step and of several, in steps with other rows, and a step ahead; also where the
    prompts' states come from another worker."""
    requests = asked(count)

    def serve(engine: Engine) -> dict[str, list[int]]:
        return handed_over(engine, requests, wanted_by(engine)) if handoff else run(engine, requests)

    cpu = build_cpu_runner(model, "float32", OPTIONS)
    engine, expected = engine_with(cpu, model, method, heads[method])
    streams = serve(engine)
    assert run(engine_on(cpu, OPTIONS), requests) == streams
    engine, found = engine_with(gpu_runner(model, OPTIONS), model, method, heads[method])
    let_nothing_be_read(engine.scheduler.speculation.proposer)
    assert serve(engine) == streams
    assert_alike(found, expected, least=4 * count)


def assert_alike(found: Recorded, expected: Recorded, least: int) -> None:
    """The room for guesses differs, so those of one are the beginning of the other's."""
    pairs = [(found.guesses[place], expected.guesses[place]) for place in found.guesses.keys() & expected.guesses]
    pairs = [pair for pair in pairs if all(pair)]
    for ours, theirs in pairs:
        common = min(len(ours), len(theirs))
        assert ours[:common] == theirs[:common]
    assert len(pairs) >= least
    assert max(min(len(ours), len(theirs)) for ours, theirs in pairs) == 3


@pytest.mark.parametrize(("method", "most"), [("medusa", 10), ("eagle3", 25)])
def test_a_further_guess_has_few_launches_and_waits_for_none(
    model: Path, heads: dict[SpeculationMethod, Path], method: SpeculationMethod, most: int
) -> None:
    """The model has 16 bits, because logits in 32 bits need no cast."""
    runner = gpu_runner(model, OPTIONS, "float16")
    engine, _ = engine_with(runner, model, method, heads[method])
    proposer = engine.scheduler.speculation.proposer
    proposer.warm_up()
    counted = []
    for length in (1, 2):
        with Launches(reads=False) as launches:
            (guess,) = proposer.propose([WARM_UP._replace(most=length)])
        assert len(guess) == length
        counted.append(len(names_of(launches)))
    assert counted[1] - counted[0] <= most


def test_a_chain_is_planned_before_the_device_has_begun_it(model: Path, heads: dict[SpeculationMethod, Path]) -> None:
    """The passes overwrite nothing that an earlier pass is still to copy from the host."""
    runner = gpu_runner(model, OPTIONS)
    engine, _ = engine_with(runner, model, "eagle3", heads["eagle3"])
    proposer = engine.scheduler.speculation.proposer
    proposer.warm_up()
    with Launches() as launches:
        proposer.propose([WARM_UP._replace(most=3)])
    sources: dict[int, list[int]] = defaultdict(list)
    for launch in launches.all:
        if launch.name == "aten.copy_.default":
            target, source = launch.given[:2]
            sources[target.data_ptr()].append(source.data_ptr())
    assert max(map(len, sources.values())) == 3, "a copy for each pass"
    assert all(len(set(each)) == len(each) for each in sources.values())


@pytest.mark.parametrize("count", [5, 2])
def test_guesses_are_chosen_as_on_the_cpu(count: int) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=20, seed=3),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=2**64 - 1),
        SamplingParams(temperature=1.3, seed=5),
        SamplingParams(temperature=1.0),
    ]
    draws = [Draw(param, 40 + row, 0) for row, param in enumerate(params[:count])]
    logits = 4 * torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(count))
    logits[:, ::3] = -torch.inf
    logits[-1] = torch.nan
    guess = GpuGuesses(5, Workspace.empty(5, VOCAB_SIZE, "cpu"))
    # The second call repeats the launches of the first one.
    for _ in range(2):
        assert guess(logits, draws).tolist() == guessing(sample)(logits.clone(), draws).tolist()
    assert guess(logits, draws).tolist()[-1] == NONFINITE


def test_a_chain_ends_at_a_guess_that_is_not_finite() -> None:
    levels = [torch.tensor([1, 2, NONFINITE]), torch.tensor([4, NONFINITE, 5]), torch.tensor([6, 7])]
    assert read_chains(levels) == [[1, 4, 6], [2], []]


def test_states_are_fetched_in_order_and_are_copies() -> None:
    """The copies are made on another thread; a copy or a call that fails doesn't hide those behind it."""
    fetches, came, done = Fetches(CPU), [], threading.Event()
    states = torch.arange(24.0).view(4, 2, 3)
    fetches.fetch(states[1:3], (1,), torch.float16, came.append)
    fetches.fetch(torch.empty(2, 1, 3, device="meta"), (0,), torch.float32, came.append)
    fetches.fetch(states, (0,), torch.float32, lambda _: 1 / 0)
    fetches.fetch(states[3:], (0, 1), torch.float32, lambda copy: (came.append(copy), done.set()))
    assert done.wait(30)
    first, second = came
    assert first.is_contiguous()
    assert first.dtype == torch.float16
    assert first.tolist() == states[1:3, 1:].tolist()
    states.zero_()
    assert second.sum() > 0
