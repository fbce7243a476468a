"""Measure what guessed tokens save: the same prompts with each method in turn.

    python benchmarks/speculation.py [--minutes 9] [--model pico] [--draft pico-draft] [--out FILE]
    python benchmarks/speculation.py --quick        # checks every guess, once; its figures mean nothing
    python benchmarks/speculation.py --model MODEL --draft smollm2   # MODEL of `checkpoint.py --gguf smollm2`

Times are CPU seconds of the thread that steps the engine (one thread computes), so other work on the machine changes
them little. All methods compute on one runner, so with the same weights at the same addresses. Each prompt is continued
with every method, in random order, before the next prompt, and every round does all prompts. Rounds end when the next
one would take longer than --minutes, of wall time, allow. The text is Python's standard library. Cells:

    continue      batch 1, temperature 0.8: a file's beginning goes on
    greedy        the same, greedy
    long          the same for 256 tokens: what a draft model takes to read the prompt is spread over more
    edit          batch 1, greedy: a class, then the first quarter of its changed copy, which goes on: what is copied
                  can be looked up. 128 tokens; all others have 64
    batch_8, batch_32    so many sequences, temperature 0.8

A model with a chat template has other cells, all at batch 1, with answers of up to 128 tokens:

    chat, chat_drawn     questions, greedy and at temperature 0.8
    summary              paragraphs to be summed up, greedy
    code                 a function to be written again with another name in it, greedy

`tpot_ms` is milliseconds per token after the first, the median of the rounds; `ratio` that of `off` to it, the median
of the rounds' own ratios, and `ratio_range` their quartiles. `again` is `off` once more: its ratio is the machine's
noise. `accepted` is the share of checked guesses that were kept, `step_tokens` how many tokens of all sequences a step
with guesses yielded, `saved` the share of the time without guesses that was saved, by the engine's own measurements.

`always` is `draft` with `adaptive: false` and three guesses in every step.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from turns import own_setting, save, spread

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.speculate.draft import DraftProposer
from kvrelay.models import resolve

CLASSES = ("argparse:HelpFormatter", "queue:Queue", "configparser:RawConfigParser")
BEGINNINGS = ("textwrap", "shlex", "sched")
TOKENS = 64
MORE_TOKENS = {"edit": 128, "long": 256, "chat": 128, "chat_drawn": 128, "summary": 128, "code": 128}
ALWAYS = 3
EDIT = 256
"""Tokens of the class that `edit` shows."""
QUESTIONS = (
    "How does a bicycle stay upright?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
)
MODULES = ("sched", "cmd", "argparse")
"""Modules whose documentation is summed up."""
FUNCTIONS = {"shlex:quote": "word", "fnmatch:filter": "files", "textwrap:indent": "lines"}
"""Functions to be changed, and the new name of the first parameter of each."""
DRAWN = ("continue", "chat_drawn", "batch_8", "batch_32")


def source(name: str) -> str:
    """The source code of a module, or of MODULE:CLASS."""
    module, _, thing = name.partition(":")
    found = __import__(module)
    return inspect.getsource(getattr(found, thing) if thing else found)


def prompts(tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Token ids, by cell."""
    begin = [tuple(tokenizer.encode(source(name)).ids[:160]) for name in BEGINNINGS]
    edit = []
    for name in CLASSES:
        ids = tokenizer.encode(source(name)).ids[:EDIT]
        kind = name.partition(":")[2]
        copy = tokenizer.encode("\n\n\n" + tokenizer.decode(ids).replace(kind, "Timed" + kind)).ids
        edit.append(tuple(ids + copy[: EDIT // 4]))
    wide = [begin[number % len(begin)][: 32 + 2 * number] for number in range(32)]
    return {"continue": begin, "greedy": begin, "long": begin, "edit": edit, "batch_8": wide[:8], "batch_32": wide}


def chats(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Token ids, by cell, of a model with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def asked(text: str) -> tuple[int, ...]:
        chat = [{"role": "user", "content": text}]
        return tuple(
            tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
        )

    questions = [asked(text) for text in QUESTIONS]
    documents = [inspect.getdoc(__import__(name)) or "" for name in MODULES]
    summaries = [asked(f"Summarize this text, and quote what matters:\n\n{text}") for text in documents]
    code = []
    for name, new in FUNCTIONS.items():
        text = source(name)
        old = text.partition("(")[2].split(",")[0].partition(")")[0]
        code.append(asked(f"Rename the variable {old} to {new}. Print the whole function.\n\n```python\n{text}```"))
    return {"chat": questions, "chat_drawn": questions, "summary": summaries, "code": code}


def run(engine: Engine, asked: list[Request]) -> tuple[float, int, list[int]]:
    """CPU seconds after the first token, tokens behind first ones, and the tokens."""
    for request in asked:
        engine.scheduler.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    began = None
    while engine.has_work:
        for report in engine.step():
            if report.token is not None:
                tokens[report.sequence.request.request_id].append(report.token)
        if began is None and all(tokens.values()):
            began, first = time.thread_time(), sum(map(len, tokens.values()))
    if began is None:
        raise RuntimeError("no request has a token")
    return time.thread_time() - began, sum(map(len, tokens.values())) - first, list(chain(*tokens.values()))


def groups(cell: str, texts: Sequence[tuple[int, ...]], tokens: int) -> list[list[Request]]:
    """The requests of a cell; those of a group run together."""
    temperature = 0.8 if cell in DRAWN else 0.0
    asked = [
        Request(f"{seed}", 1, text, len(text), SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens))
        for seed, text in enumerate(texts)
    ]
    return [asked] if cell.startswith("batch") else [[request] for request in asked]


class Cell:
    """The figures of one cell, by method."""

    def __init__(self, name: str, asked: list[list[Request]], methods: Sequence[str]) -> None:
        self.name = name
        self.asked = asked
        self.tpot: dict[str, list[float]] = {method: [] for method in methods}
        """Milliseconds per token of each round, by method."""
        self.seconds = dict.fromkeys(methods, 0.0)
        self.counts: dict[str, Counter[str]] = {method: Counter() for method in methods}

    def round(self, engines: dict[str, Engine], random: Random, count: bool) -> None:
        """Every request once with each engine.

        Args:
            count: whether it becomes a figure; a warm-up doesn't.

        Raises:
            RuntimeError: a method changed the tokens.
        """
        seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for group in self.asked:
            streams = {}
            for method in random.sample(list(engines), len(engines)):
                guesses = engines[method].scheduler.speculation
                before = dict(vars(guesses.counts)) if guesses else {}
                took, later, streams[method] = run(engines[method], group)
                seconds[method] += took
                tokens[method] += later
                if guesses and count:
                    now = vars(guesses.counts)
                    self.counts[method].update({field: value - before[field] for field, value in now.items()})
            if len({tuple(stream) for stream in streams.values()}) > 1:
                raise RuntimeError(f"{self.name}: the methods have different tokens: {streams}")
        if count:
            for method in engines:
                self.seconds[method] += seconds[method]
                self.tpot[method].append(1000 * seconds[method] / tokens[method])

    def rows(self) -> dict[str, dict[str, Any]]:
        """See the module's docstring."""
        found = {}
        for method, tpot in self.tpot.items():
            ratios = [off / mine for off, mine in zip(self.tpot["off"], tpot, strict=True)]
            counts = self.counts[method]
            row: dict[str, Any] = {"tpot_ms": spread(tpot), "ratio": round(statistics.median(ratios), 3)}
            row["ratio_range"] = [round(edge, 3) for edge in np.quantile(ratios, (0.25, 0.75)).tolist()]
            if counts["proposed"]:
                row["proposed"] = counts["proposed"]
                row["accepted"] = round(counts["accepted"] / counts["proposed"], 3)
                saved = counts["plain_seconds"] - counts["seconds"]
                row["saved"] = round(saved / (saved + self.seconds[method]), 3)
                row["step_tokens"] = round(counts["tokens"] / max(1, counts["steps"]), 2)
            found[method] = row
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pico")
    parser.add_argument("--draft", default="pico-draft")
    parser.add_argument("--minutes", type=float, default=9.0, help="of wall time, for all")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    folder = resolve(args.model)
    methods = {
        "off": SpeculationConfig(),
        "again": SpeculationConfig(),
        "ngram": SpeculationConfig("ngram"),
        "suffix": SpeculationConfig("suffix"),
        "draft": SpeculationConfig("draft", str(resolve(args.draft)), max_tokens=4),
        "always": SpeculationConfig("draft", str(resolve(args.draft)), max_tokens=ALWAYS, adaptive=False),
    }
    options = EngineConfig(threads=1, kv_memory_bytes=64 << 20, prefix_cache=False).on("cpu")
    runner = build_cpu_runner(folder, "auto", options)
    small = build_cpu_runner(resolve(args.draft), "auto", options)
    engines = {}
    for name, speculation in methods.items():
        guesses = DraftProposer(small, options.max_batch_tokens) if speculation.method == "draft" else None
        speculation = replace(speculation, adaptive=speculation.adaptive and not args.quick)
        engines[name] = engine_on(runner, replace(options, speculation=speculation), guesses)
        engines[name].warm_up()
    has_template = "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    texts = chats(folder) if has_template else prompts(Tokenizer.from_file(str(folder / "tokenizer.json")))
    result: dict[str, Any] = own_setting("torch") | {"model": args.model, "draft": args.draft, "clock": "cpu"}
    cells = [
        Cell(name, groups(name, asked, 8 if args.quick else MORE_TOKENS.get(name, TOKENS)), list(engines))
        for name, asked in texts.items()
    ]
    rounds, longest, random = 0, 0.0, Random(0)
    if not args.quick:
        for cell in cells[:2]:
            cell.round(engines, random, count=False)
    while not rounds or (not args.quick and time.monotonic() - began + longest < 60 * args.minutes):
        round_began = time.monotonic()
        for cell in cells:
            cell.round(engines, random, count=True)
        rounds += 1
        longest = max(longest, time.monotonic() - round_began)
        print(f"round {rounds}: {longest:.0f} s at most", file=sys.stderr, flush=True)
        result |= {"rounds": rounds, "cells": {cell.name: cell.rows() for cell in cells}}
        if args.out is not None:
            save(args.out, result)
    for name, rows in result["cells"].items():
        for method, row in rows.items():
            print(json.dumps({"cell": name, "method": method, **row}), flush=True)


if __name__ == "__main__":
    main()
