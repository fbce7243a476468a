"""What guessed tokens save: the same prompts with each method in turn, and the acceptance of draws with common noise.

    python benchmarks/speculation.py [--model pico] [--draft pico-draft] [--repeats 3] [--tokens 100] [--out FILE]

Times are CPU seconds of the thread that steps the engine (one thread computes), so other work on the machine changes
them little. Each repeat runs every method once, in turn; a figure is the median, a ratio is that of medians. The text
is Python's standard library. Cells:

    continue      batch 1, temperature 0.8: a file's beginning goes on
    greedy        the same, greedy
    edit          batch 1, greedy: a class, then the first lines of its changed copy: what is copied can be looked up
    batch_32      32 sequences, temperature 0.8

`tpot` is milliseconds per token after the first, `ratio` that of `off` to it; `accepted` is the share of checked
guesses that were kept, `step_tokens` how many tokens a step with guesses yielded.

`acceptance`: over positions of the text, sum min(p, q) of the model's distribution p and the draft's q, which is the
acceptance of the rejection rule min(1, p / q) and the most that any rule reaches; and how often both choose the same
token with common noise.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from turns import machine

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner
from kvrelay.engine.sampling.noise import exponential, noise_keys
from kvrelay.models import resolve

CLASSES = ("argparse:HelpFormatter", "queue:Queue", "string:Template", "configparser:RawConfigParser")
BEGINNINGS = ("textwrap", "shlex", "fractions", "sched")
POSITIONS = 256
SEEDS = 64
DRAWN = SamplingParams(temperature=0.8)
GREEDY = SamplingParams(temperature=0.0)


def source(name: str) -> str:
    """Of a module, or of MODULE:CLASS."""
    module, _, thing = name.partition(":")
    found = __import__(module)
    return inspect.getsource(getattr(found, thing) if thing else found)


def prompts(tokenizer: tokenizers.Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Token ids, by cell."""
    begin = [tuple(tokenizer.encode(source(name)).ids[:160]) for name in BEGINNINGS]
    edit = []
    for name in CLASSES:
        ids = tokenizer.encode(source(name)).ids[:256]
        text = tokenizer.decode(ids)
        again = text.partition("\n")[0].replace(name.partition(":")[2], "Timed" + name.partition(":")[2])
        edit.append(tuple(ids + tokenizer.encode("\n\n\n" + again + "\n" + text.split("\n", 3)[1]).ids))
    wide = [prompt[: 64 + 2 * number] for number in range(8) for prompt in begin]
    return {"continue": begin, "greedy": begin, "edit": edit, "batch_32": wide}


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


def measure(engine: Engine, cell: str, texts: list[tuple[int, ...]], tokens: int) -> tuple[float, list[int]]:
    """Milliseconds per token of all prompts together, and what was generated."""
    params = GREEDY if cell in ("greedy", "edit") else DRAWN
    asked = [
        Request(
            f"{number}",
            1,
            text,
            len(text),
            SamplingParams(temperature=params.temperature, seed=number, max_tokens=tokens),
        )
        for number, text in enumerate(texts)
    ]
    groups = [asked] if cell.startswith("batch") else [[request] for request in asked]
    found = [run(engine, group) for group in groups]
    seconds, count = sum(each[0] for each in found), sum(each[1] for each in found)
    return 1000 * seconds / count, list(chain(*[each[2] for each in found]))


def acceptance(target: CpuRunner, draft: CpuRunner, ids: list[int]) -> dict[str, float]:
    """See the module's docstring; at temperature 1."""
    plan = StepPlan(
        step=0,
        handles=(0,),
        tokens=np.array(ids, np.int32),
        starts=np.zeros(1, np.int32),
        lengths=np.array([len(ids)], np.int32),
        block_tables=np.arange(-(-len(ids) // target.layout.block_size), dtype=np.int32)[None],
        sample=np.ones(1, np.bool_),
        sampling=(GREEDY,),
        generated=np.zeros(1, np.int32),
    )
    with torch.inference_mode():
        p, q = (runner.model.logits(runner.forward(plan)).clone().softmax(-1) for runner in (target, draft))
        common = 0.0
        tokens = torch.arange(p.shape[1], dtype=torch.int32)
        for seed in range(SEEDS):
            keys = noise_keys(np.full(len(ids), seed, np.uint64), np.arange(len(ids)))
            noise = exponential(torch.from_numpy(keys), tokens)
            common += float(((p / noise).argmax(-1) == (q / noise).argmax(-1)).float().mean())
    return {"rejection_rule": round(float(p.minimum(q).sum(-1).mean()), 4), "common_noise": round(common / SEEDS, 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="pico")
    parser.add_argument("--draft", default="pico-draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder, draft = resolve(args.model), resolve(args.draft)
    methods = {
        "off": SpeculationConfig(),
        "ngram": SpeculationConfig("ngram"),
        "suffix": SpeculationConfig("suffix"),
        "draft": SpeculationConfig("draft", str(draft), max_tokens=4),
    }
    options = {"threads": 1, "kv_memory_bytes": 64 << 20}
    engines = {}
    for name, speculation in methods.items():
        engines[name], _ = build_engine(folder, "auto", EngineConfig(speculation=speculation, **options))
        engines[name].warm_up()
    texts = prompts(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    times: dict[str, dict[str, list[float]]] = {cell: {name: [] for name in engines} for cell in texts}
    counts: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats + 1):
        for cell, asked in texts.items():
            expected = None
            for name, engine in engines.items():
                guesses = engine.scheduler.speculation
                before = dict(vars(guesses.counts)) if guesses else {}
                tpot, tokens = measure(engine, cell, asked, args.tokens)
                if expected is not None and tokens != expected:
                    raise RuntimeError(f"{cell}: {name} has other tokens")
                expected = tokens
                if repeat:  # the first is a warm-up
                    times[cell][name].append(tpot)
                    if guesses:
                        after = vars(guesses.counts)
                        sums = counts.setdefault((cell, name), [0.0] * 4)
                        for place, field in enumerate(("proposed", "accepted", "steps", "tokens")):
                            sums[place] += after[field] - before[field]
        print(f"{repeat} of {args.repeats}", file=sys.stderr, flush=True)
    cells: dict[str, Any] = {}
    for cell, by_name in times.items():
        for name, found in by_name.items():
            tpot = statistics.median(found)
            row = {"tpot_ms": round(tpot, 3), "range": [round(min(found), 3), round(max(found), 3)]}
            row["ratio"] = round(statistics.median(by_name["off"]) / tpot, 2)
            if (cell, name) in counts:
                proposed, accepted, steps, tokens = counts[cell, name]
                row |= {"proposed": proposed, "accepted": round(accepted / max(1, proposed), 3)}
                row["step_tokens"] = round(tokens / max(1, steps), 2)
            cells.setdefault(cell, {})[name] = row
            print(json.dumps({"cell": cell, "method": name, **row}), flush=True)
    _, target = build_engine(folder, "auto", EngineConfig(**options))
    _, small = build_engine(draft, "auto", EngineConfig(**options))
    if not (isinstance(target, CpuRunner) and isinstance(small, CpuRunner)):
        raise RuntimeError("this benchmark runs on CPUs")
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(source("textwrap")).ids[:POSITIONS]
    rule = acceptance(target, small, ids)
    print(json.dumps({"acceptance": rule}))
    if args.out is not None:
        result = {"machine": machine(), "cells": cells, "acceptance": rule, "options": vars(args) | {"out": None}}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
