"""Guessed tokens change how many steps a stream takes, and nothing else."""

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hash_scene import FIXED, SAMPLINGS, hash_engine, request
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from kvrelay.engine.build import build_engine, engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.constrain.compiler import ConstraintCompiler
from kvrelay.engine.constrain.grammar import Constraint, Grammar
from kvrelay.engine.plan import StepPlan, kept_rows
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.speculate.base import Want
from kvrelay.engine.speculate.lookup import LookupProposer, NgramIndex, SuffixIndex
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.guesses import HashGuesses
from support.serving import run, token_reports, tokens_of

EOS_ID = 1
STOPPED = SamplingParams(seed=3, top_k=5, min_tokens=9, stop_token_ids=frozenset(range(0, 251, 4)))


class Truth(HashGuesses):
    """Guesses what a stream without guesses had, and every third time something else."""

    def __init__(self, streams: dict[str, list[int]]) -> None:
        super().__init__()
        self._streams = streams
        self._wrong = itertools.cycle(range(3))

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        return [[(token + (next(self._wrong) == 0)) % VOCAB_SIZE for token in self._known(want)] for want in wants]

    def _known(self, want: Want) -> list[int]:
        known = len(want.tokens) - want.request.prompt_tokens
        return self._streams[want.request.request_id][known : known + want.most]


def test_a_draft_model_has_kv_for_as_many_tokens_as_the_served_one(tmp_path: Path) -> None:
    """Whichever of both run as transformers' code, and whatever their windows."""
    llama, gemma, gpt2 = tmp_path / "llama", tmp_path / "gemma", tmp_path / "gpt2"
    make_checkpoint(llama, "llama", dtype="bfloat16")
    make_checkpoint(gemma, "gemma3_text", dtype="bfloat16")
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS_ID, **sizes)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(gpt2)
    for served, draft in ((llama, llama), (llama, gpt2), (gpt2, llama), (gemma, llama)):
        guesses = SpeculationConfig("draft", draft_model=str(draft))
        options = EngineConfig(kv_memory_bytes=2**20, threads=1, max_sequences=4, speculation=guesses)
        engine, runner = build_engine(served, "auto", options)
        proposer = engine.scheduler.speculation.proposer
        assert proposer._pool.total == runner.pool.num_blocks


@settings(max_examples=60, deadline=None)
@given(chains=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=5))
def test_a_draft_is_kept_if_the_model_chose_it_and_all_before_it(chains: list[list[bool]]) -> None:
    """Each chain is given by which of its drafts equal what the row before them yields."""
    tokens, sampled, drafts, expected = [], [], [], []
    for right in chains:
        for row, hit in enumerate([True, *right]):
            tokens.append(0 if row == 0 else sampled[-1] if hit else sampled[-1] + 1)
            sampled.append(len(sampled) * 2)
            drafts.append(row > 0)
            expected.append(all(right[:row]))
    rows = len(tokens)
    ones = np.ones(rows, np.int32)
    plan = StepPlan(
        0, (0,) * rows, np.array(tokens, np.int32), ones, ones, ones[:, None], ones.astype(bool),
        (SamplingParams(),) * rows, ones, drafts=np.array(drafts),
    )  # fmt: skip
    assert kept_rows(plan, sampled) == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_streams_are_the_same_with_right_and_wrong_guesses(lag: int) -> None:
    """Penalties, biases, bad words, min_tokens, stops and log-probabilities, in few steps and in few blocks."""
    requests = [
        request(f"{number}", range(number, 3 * number + 5), sampling)
        for number, sampling in enumerate([*SAMPLINGS, STOPPED])
    ]
    plain = token_reports(hash_engine(), requests)
    streams = tokens_of(plain)
    engine = hash_engine(Truth(streams), blocks=14, lag=lag)
    guessed = token_reports(engine, requests)
    assert tokens_of(guessed) == streams
    for name, reports in guessed.items():
        assert [report.token_index for report in reports] == list(range(len(reports)))
        for mine, theirs in zip(reports, plain[name], strict=True):
            assert (mine.finish, mine.logprobs) == (theirs.finish, theirs.logprobs)
    speculation = engine.scheduler.speculation
    assert 0 < speculation.counts.accepted < speculation.counts.proposed


@pytest.mark.parametrize("lag", [0, 1])
def test_a_chunk_of_one_token_has_no_guesses_behind_it(lag: int) -> None:
    """Decode rows leave room for a chunk that ends one token further, at a block's border, before its prompt ends."""
    sampling = SamplingParams(temperature=0.0)
    requests = [request("decodes", range(5), sampling, 40), request("chunked", range(60), sampling)]
    engine = hash_engine(HashGuesses(), lag=lag, step_tokens=8)
    assert run(engine, requests) == run(hash_engine(step_tokens=8), requests)


def test_right_guesses_save_steps() -> None:
    engine = hash_engine(HashGuesses(wrong_every=1000))
    run(engine, [request("a", range(9), SamplingParams(temperature=0.0), 51)])
    assert engine.runner.steps == 1 + 50 / 5


@pytest.fixture(scope="module")
def tiny(model_of: Callable[..., Path]) -> Path:
    return model_of("llama", dtype="bfloat16")


OPTIONS = EngineConfig(device="cpu", kv_memory_bytes=8 * 2**20, threads=1, max_sequences=64)


@pytest.mark.more
def test_ten_thousand_sampled_tokens_are_the_same_on_and_off(tiny: Path) -> None:
    """The real kernels run at batches up to the largest; log-probabilities are equal to the last bit."""
    sampling = SamplingParams(temperature=0.7, logprobs=0)
    requests = [
        request(f"{seed}", [seed % VOCAB_SIZE, 5, 6], dataclasses.replace(sampling, seed=seed), 100)
        for seed in range(100)
    ]
    engine, runner = build_engine(tiny, "auto", OPTIONS)
    plain = token_reports(engine, requests)
    options = dataclasses.replace(OPTIONS.on("cpu"), speculation=FIXED)
    guessing = engine_on(runner, options, Truth(tokens_of(plain)))
    guessed = token_reports(guessing, requests)
    assert sum(map(len, guessed.values())) == 10_000
    for name, reports in guessed.items():
        assert [(mine.token, mine.logprobs) for mine in reports] == [(its.token, its.logprobs) for its in plain[name]]


CONSTRAINTS = (
    Constraint("regex", "((ab|cd|[0-9]{3}) ){6,12}"),
    Constraint(
        "json_schema",
        json.dumps(
            {
                "type": "array",
                "minItems": 3,
                "maxItems": 4,
                "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            }
        ),
    ),
)


@contextmanager
def compiled(folder: Path, constraints: Sequence[Constraint]) -> Iterator[list[Grammar]]:
    async def compile_all() -> list[Grammar]:
        async with asyncio.timeout(60):
            return [await compiler.compile(constraint) for constraint in constraints]

    compiler = ConstraintCompiler(folder, VOCAB_SIZE, [EOS_ID])
    try:
        yield asyncio.run(compile_all())
    finally:
        compiler.close()


def test_constrained_streams_are_the_same_on_and_off(tiny: Path) -> None:
    """The guesses are right and wrong, by prompt lookup and by a draft model, which knows nothing of constraints."""
    with compiled(tiny, CONSTRAINTS) as grammars:
        asked = [
            dataclasses.replace(
                request(
                    f"{place} {seed}",
                    [seed, 9, 4] * 7,
                    SamplingParams(
                        seed=seed,
                        temperature=temperature,
                        repetition_penalty=1.2 if seed == 1 else 1.0,
                        constraint=constraint,
                        stop_token_ids=frozenset({EOS_ID}),
                    ),
                    50,
                ),
                grammar=grammar,
            )
            for place, (constraint, grammar) in enumerate(zip(CONSTRAINTS, grammars, strict=True))
            for seed, temperature in enumerate((0.0, 0.8, 0.8))
        ]
        engine, runner = build_engine(tiny, "auto", OPTIONS)
        plain = run(engine, asked)
        assert all(grammars[int(name[0])].matcher(tokens[:-1]).mask(60).any() for name, tokens in plain.items())
        draft = dataclasses.replace(FIXED, method="draft", draft_model=str(tiny))
        drafting, _ = build_engine(tiny, "auto", dataclasses.replace(OPTIONS, speculation=draft))
        options = dataclasses.replace(OPTIONS.on("cpu"), speculation=FIXED)
        wrong = 0
        for guessing in (engine_on(runner, options, Truth(plain)), engine_on(runner, options), drafting):
            assert run(guessing, asked) == plain
            counts = guessing.scheduler.speculation.counts
            assert counts.accepted > 0
            wrong += counts.proposed - counts.accepted
        assert wrong > 0


def test_a_draft_model_with_another_vocabulary_is_refused(tiny: Path, model_of: Callable[..., Path]) -> None:
    other = model_of("llama", vocab_size=VOCAB_SIZE + 8)
    options = dataclasses.replace(OPTIONS, speculation=SpeculationConfig("draft", draft_model=str(other)))
    with pytest.raises(ValueError, match=f"draft_model has {VOCAB_SIZE + 8} tokens; allowed: .*{VOCAB_SIZE}"):
        build_engine(tiny, "auto", options)


def test_prompt_lookup_copies_what_followed_the_longest_match() -> None:
    proposer = LookupProposer(lambda: NgramIndex(2, 3))
    asked = request("a", [1, 2, 3, 4, 5, 9, 2, 3, 7, 1, 2, 3], SamplingParams())
    want = Want(0, asked, asked.tokens, 4)
    assert proposer.propose([want]) == [[4, 5, 9, 2]]
    # Two tokens match, and three don't; the last of two places counts.
    assert proposer.propose([want._replace(tokens=(*asked.tokens, 7, 2, 3))]) == [[7, 2, 3, 7]]
    assert proposer.propose([want._replace(handle=1, tokens=(1, 2, 3))]) == [[]]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_the_longest_match_is_found(tokens: list[int], cut: int) -> None:
    """The match is the same whether the text comes at once or in parts."""
    index = SuffixIndex(1)
    index.extend(tokens[:cut])
    index.extend(tokens)
    length, end = index.match
    earlier = [
        size
        for size in range(1, len(tokens))
        if any(tokens[at : at + size] == tokens[-size:] for at in range(len(tokens) - size))
    ]
    assert length == max(earlier, default=0)
    assert tokens[end - length : end] == tokens[len(tokens) - length :]
    assert end < len(tokens) or not length
