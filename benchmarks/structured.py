"""Masks per second of the two libraries for constrained decoding, on one thread, with the same schemas and tokens.

    python benchmarks/structured.py [--model FOLDER] [--vocabulary 128000] [--schemas 40] [--tokens 200]

For each random schema, one walk is drawn with llguidance: a random allowed token after each mask. xgrammar then follows
the same walk as far as it allows it. Compile times, the time of each mask, and how often the two disagree about the
token that comes next are printed as JSON. Both libraries get the same white space. With --vocabulary, random pairs of
the model's tokens are added to its vocabulary up to that size.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import tokenizers
import torch
import xgrammar

from kvrelay.engine.constrain.lanes import LIMITS
from kvrelay.engine.models.reading.config import read_config
from kvrelay.models import resolve

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.schemas import random_schema


class Timer:
    """Seconds of calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def report(self) -> dict[str, Any]:
        return {
            name: {
                "count": len(seconds),
                "per_second": round(len(seconds) / sum(seconds)),
                "median_us": round(1e6 * statistics.median(seconds), 1),
                "p99_us": round(1e6 * sorted(seconds)[int(0.99 * (len(seconds) - 1))], 1),
            }
            for name, seconds in self.seconds.items()
        }


class Llguidance:
    """Compiles and follows as the workers do."""

    def __init__(self, text: str, vocab_size: int, eos: list[int]) -> None:
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)

    def matcher(self, schema: str) -> Any:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, limits=self._limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class Xgrammar:
    def __init__(self, text: str, vocab_size: int, eos: list[int]) -> None:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        vocabulary = [tokenizer.id_to_token(token) or "" for token in range(vocab_size)]
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=eos
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def matcher(self, schema: str) -> Any:
        compiled = self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        return xgrammar.GrammarMatcher(compiled)


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def widened(text: str, size: int) -> str:
    """A tokenizer.json with further tokens, each a random pair of the others."""
    content = json.loads(text)
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    special = {token["content"] for token in content["added_tokens"]}
    pieces = [piece for piece in vocabulary if piece not in special]
    draw = random.Random(0)
    while len(vocabulary) < size:
        pair = draw.choice(pieces), draw.choice(pieces)
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(list(pair))
    return json.dumps(content)


def measure(folder: Path, vocabulary: int, count: int, most: int) -> dict[str, Any]:
    config = read_config(folder)
    size = max(vocabulary, config.vocab_size)
    text = widened((folder / "tokenizer.json").read_text(), size)
    eos = list(config.eos_token_ids)
    timer = Timer()
    first = timer.run("llguidance tokenizer", lambda: Llguidance(text, size, eos))
    second = timer.run("xgrammar tokenizer", lambda: Xgrammar(text, size, eos))
    draw = np.random.default_rng(0)
    disagreements = unsupported = 0
    for seed in range(count):
        schema = json.dumps(random_schema(random.Random(seed)))
        ours = timer.run("llguidance compile", lambda schema=schema: first.matcher(schema))
        try:
            theirs = timer.run("xgrammar compile", lambda schema=schema: second.matcher(schema))
        except (RuntimeError, ValueError):
            unsupported += 1
            theirs = None
        for _ in range(most):
            mask = timer.run("llguidance mask", ours.compute_bitmask)
            token = int(draw.choice(allowed(np.frombuffer(mask, np.int32))))
            if theirs is not None:
                timer.run("xgrammar mask", lambda theirs=theirs: theirs.fill_next_token_bitmask(second.mask))
                if not theirs.accept_token(token):
                    disagreements += 1
                    theirs = None
            if token in eos:
                break
            timer.run("llguidance token", lambda token=token, ours=ours: ours.consume_token(token))
    return {
        "model": folder.name,
        "vocab_size": size,
        "schemas": count,
        "xgrammar_cannot_compile": unsupported,
        "walks_that_xgrammar_leaves": disagreements,
        **timer.report(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pico", help="folder of a checkpoint, or a bundled model")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens; 0 takes the model's")
    parser.add_argument("--schemas", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200, help="of each walk at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(resolve(options.model), options.vocabulary, options.schemas, options.tokens), indent=2))


if __name__ == "__main__":
    main()
