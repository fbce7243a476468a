"""Benchmarks of quantized formats: scores against transformers, and whole runs."""

import argparse
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from evaluation import ITEMS, Scorer, analogies, last_words  # noqa: E402  # after the path
from quantization import runner_of  # noqa: E402

from support.checkpoints import make_checkpoint  # noqa: E402

TEXT = "Rain fell on the harbour. Every boat came in. By noon they filled the harbour. No one left."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", dtype="bfloat16")


def test_scores_are_those_of_transformers(tiny: Path) -> None:
    """Continuations on the KV of their context, and whole texts, have these scores; a coarser format's differ."""
    args = argparse.Namespace(model=str(tiny), gguf=None, threads=1)
    base, coarse = (runner_of(args, name, 256)[0] for name in ("none", "int4"))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()

    def expected(tokens: list[int], first: int) -> float:
        with torch.inference_mode():
            logs = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
        return sum(logs[at - 1, tokens[at]].item() for at in range(first, len(tokens)))

    context, other = list(b"How tall is it?"), list(b"And how old")
    pairs = [(context, [9, 8, 7]), (context, [200]), (other, [5, 6, 7, 8])]
    scorer = Scorer(base, base)
    for (before, after), (score, greedy) in zip(pairs, scorer.continuations(pairs), strict=True):
        assert score == pytest.approx(expected(before + after, len(before)), abs=0.5)
        assert not greedy
    whole = list(TEXT.encode())
    assert scorer.whole(whole) == pytest.approx(expected(whole, 1), rel=0.01)
    assert (scorer.divergence, scorer.read) == (0.0, len(whole) - 1)
    rough = Scorer(coarse, base)
    rough.whole(whole)
    assert rough.divergence > 0.01 * rough.read


def test_items_of_tasks_come_from_the_texts() -> None:
    text, _, _ = TEXT.partition(" harbour. No one")
    assert list(last_words([TEXT, "One line only."])) == [{"text": text, "word": "harbour"}]
    lines = [": capitals", *[f"town{n} land{n} town{m} land{m}" for n in range(20) for m in range(20) if n != m]]
    items = list(analogies(lines, random.Random(0)))
    assert len({item["text"] for item in items}) == ITEMS
    for item in items:
        assert len(set(item["endings"])) == 4
        words = item["text"].split()
        assert " ".join([words[0], words[3], words[5], item["endings"][item["label"]]]) in lines


@pytest.mark.more
@pytest.mark.parametrize("script", ["quantization.py", "evaluation.py"])
def test_a_small_run_has_the_figures_of_each_format(script: str, tmp_path: Path) -> None:
    if script == "evaluation.py" and find_spec("lm_eval") is None:
        pytest.skip("lm-eval isn't installed: pip install '.[eval]'")
    out = tmp_path / "out.json"
    options = ["--formats", "none,int8", "--threads", "1", "--out", str(out)]
    options += ["--limit", "2"] if script == "evaluation.py" else ["--cells", "decode_2_32", "--cpu", "--repeats", "1"]
    command = [sys.executable, str(FOLDER / script), "pico", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    if script == "evaluation.py":
        assert found["formats"]["int8"]["news"]["items"] == 2
        assert found["formats"]["none"]["news"]["divergence"] == 0 < found["formats"]["int8"]["news"]["divergence"]
    else:
        cell = found["speed"]["decode_2_32"]
        assert set(cell) == {"none", "int8"}
        assert cell["none"]["of_bfloat16"]["median"] == 1
        assert cell["int8"]["tokens_per_s"]["median"] > 0
