"""The engine's loop on the hash model: right tokens, alone or handed over, whatever the runner does."""

import gc
import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hash_scene import SAMPLINGS, hash_engine, request
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import CacheDtype, EngineConfig
from kvrelay.engine.constrain.grammar import Constraint, MaskNotReadyError
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.engine.kv.sides import side_blocks
from kvrelay.engine.kv.writes import KVWrites
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.engine.sequence import Sequence as EngineSequence
from support.hash_runner import (
    GREEDY,
    LAYOUT,
    STATE,
    VOCAB_SIZE,
    HashRunner,
    expected_tokens,
    hash_spec,
    kv_bytes,
    window_of,
)
from support.heads import handed_over
from support.paged import PagedSequence, make_plan
from support.serving import reports_of, run, tokens_of


def check_idle(*engines: Engine) -> None:
    for engine in engines:
        assert not engine.has_work
        engine.scheduler.check_integrity(idle=True)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=50).map(tuple)
asked_of = st.tuples(prompts, st.sampled_from(SAMPLINGS), st.integers(1, 20))
Asked = tuple[tuple[int, ...], SamplingParams, int]


def expected_of(tokens: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> list[int]:
    return expected_tokens(tokens, max_tokens, sampling=sampling)


def served(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """The tokens of each request; each log-probability that was asked for comes once."""
    heard = reports_of(engine, requests)
    for asked in requests:
        scored = 1
        for report in heard[asked.request_id]:
            assert (report.logprobs is not None) == (report.token is not None and asked.sampling.logprobs is not None)
            if report.prompt_logprobs:
                assert report.prompt_first == scored
                scored += len(report.prompt_logprobs)
            if report.token is not None and asked.sampling.prompt_logprobs is not None:
                assert scored == asked.prompt_tokens
    return tokens_of(heard)


def reports_until_idle(engine: Engine) -> list[Progress]:
    reports: list[Progress] = []
    while engine.has_work:
        reports += engine.step()
    check_idle(engine)
    return reports


@settings(max_examples=25, deadline=None)
@given(batch=st.lists(asked_of, max_size=8), prefix_cache=st.booleans(), ahead=st.booleans())
def test_every_request_gets_its_tokens(batch: list[Asked], prefix_cache: bool, ahead: bool) -> None:
    """Preempted requests are among them; their tokens depend on earlier ones through more than the model."""
    requests = [request(str(number), *asked) for number, asked in enumerate(batch)]
    heard = served(hash_engine(blocks=14, max_sequences=4, prefix_cache=prefix_cache, lag=ahead), requests)
    assert heard == {str(number): expected_of(*asked) for number, asked in enumerate(batch)}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_runs_by_itself_is_reported_before_its_kv_is_there(ahead: bool) -> None:
    """The report says once how far each sequence reaches; the KV is there when the step's tokens are."""
    engine = hash_engine(blocks=64, lag=ahead)
    reached: dict[str, list[int]] = {"0": [], "1": []}
    steps: list[KVWrites] = []

    def on_launch(sequences: list[EngineSequence], written: KVWrites) -> None:
        assert not written.ended
        steps.append(written)
        for sequence in sequences:
            reached[sequence.request.request_id].append(sequence.reach)

    engine.on_launch = on_launch
    for name, length in (("0", 75), ("1", 9)):
        engine.scheduler.add(request(name, range(length), max_tokens=3), handoff=name == "0")
    while engine.has_work:
        for report in engine.step():
            if report.hold is not None:
                report.hold.release()
    assert reached == ({"0": [32, 64, 75], "1": [9, 10, 11]} if ahead else {"0": [], "1": []})
    assert all(step.ended for step in steps)
    check_idle(engine)


class Ascending:
    """A grammar, and its matcher: each token is up to 9 above the one before, and none is left at the top.

    Its masks are late when the step begins, or when its logits are there, by chance.
    """

    def __init__(self, last: int = 0, late: float = 0.0, seed: int = 0) -> None:
        self.last = last
        self.late = late
        self.draw = random.Random(seed)

    def matcher(self, tokens: Sequence[int]) -> "Ascending":
        return Ascending(tokens[-1] if tokens else self.last, self.late, self.draw.randrange(2**32))

    def ready(self, *, surely: bool = False) -> bool:
        return self.draw.random() >= self.late

    def push(self, token: int) -> None:
        assert self.last < token <= self.last + 9
        self.last = token

    def mask(self, seconds: float = 0.0) -> NDArray[np.int32]:
        if self.draw.random() < self.late:
            raise MaskNotReadyError
        bits = np.zeros(256, np.uint8)
        bits[self.last + 1 : self.last + 10] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_constrained_requests_obey_planned_ahead_preempted_or_not(lengths: list[int]) -> None:
    regex = Constraint("regex", "ascending")
    constrained = SamplingParams(max_tokens=20, seed=4, prompt_logprobs=1, constraint=regex)
    found = []
    for blocks, ahead, late in ((100, False, 0.0), (14, False, 0.6), (14, True, 0.6)):
        requests = []
        for number, length in enumerate(lengths):
            tokens = tuple(range(length))
            grammar = Ascending(0, late, number)
            requests.append(Request(str(number), 1, tokens, length, constrained, grammar=grammar))
            requests.append(request(f"plain {number}", tokens, max_tokens=20))
        found.append(served(hash_engine(blocks=blocks, lag=ahead), requests))
    assert all(tokens == found[0] for tokens in found)
    for number, length in enumerate(lengths):
        assert found[0][f"plain {number}"] == expected_tokens(range(length), 20)
        assert all(0 < after - before < 10 for before, after in itertools.pairwise([0, *found[0][str(number)]]))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_mask_that_never_comes_holds_up_its_own_row_only(ahead: bool) -> None:
    """The others get a token in each step."""
    engine = hash_engine(blocks=64, lag=ahead)
    sampling = SamplingParams(max_tokens=9, constraint=Constraint("regex", "ascending"))
    stuck = [
        engine.scheduler.add(Request(f"stuck {number}", 1, (1, 2), 2, sampling, grammar=Ascending(0, late=1.0)))
        for number in range(3)
    ]
    engine.scheduler.add(request("plain", (1, 2)))
    heard = [engine.step() for _ in range(30)]
    assert [report.token for reports in heard for report in reports] == expected_tokens((1, 2), 30)
    assert engine.step() == []
    for sequence in stuck:
        engine.scheduler.cancel(sequence.request.key)
    reports_until_idle(engine)


def test_a_request_that_leaves_no_token_fails_alone() -> None:
    engine = hash_engine(lag=1)
    narrow = SamplingParams(max_tokens=200, temperature=0.0, constraint=Constraint("regex", "ascending"))
    bad = engine.scheduler.add(Request("bad", 1, (1, 2), 2, narrow, grammar=Ascending(235)))
    good = engine.scheduler.add(request("good", (1, 2), max_tokens=60))
    (error,) = [report for report in reports_until_idle(engine) if report.error is not None]
    assert (error.sequence, error.refused) == (bad, True)
    assert "no token is left" in str(error.error)
    assert good.tokens[2:] == expected_tokens((1, 2), 60)


@settings(max_examples=20, deadline=None)
@given(batch=st.lists(asked_of, min_size=1, max_size=4), ahead=st.booleans())
def test_a_handed_over_request_gets_the_same_tokens(batch: list[Asked], ahead: bool) -> None:
    requests = [
        request(str(number), tokens, sampling, most + 1) for number, (tokens, sampling, most) in enumerate(batch)
    ]
    heard = handed_over(hash_engine(blocks=64, lag=ahead), requests, None)
    assert heard == {
        str(number): expected_of(tokens, sampling, most + 1) for number, (tokens, sampling, most) in enumerate(batch)
    }


def test_a_failure_of_the_runner_comes_out() -> None:
    engine = hash_engine(blocks=4)
    engine.scheduler.add(request("r", (1,)))
    engine.runner.run = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()


@pytest.mark.more
def test_nothing_grows_with_requests_served() -> None:
    def live() -> int:
        gc.collect()
        return sum(type(thing) in (EngineSequence, Request) for thing in gc.get_objects())

    engine, generator, before = hash_engine(blocks=32), np.random.default_rng(5), live()
    for number in range(600):
        tokens = tuple(generator.integers(0, 3, generator.integers(1, 60)).tolist())
        engine.scheduler.add(request(str(number), tokens, max_tokens=3))
        engine.step()
    reports_until_idle(engine)
    assert engine.step() == []
    assert live() == before
    assert len(engine.scheduler.prefix) <= engine.scheduler.prefix.pool.total


def test_a_long_context_holds_the_blocks_of_its_window_only() -> None:
    """Also between the chunks of its prompt."""
    context, window, chunk, out = 2**15, 1024, 512, 40
    blocks = context // LAYOUT.block_size + 8
    group = window_of(window)
    options = EngineConfig(block_size=LAYOUT.block_size, max_batch_tokens=chunk, max_sequences=1)
    sides = [(group, side_blocks(group, options))]
    engine = engine_on(HashRunner(blocks, spec=hash_spec(context + out), sides=sides), options)
    (side,) = engine.scheduler.prefix.sides
    prompt = [n % VOCAB_SIZE for n in range(context)]
    sequence = engine.scheduler.add(request("long", prompt, max_tokens=out))
    held = []
    while engine.has_work:
        engine.step()
        held.append(side.pool.held)
    assert sequence.tokens[context:] == expected_tokens(prompt, out)
    assert len(held) == context // chunk + out - 1
    most = -(-window // LAYOUT.block_size) + 1
    assert max(held[: context // chunk]) <= most + chunk // LAYOUT.block_size
    assert 0 < max(held[context // chunk :]) <= most
    assert held[-1] == 0
    engine.scheduler.check_integrity(idle=True)


@pytest.mark.parametrize(
    ("groups", "ahead"),
    [
        ((), False),
        ((), True),
        ((window_of(5), window_of(40)), False),
        ((STATE,), False),
        ((STATE, window_of(9)), False),
    ],
    ids=["full", "ahead", "windows", "states", "states and a window"],
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.some(4)
def test_the_next_turn_computes_no_token_of_an_answer_again(
    dtype: CacheDtype, groups: tuple[LayerGroup, ...], ahead: bool
) -> None:
    """But for the last one, which nothing had to compute. Answers end anywhere in a block, or at its end."""
    layout = replace(LAYOUT, dtype=dtype)
    options = EngineConfig(block_size=LAYOUT.block_size, max_batch_tokens=16, max_sequences=2)
    sides = [(replace(group, tracks=(layout,)) if group.window else group, 40) for group in groups]
    engine = engine_on(HashRunner(64, layout, hash_spec(512), lag=ahead, sides=sides), options)
    said: list[int] = []
    for turn in range(18):
        question = list(range(3 + turn % 5))
        said += question
        before, out = engine.computed_tokens, 1 + 5 * turn % 13
        answer = run(engine, [request(str(turn), said, max_tokens=out)])[str(turn)]
        assert answer == expected_tokens(said, out, layout)
        assert engine.computed_tokens - before == len(question) + out - (not turn)
        said += answer


def test_code_that_decides_needs_no_torch() -> None:
    """Neither by itself nor through a package that it imports."""
    modules = ("engine.engine", "engine.kv.blocks", "engine.kv.prefix", "engine.scheduling.scheduler")
    imports = ", ".join(f"kvrelay.{name}" for name in (*modules, "engine.models.reading.checkpoint", "models"))
    code = f"import sys, {imports}; kvrelay.models.resolve('pico'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd="/", check=False).returncode == 0


# The hash model itself.


def plan_behind(tokens: list[int], blocks: list[int]) -> StepPlan:
    """A plan that computes token 9 behind others, whose KV is there."""
    return make_plan([(PagedSequence([*tokens, 9], blocks, len(tokens)), 1, GREEDY)])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(1, 39))
def test_one_wrong_bit_changes_the_next_token(data: st.DataObject, length: int) -> None:
    """The vocabulary is so large that no two hashes give one token by chance."""
    spec = hash_spec(64, vocab_size=2**31 - 1)
    runner = HashRunner(8, spec=spec)
    blocks = data.draw(st.permutations(range(8)))[:5]
    tokens = list(range(length))
    runner.fill(blocks, tokens, 0)
    plan = plan_behind(tokens, blocks)
    (right,) = runner.run(plan).tokens
    assert [right] == expected_tokens([*tokens, 9], 1, vocab_size=spec.vocab_size)
    position = data.draw(st.integers(0, length - 1))
    layer, part, head, byte = (data.draw(st.integers(0, most)) for most in (1, 1, 1, 15))
    where = (blocks[position // 8], position % 8, layer, part, head, byte)
    runner.parts[0][where] ^= 1 << data.draw(st.integers(0, 7))
    assert runner.run(plan).tokens != (right,)
    runner.fill(blocks, tokens, 0)
    if length >= 16:
        swapped = [blocks[1], blocks[0], *blocks[2:]]
        assert runner.run(plan_behind(tokens, swapped)).tokens != (right,)
    assert runner.run(plan).tokens == (right,)


def test_no_two_places_have_the_same_kv() -> None:
    kv = kv_bytes([5, 5, 6], 0)
    parts = [kv[token, layer, part].tobytes() for token in range(3) for layer in range(2) for part in range(2)]
    assert len(set(parts)) == 12
    assert (kv_bytes([5, 6], 1) == kv[1:]).all()
