"""Guesses from the model's hidden states: what a proposer gets, what it makes of it, and what the stream is."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from kvrelay.engine.build import build_engine, engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import StepHandle
from kvrelay.engine.speculate.base import Computed, Want
from kvrelay.engine.speculate.speculation import Speculation
from support.checkpoints import COMMON, VOCAB_SIZE
from support.guesses import HashHeads, Recorded
from support.hash_runner import HashRunner, expected_tokens, hash_spec
from support.heads import (
    eagle_config,
    eagle_tensors,
    handed_over,
    medusa_tensors,
    wanted_by,
    write_eagle,
    write_medusa,
)
from support.serving import run

HIDDEN = COMMON["hidden_size"]
LAYERS = COMMON["num_hidden_layers"]
OPTIONS = EngineConfig(
    device="cpu", kv_memory_bytes=8 * 2**20, threads=1, max_sequences=16, max_batch_tokens=48, step_seconds=0
)
GREEDY = SamplingParams(temperature=0.0)


def requests(count: int) -> list[Request]:
    """Prompts shorter and longer than a step's budget, greedy and drawn."""
    return [
        Request(
            f"{seed}",
            1,
            tuple(range(seed, seed + 9 + 30 * (seed % 3))),
            9 + 30 * (seed % 3),
            SamplingParams(seed=seed, temperature=0.8 * (seed % 2), max_tokens=30),
        )
        for seed in range(count)
    ]


def hidden_states(folder: Path, tokens: Sequence[int]) -> list[Tensor]:
    """The inputs of each layer, [T, hidden], and the normed output of the last one, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [states[0] for states in model(torch.tensor([tokens]), output_hidden_states=True).hidden_states]


def with_heads(folder: Path, model: Path, method: str = "medusa") -> Engine:
    config = SpeculationConfig(method, str(folder), max_tokens=3, adaptive=False)
    return build_engine(model, "auto", dataclasses.replace(OPTIONS, speculation=config))[0]


def medusa_formula(tensors: dict[str, Tensor], head: int, state: Tensor) -> Tensor:
    """Logits, by the formula of Medusa's paper."""
    block = 0
    while f"{head}.{block}.linear.weight" in tensors:
        weight, bias = tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"]
        state = state + functional.silu(weight @ state + bias)
        block += 1
    return tensors[f"{head}.{block}.weight"] @ state


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_heads_guess_by_the_formula(llama: Path, tmp_path: Path, blocks: int) -> None:
    tensors = medusa_tensors(3, blocks, HIDDEN, VOCAB_SIZE, seed=blocks)
    engine = with_heads(write_medusa(tmp_path / "heads", tensors), llama)
    speculation = engine.scheduler.speculation
    prompt = list(range(7, 27))
    asked = Request("a", 1, tuple(prompt), len(prompt), dataclasses.replace(GREEDY, max_tokens=9))
    engine.scheduler.add(asked)
    (report,) = engine.step()
    state = hidden_states(llama, prompt)[-1][-1]
    expected = [int(medusa_formula(tensors, head, state).argmax()) for head in range(3)]
    want = Want(report.sequence.handle, asked, report.sequence.tokens, 3)
    assert speculation.proposer.propose([want]) == [expected]
    # Without the state of the token before the last one, there is no guess.
    assert speculation.proposer.propose([want._replace(tokens=[*prompt, 1, 2])]) == [[]]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """[T, heads, dim] turned by their positions from 0 on."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(half) / half))[:, None]
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def eagle_formula(tensors: dict[str, Tensor], features: Tensor, embedded: Tensor, first_norm: bool) -> Tensor:
    """[T, hidden] what the layer makes of features and embedded tokens, by the formula of EAGLE-3's paper: all at once,
    and with a plain causal mask.
    """
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items() if name.startswith("midlayer.")}
    normed = rms_norm(features, layer["hidden_norm.weight"])
    both = torch.cat((rms_norm(embedded, layer["input_layernorm.weight"]), normed), -1)
    count, dim = len(both), features.shape[1] // 4
    query, key, value = (
        (both @ layer[f"self_attn.{name}_proj.weight"].T).view(count, -1, dim) for name in ("q", "k", "v")
    )
    key, value = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (rotated(key), value))
    scores = rotated(query).transpose(0, 1) @ key.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    seen = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    hidden = (normed if first_norm else features) + seen @ layer["self_attn.o_proj.weight"].T
    x = rms_norm(hidden, layer["post_attention_layernorm.weight"])
    gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def eagle_guess(
    tensors: dict[str, Tensor], states: Sequence[Tensor], embedding: Tensor, tokens: Sequence[int], first_norm: bool
) -> list[int]:
    """Three greedy guesses behind `tokens`, one after the other, each with everything computed anew.

    Args:
        states: [T, hidden] of three layers, of all tokens but the last.
    """
    features = torch.cat(list(states), -1) @ tensors["fc.weight"].T
    guesses: list[int] = []
    for _ in range(3):
        following = torch.tensor([*tokens[1:], *guesses])
        hidden = eagle_formula(tensors, features, embedding[following], first_norm)
        logits = tensors["lm_head.weight"] @ rms_norm(hidden[-1], tensors["norm.weight"])
        chosen = int(logits.argmax())
        guesses.append(chosen + int(tensors["d2t"][chosen]))
        features = torch.cat((features, hidden[-1:]))
    return guesses


@pytest.fixture(scope="module")
def eight(model_of: Callable[..., Path]) -> Path:
    """A model with layers enough for those that EAGLE-3 reads by default: 2, 3 and 5 of 8."""
    return model_of("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def eagle3(heads_of: Callable[..., Path]) -> Path:
    return heads_of("eagle3")


@pytest.fixture(params=["medusa", "eagle3"])
def heads(request: pytest.FixtureRequest, heads_of: Callable[..., Path], eagle3: Path) -> SpeculationConfig:
    """Heads of each kind."""
    folder = eagle3 if request.param == "eagle3" else heads_of("medusa", medusa_num_heads=2)
    return SpeculationConfig(request.param, str(folder), max_tokens=3, adaptive=False)


def speculators(tensors: dict[str, Tensor], config: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The same checkpoint as the speculators library writes it; the config is in two levels, g is normed first."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    outer = {"draft_vocab_size": config["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    inner = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    two = {"speculators_model_type": "eagle3", "norm_before_residual": True, "transformer_layer_config": inner}
    return renamed, {**two, **outer}


@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_an_eagle_checkpoint_guesses_by_the_formula(eight: Path, tmp_path: Path, form: str) -> None:
    """The guesses are compared over a prompt in several steps, and behind it."""
    tensors = eagle_tensors(HIDDEN, VOCAB_SIZE, 200, seed=3)
    config = eagle_config(tensors, VOCAB_SIZE)
    two_levels = form == "speculators"
    stored = speculators(tensors, config) if two_levels else (tensors, config)
    engine = with_heads(write_eagle(tmp_path / "eagle", *stored), eight, "eagle3")
    speculation = engine.scheduler.speculation
    proposer = speculation.proposer
    layers = (1, 4, 7) if two_levels else (2, 4, 5)
    assert proposer.layers == layers
    prompt = [(7 * place) % VOCAB_SIZE for place in range(130)]
    asked = Request("a", 1, tuple(prompt), len(prompt), dataclasses.replace(GREEDY, max_tokens=6))
    engine.scheduler.add(asked)
    embedding = AutoModelForCausalLM.from_pretrained(eight, dtype=torch.float32).get_input_embeddings().weight.detach()
    checked = 0
    while engine.has_work:
        for report in engine.step():
            tokens = report.sequence.tokens
            if report.token is None or report.finish is not None:
                continue
            states = hidden_states(eight, tokens[:-1])
            expected = eagle_guess(tensors, [states[layer] for layer in layers], embedding, tokens, two_levels)
            want = Want(report.sequence.handle, asked, tokens, 3)
            # Asked twice, it guesses the same.
            assert proposer.propose([want]) == proposer.propose([want]) == [expected]
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_proposer_gets_the_states_of_the_tokens_that_are_kept(lag: int) -> None:
    """The sequences have drafts kept and not, chunks of prompts and preemptions, with a step in flight or none.

    `HashHeads` checks each state, and guesses nothing behind a gap.
    """
    config = SpeculationConfig("ngram", max_tokens=4, adaptive=False)
    options = EngineConfig(block_size=8, max_batch_tokens=32, max_sequences=8, step_seconds=0, speculation=config)
    heads = HashHeads()
    engine = engine_on(HashRunner(14, spec=hash_spec(112), lag=lag), options, heads)
    found = Recorded(engine)
    asked = [
        dataclasses.replace(one, sampling=dataclasses.replace(GREEDY, max_tokens=30), tokens=one.tokens[:25])
        for one in requests(6)
    ]
    asked = [dataclasses.replace(one, prompt_tokens=len(one.tokens)) for one in asked]
    assert run(engine, asked) == {one.request_id: expected_tokens(one.tokens, 30) for one in asked}
    assert engine.scheduler.preemptions > 0
    assert all(found.guesses.values())
    assert 0 < engine.scheduler.speculation.counts.accepted < engine.scheduler.speculation.counts.proposed
    assert not heads.known, "sequences that have ended are forgotten"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.more)])
@pytest.mark.some(1)
def test_guesses_behind_a_hand_off_are_those_of_a_co_located_worker(
    eight: Path, heads: SpeculationConfig, dtype: str
) -> None:
    """Token by token, from the first step on, with prompts of several steps; and so are the streams."""
    method, options = heads.method, dataclasses.replace(OPTIONS, speculation=heads, prefix_cache=False)
    whole, parted = (build_engine(eight, dtype, options)[0] for _ in range(2))
    expected, found = Recorded(whole), Recorded(parted)
    wanted = wanted_by(parted)
    assert wanted.layers == ((8,) if method == "medusa" else (2, 4, 5))
    assert (wanted.hidden_size, wanted.dtype, wanted.last) == (HIDDEN, dtype, method == "medusa")
    # One at a time, so that the room in a step for guesses is the same.
    for one in requests(6):
        streams = run(whole, [one])
        assert handed_over(parted, [one], wanted) == streams
    assert found.guesses == expected.guesses
    assert len(found.guesses) > 100
    assert all(found.guesses.values())


def long_request(count: int = 200) -> Request:
    return Request("long", 1, tuple((7 * place) % 300 for place in range(count)), count, GREEDY)


@pytest.mark.more
def test_a_layer_reads_a_long_prompt_behind_several_steps(eight: Path, eagle3: Path) -> None:
    """The layer reads in parts, so that no step waits for all of it; it guesses nothing until then, and the same
    afterwards."""
    whole, parted = (with_heads(eagle3, eight, "eagle3") for _ in range(2))
    expected, found = Recorded(whole), Recorded(parted)
    assert handed_over(parted, [long_request()], wanted_by(parted)) == run(whole, [long_request()])
    late = [place for place, guess in found.guesses.items() if not guess]
    assert late == [("long", 201), ("long", 202)]
    common = (found.guesses.keys() & expected.guesses.keys()) - set(late)
    assert {place: found.guesses[place] for place in common} == {place: expected.guesses[place] for place in common}
    assert len(common) > 5


def test_what_a_prompt_takes_to_be_read_is_not_held_against_guesses(eight: Path, eagle3: Path) -> None:
    """The clock moves by steps and reading alone; reading takes a thousand times as long as it should."""
    speculation = SpeculationConfig("eagle3", str(eagle3), max_tokens=3)
    engine = build_engine(eight, "auto", dataclasses.replace(OPTIONS, speculation=speculation))[0]
    proposer, seconds = engine.scheduler.speculation.proposer, 0.0
    observe, launch = proposer.observe, engine.runner.launch

    def slow_launch(plan: StepPlan) -> StepHandle:
        nonlocal seconds
        seconds += 1.0
        return launch(plan)

    def slow_observe(computed: Sequence[Computed]) -> bool:
        nonlocal seconds
        read = observe(computed)
        seconds += 1000.0 * read
        return read

    engine.scheduler.speculation = guesses = Speculation(speculation, proposer, lambda: seconds)
    engine.runner.launch = slow_launch
    proposer.observe = slow_observe
    one = dataclasses.replace(long_request(), sampling=dataclasses.replace(GREEDY, max_tokens=20))
    handed_over(engine, [one], wanted_by(engine))
    assert seconds > 3000
    assert guesses.counts.seconds == guesses.counts.steps > 0
    assert guesses.counts.plain_seconds == guesses.counts.tokens


@pytest.mark.more
def test_a_layer_takes_a_prompt_whose_first_states_are_missing(eight: Path, eagle3: Path) -> None:
    """The layer guesses as it does behind a prefix hit, which has no states either."""
    whole, parted = (with_heads(eagle3, eight, "eagle3") for _ in range(2))
    one = long_request(100)
    run(whole, [one])
    expected, found = Recorded(whole), Recorded(parted)
    streams = run(whole, [one])
    cached = 96
    assert handed_over(parted, [one], wanted_by(parted), most=len(one.tokens) - cached) == streams
    assert found.guesses == expected.guesses
    assert all(found.guesses.values())


def test_heads_begin_without_the_states_of_a_prompt(eight: Path, heads: SpeculationConfig) -> None:
    """The first step has no guess, because no states came; all later steps have guesses."""
    engine, _ = build_engine(eight, "auto", dataclasses.replace(OPTIONS, speculation=heads))
    found = Recorded(engine)
    plain = run(build_engine(eight, "auto", OPTIONS)[0], requests(3))
    assert handed_over(engine, requests(3), None) == plain
    for one in requests(3):
        lengths = [length for name, length in found.guesses if name == one.request_id]
        assert [length for length in lengths if not found.guesses[one.request_id, length]] == lengths[:1]


def test_streams_are_the_same_with_few_blocks(eight: Path, heads: SpeculationConfig) -> None:
    """The model is in bfloat16, with as many guesses as pay, and with preempted sequences."""
    options = dataclasses.replace(OPTIONS, kv_memory_bytes=2**18)
    plain = run(build_engine(eight, "bfloat16", options)[0], requests(6))
    adaptive = SpeculationConfig(heads.method, heads.draft_model)
    engine, _ = build_engine(eight, "bfloat16", dataclasses.replace(options, speculation=adaptive))
    engine.warm_up()
    assert run(engine, requests(6)) == plain
    assert engine.scheduler.preemptions > 0


def test_streams_are_the_same_without_the_native_kernels(
    eight: Path, heads: SpeculationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=8)) for one in requests(2)]
    monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    plain = run(build_engine(eight, "auto", OPTIONS)[0], asked)
    assert run(build_engine(eight, "auto", dataclasses.replace(OPTIONS, speculation=heads))[0], asked) == plain


def test_medusa_heads_that_do_not_fit_are_refused(llama: Path, model_of: Callable[..., Path], tmp_path: Path) -> None:
    good = medusa_tensors(2, 1, HIDDEN, VOCAB_SIZE)
    wide = medusa_tensors(2, 1, HIDDEN + 4, VOCAB_SIZE)
    short = {name: tensor for name, tensor in good.items() if name != "1.1.weight"}
    other = medusa_tensors(2, 1, HIDDEN, VOCAB_SIZE + 4)
    for number, (tensors, config, why) in enumerate(
        (
            (wide, {}, r"tensor 0.0.linear.weight has shape \[68, 68\]; expected: \[64, 64\]"),
            (other, {}, r"tensor 0.1.weight has shape \[324, 64\]; expected: \[320, 64\]"),
            (short, {}, r"tensor 1.1.weight \[320, 64\] is missing"),
            ({**good, "extra": torch.zeros(1)}, {}, "tensors that such a checkpoint doesn't have: extra"),
            ({"x": torch.zeros(1)}, {}, "doesn't have: x"),
            (
                {**good, "1.1.weight": good["1.1.weight"] / 0},
                {},
                r"medusa_lm_head\.safetensors: tensor 1\.1\.weight has a number that is infinite or NaN",
            ),
            (good, {"medusa_num_heads": 3}, "medusa_num_heads is 3; allowed: as many heads as .* at most, 2"),
        )
    ):
        folder = write_medusa(tmp_path / f"{number}", tensors, **config)
        with pytest.raises(ValueError, match=why):
            with_heads(folder, llama)
    with pytest.raises(ValueError, match=r"method is medusa; allowed for Starcoder2ForCausalLM: others"):
        with_heads(write_medusa(tmp_path / "fitting", good), model_of("starcoder2"))
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors: no such file"):
        with_heads(llama, llama)
    for method in ("medusa", "eagle3"):
        with pytest.raises(ValueError, match=rf"draft_model is ''; allowed: a model with .*{method}"):
            SpeculationConfig(method)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("method", "pickled", "read"),
    [
        ("medusa", "medusa_lm_head.pt", "medusa_lm_head.safetensors"),
        ("eagle3", "pytorch_model.bin", "model.safetensors"),
    ],
)
def test_a_pickled_file_is_refused_unread(llama: Path, tmp_path: Path, method: str, pickled: str, read: str) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config(eagle_tensors(HIDDEN, VOCAB_SIZE, 200), VOCAB_SIZE)))
    torch.save({"0.0.linear.weight": Evil(tmp_path / "ran")}, folder / pickled)
    with pytest.raises(ValueError, match=rf"{pickled}: a pickled .*; allowed: {read}\. Convert it: safetensors\.torch"):
        with_heads(folder, llama, method)
    assert not (tmp_path / "ran").exists()
    (folder / read).write_bytes((folder / pickled).read_bytes())
    with pytest.raises(ValueError, match=rf"{read}: not readable as tensors"):
        with_heads(folder, llama, method)
    assert not (tmp_path / "ran").exists()


def test_an_eagle_checkpoint_that_does_not_fit_is_refused(
    eight: Path, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    four = model_of("llama", num_hidden_layers=4)
    tensors = eagle_tensors(HIDDEN, VOCAB_SIZE, 200)
    config = eagle_config(tensors, VOCAB_SIZE)
    numbers = itertools.count()

    def refused(why: str, model: Path = eight, without: str = "", **changed: object) -> None:
        changes = {name: value for name, value in changed.items() if not isinstance(value, torch.Tensor)}
        others = {name: value for name, value in changed.items() if isinstance(value, torch.Tensor)}
        kept = {name: tensor for name, tensor in {**tensors, **others}.items() if name != without}
        folder = write_eagle(tmp_path / f"{next(numbers)}", kept, {**config, **changes})
        with pytest.raises(ValueError, match=why):
            with_heads(folder, model, "eagle3")

    refused("num_hidden_layers is 2; allowed: 1", num_hidden_layers=2)
    refused("vocab_size is 321; allowed: 320", vocab_size=321)
    refused("hidden_size is 32; allowed: that of the served model, 64", hidden_size=32)
    refused("target_hidden_size is 32; allowed: that of the served model, 64", target_hidden_size=32)
    refused("attention_bias is True; allowed: False", attention_bias=True)
    refused("model_type is 'deepseek'; allowed: llama", model_type="deepseek")
    refused("quantization_config is .* allowed: none", quantization_config={"quant_method": "fp8"})
    refused("use_aux_hidden_state is False; allowed: True", eagle_config={"use_aux_hidden_state": False})
    refused("speculators_model_type is 'mlp'; allowed: eagle3", speculators_model_type="mlp")
    refused("eagle_aux_hidden_state_layer_ids is .* allowed: .* 0 to 8", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    refused("eagle_aux_hidden_state_layer_ids is missing; .* the served model has only 4", four)
    refused(r"tensor fc.weight \[64, 192\] is missing", without="fc.weight")
    refused(r"tensor d2t \[200\] is missing", without="d2t")
    refused("d2t doesn't give each token an id of its own", d2t=torch.full((200,), 200))
    refused("doesn't have: fc_norm.weight", **{"fc_norm.weight": torch.zeros(64)})
