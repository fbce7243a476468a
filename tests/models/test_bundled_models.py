"""The bundled models load, are small, write Python, and their cards have the figures of their training record."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.models import bundled, names, resolve, train

PARAMETERS = {"pico": (5_000_000, 8_000_000), "pico-draft": (800_000, 1_300_000)}
NAMES = sorted(PARAMETERS)
PROMPT = "def __init__(self,"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Restricts torch to one thread: with small products on a busy machine, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_json(name: str, file: str) -> dict[str, Any]:
    return json.loads((bundled(name) / file).read_text())


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, AutoModelForCausalLM.from_pretrained(bundled(request.param), dtype="auto")


def test_transformers_loads_it_whole_in_bfloat16(loaded: tuple[str, Any]) -> None:
    name, model = loaded
    low, high = PARAMETERS[name]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert low <= model.num_parameters() <= high
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_small_and_holds_just_the_named_tensors(name: str) -> None:
    file = bundled(name) / "model.safetensors"
    assert file.stat().st_size <= 16 * 2**20
    with safe_open(file, framework="pt") as tensors:
        stored = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 (not a mapping)
    assert set(stored) == {parameter for parameter, _ in train.build(train.SHAPES[name]).named_parameters()}
    assert set(stored.values()) == {"BF16"}
    assert read_json(name, "config.json") == train.SHAPES[name].config()


def test_both_models_share_one_tokenizer() -> None:
    assert (bundled("pico") / "tokenizer.json").read_bytes() == (bundled("pico-draft") / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(bundled("pico"))
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    assert len(tokenizer) == 4096
    assert (
        tokenizer(PROMPT).input_ids == Tokenizer.from_file(str(bundled("pico") / "tokenizer.json")).encode(PROMPT).ids
    )


TOKENIZER = Tokenizer.from_file(str(bundled("pico") / "tokenizer.json"))


@given(st.text())
@example("\t\r\n  \n")
@example("naïve — 漢字 🙂‍↔️ \u202e\x00")
@example("    def f(x) -> None: ...\n")
@example("a</s>b<s>")
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def is_a_method(text: str) -> bool:
    """Whether `text` is a complete signature and a first line that parses with it, and uses self."""
    signature, colon, body = text.partition("):\n")
    whole_lines = body.splitlines()[:-1]
    if not (colon and whole_lines and "self." in body):
        return False
    try:
        ast.parse(signature + "): pass")
        ast.parse(signature + "):\n" + whole_lines[0])
    except SyntaxError:
        return False
    return True


@pytest.mark.more
def test_pico_goes_on_like_python() -> None:
    """Sampled a little below its own temperature; greedily a model of this size soon repeats itself."""
    model = AutoModelForCausalLM.from_pretrained(bundled("pico"), dtype=torch.float32)
    ids = torch.tensor([TOKENIZER.encode(PROMPT).ids] * 20)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.5, "top_k": 0, "max_new_tokens": 40, "pad_token_id": 1}
    samples = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    texts = [TOKENIZER.decode(sample.tolist()) for sample in samples]
    assert sum(map(is_a_method, texts)) >= 8, texts


@pytest.mark.parametrize("name", NAMES)
def test_the_card_quotes_the_training_record(name: str) -> None:
    record, card = read_json(name, "training.json"), (bundled(name) / "README.md").read_text()
    bits = record["held_out_bits_per_byte"]
    assert f"**{bits['512']}** in windows of 512 tokens" in card
    assert f"**{bits['4096']}** in windows of 4,096" in card
    assert f"{record['steps']:,} steps, {record['tokens']:,} tokens" in card
    assert f"{record['minutes']} minutes" in card
    assert "PSF License" in card
    assert "$" not in card


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_bits_per_byte_hold_for_the_weights(name: str) -> None:
    """Measured on every 16th window of the held-out files of this Python, whose version has slightly other files."""
    texts = [text for path, text in train.library_files().items() if train.is_held_out(path)]
    stream = train.token_stream(TOKENIZER, texts)
    sample = np.concatenate(
        [stream[start : start + train.LENGTH] for start in range(0, len(stream), 16 * train.LENGTH)]
    )
    sample_bytes = sum(len(text.encode()) for text in texts) * len(sample) / len(stream)
    model = AutoModelForCausalLM.from_pretrained(bundled(name), dtype=torch.float32)
    measured = train.bits_per_byte(model, sample, train.LENGTH, round(sample_bytes))
    assert measured == pytest.approx(read_json(name, "training.json")["held_out_bits_per_byte"]["512"], rel=0.15)


def test_resolve_takes_a_name_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert set(NAMES) <= set(names())
    assert resolve("pico") == bundled("pico")
    assert resolve(str(tmp_path)) == tmp_path
    assert bundled("nothing") is None


@pytest.mark.parametrize("value", ["", "pico-huge", "/nowhere/at/all", "../pico"])
def test_resolve_names_the_value_and_what_is_allowed(value: str) -> None:
    with pytest.raises(ValueError, match="pico, pico-draft") as error:
        resolve(value)
    assert repr(value) in str(error.value)


def test_resolve_refuses_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        resolve(str(tmp_path))


@pytest.mark.more
def test_an_interrupted_training_goes_on_where_it_was(tmp_path: Path) -> None:
    shape = train.Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, peak_lr=1e-3, head_dim=16)
    corpus = train.Corpus(TOKENIZER, ["def f(x):\n    return x\n" * 400], seed=0)
    budget = train.Budget(minutes=1.0, steps=6)

    whole = train.Training(shape, 0, shape.peak_lr, tmp_path / "whole.pt")
    list(whole.run(corpus, budget))

    first = train.Training(shape, 0, shape.peak_lr, tmp_path / "cut.pt")
    for step in range(3):
        first.step(corpus.batch(step), budget.progress(step, 0.0))
    first.save()
    second = train.Training(shape, 1, shape.peak_lr, tmp_path / "cut.pt")
    assert second.spent.steps == 3
    list(second.run(corpus, budget))

    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], weight, atol=0.0, rtol=0.0)


def test_a_model_with_a_teacher_comes_near_it(tmp_path: Path) -> None:
    """The loss is the KL divergence: 0 for the teacher's own weights, and less after each few steps for others."""
    shape = train.Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, peak_lr=1e-2, head_dim=16)
    ids = train.Corpus(TOKENIZER, ["def f(x):\n    return x\n" * 400], seed=0).batch(0)[:, :65]
    teacher = train.Training(shape, 0, shape.peak_lr, tmp_path / "teacher.pt").model
    with torch.no_grad():
        for weight in teacher.parameters():
            weight *= 4
    pupil = train.Training(shape, 1, shape.peak_lr, tmp_path / "pupil.pt", teacher)
    losses = [pupil.step(ids, 0.1) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    pupil.model.load_state_dict(teacher.state_dict())
    assert pupil.step(ids, 0.1) == pytest.approx(0.0, abs=1e-3)
