"""Each format of quantized weights, and KV in int8: speed, and what it costs in quality, against bfloat16 in the same
run.

    python benchmarks/checkpoint.py MODEL --shape 135m
    python benchmarks/quantization.py MODEL --quality models/pico --out benchmarks/results/quantization.json
    python benchmarks/quantization.py MODEL --quality models/pico --formats none,kv-int8 --cells decode_32_2048 \\
        --threads 1 --cpu --prompts 200 --out benchmarks/results/kv-dtype-2-cores.json

Speed: steps of every format in turn, then of every one again, and so on, in one process: `decode_N` is a decode step of
N sequences with 128 tokens before each, or as many as `decode_N_TOKENS` says; `prefill_N` the prefill of a prompt.
Rates are tokens a second of wall time, or, with `--cpu`, of CPU time of the stepping thread, which others on the
machine disturb less (then one thread computes). `token_bytes` are those of a token's KV, and so of its hand-off.

Quality: bits per byte of the held-out files of the bundled model's training data, in windows of 512 tokens; the mean
Kullback-Leibler divergence, in nats a token, of each next-token distribution from bfloat16's; cosines of each token's
logits; and how many greedy completions of prompts from these files are equal.
"""

import argparse
import json
import math
import runpy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from turns import own_setting, save, spread

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import CacheDtype, EngineConfig, Quantization
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner

BASE: Quantization = "none"
KV_INT8 = "kv-int8"
FORMATS: tuple[str, ...] = get_args(Quantization)
"""Formats of weights. KV_INT8 has those of BASE, and KV in int8."""
CONTEXT = 128
"""Tokens of context before a decode step."""
CELLS = ("decode_1", "decode_8", "decode_32", "prefill_512")
STEPS = {"decode_1": 10, "decode_8": 5}
"""Steps of a format before the next format's turn, by cell; 3 in others that decode, 1 in prefill."""
WINDOW, PROMPT = 512, 64
GREEDY = SamplingParams(temperature=0.0)


def plan_of(runner: CpuRunner, tokens: NDArray[np.int32], rows: int, start: int) -> StepPlan:
    """A step of rows of equal length with the same context."""
    length = len(tokens) // rows
    blocks = runner.layout.blocks_for(start + length)
    return StepPlan(
        step=0,
        handles=tuple(range(rows)),
        tokens=tokens,
        starts=np.full(rows, start, np.int32),
        lengths=np.full(rows, length, np.int32),
        block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        sample=np.ones(rows, np.bool_),
        sampling=(GREEDY,) * rows,
        generated=np.zeros(rows, np.int32),
    )


def shape_of(cell: str) -> tuple[int, int, int]:
    """Rows of a cell's steps, their tokens together, and tokens before each."""
    kind, count, *context = cell.split("_")
    return (
        (1, int(count), 0) if kind == "prefill" else (int(count), int(count), int(context[0]) if context else CONTEXT)
    )


class Steps:
    """The steps of one cell, with a fixed plan. Prompts aren't computed first: KV of any values costs as much."""

    def __init__(self, runner: CpuRunner, cell: str) -> None:
        self._runner = runner
        rows, self.tokens, start = shape_of(cell)
        # Attention costs as much for any numbers, if they aren't denormal.
        runner.pool.tensor.fill_(1)
        if runner.pool.scales is not None:
            runner.pool.scales.fill_(1)
        tokens = np.random.default_rng(0).integers(2, runner.spec.vocab_size, self.tokens).astype(np.int32)
        self._plan = plan_of(runner, tokens, rows, start)
        self._count = 1 if rows < self.tokens else STEPS.get(cell, 3)

    def seconds(self, clock: Callable[[], float]) -> float:
        """Seconds of one step: the least of some tries, since other processes can only make a step longer."""
        found = []
        for _ in range(self._count):
            start = clock()
            self._runner.launch(self._plan)
            found.append(clock() - start)
        return min(found)


def speed(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the speed by cell and format: tokens a second, and their ratio to bfloat16's, repeat by repeat."""
    clock = time.thread_time if args.cpu else time.perf_counter
    shapes = map(shape_of, args.cells)
    tokens = max(rows * (start + tokens // rows + 16) for rows, tokens, start in shapes)
    runners = {name: runner_of(model, name, args.threads, tokens)[0] for name in args.formats}
    cells: dict[str, Any] = {}
    for cell in args.cells:
        steps = {name: Steps(runner, cell) for name, runner in runners.items()}
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(args.repeats + 1):
            for name, of_format in steps.items():
                seconds = of_format.seconds(clock)
                if turn:  # the first one warms caches and buffers
                    rates[name].append(of_format.tokens / seconds)
        cells[cell] = {}
        for name, values in rates.items():
            cells[cell][name] = {"tokens_per_s": spread(values, 1), "token_bytes": runners[name].layout.token_bytes}
            if BASE in rates:
                ratios = [value / other for value, other in zip(values, rates[BASE], strict=True)]
                cells[cell][name]["of_bfloat16"] = spread(ratios)
    return cells


def runner_of(model: Path, name: str, threads: int, tokens: int) -> tuple[CpuRunner, EngineConfig]:
    """A runner of this format, with a pool of so many tokens."""
    weights: Quantization = BASE if name == KV_INT8 else name  # type: ignore[assignment]  # from argv
    kv: CacheDtype = "int8" if name == KV_INT8 else "auto"
    options = EngineConfig(threads=threads, prefix_cache=False, quantization=weights, kv_dtype=kv).on("cpu")
    layout = read_config(model).kv_layout("bfloat16", kv, options.block_size, "NHD")
    options = replace(options, kv_memory_bytes=layout.blocks_for(tokens) * layout.block_bytes)
    return build_cpu_runner(model, "bfloat16", options), options


def held_out(folder: Path) -> tuple[NDArray[np.int32], int]:
    """The held-out files as tokens, and their number of bytes."""
    train = runpy.run_path(str(Path(__file__).parents[1] / "models" / "train.py"))
    texts = [text for path, text in train["library_files"]().items() if train["is_held_out"](path)]
    stream = train["token_stream"](Tokenizer.from_file(str(folder / "tokenizer.json")), texts)
    return np.asarray(stream, np.int32), sum(len(text.encode()) for text in texts)


def logits_of(runner: CpuRunner, tokens: NDArray[np.int32]) -> Tensor:
    """float32 [tokens, vocabulary] of one window, without context before it."""
    with torch.inference_mode():
        return runner.model.logits(runner.forward(plan_of(runner, tokens, 1, 0)).clone()).float().clone()


def completions(runner: CpuRunner, options: EngineConfig, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """PROMPT greedy tokens after each prompt."""
    engine = engine_on(runner, options)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=PROMPT, temperature=0.0)
        engine.scheduler.add(Request(str(index), 0, prompt, len(prompt), sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for report in engine.step():
            if report.token is not None:
                tokens[int(report.sequence.request.request_id)].append(report.token)
    return tokens


def first_differences(found: list[list[int]], right: list[list[int]]) -> list[int]:
    """The place of the first token that differs, of each completion that isn't equal, in ascending order."""
    pairs = zip(found, right, strict=True)
    places = [
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), -1) for pair in pairs
    ]
    return sorted(place for place in places if place >= 0)


def quality(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the quality by format, as the module's docstring says."""
    made = {name: runner_of(folder, name, args.threads, 2**15) for name in dict.fromkeys((BASE, *args.formats))}
    runners = {name: runner for name, (runner, _) in made.items()}
    stream, size = held_out(folder)
    nats, divergences, read = dict.fromkeys(runners, 0.0), dict.fromkeys(runners, 0.0), 0
    cosines: dict[str, list[Tensor]] = {name: [] for name in runners}
    starts = np.arange(0, len(stream) - 1, WINDOW)
    for start in starts[:: max(1, len(starts) // args.windows) if args.windows else 1]:
        window = stream[start : start + WINDOW + 1]
        following = torch.from_numpy(window[1:]).long()
        read += len(following)
        base = logits_of(runners[BASE], window[:-1])
        for name, runner in runners.items():
            logits = base if name == BASE else logits_of(runner, window[:-1])
            logs, right = logits.log_softmax(-1), base.log_softmax(-1)
            nats[name] += functional.nll_loss(logs, following, reduction="sum").item()
            divergences[name] += functional.kl_div(logs, right, log_target=True, reduction="sum").item()
            cosines[name].append(functional.cosine_similarity(base, logits, -1))
    # Of some windows only, bytes are those of as large a share of the files.
    bits = {name: value / math.log(2) / (size * read / (len(stream) - 1)) for name, value in nats.items()}
    every = len(stream) // max(1, args.prompts)
    prompts = [tuple(stream[index * every :][:PROMPT].tolist()) for index in range(args.prompts)]
    answers = {name: completions(runner, options, prompts) for name, (runner, options) in made.items()}
    return {
        name: {
            "bits_per_byte": round(value, 5),
            "more_than_bfloat16": round(value / bits[BASE] - 1, 6),
            "divergence": round(divergences[name] / read, 6),
            "cosine": {"mean": round(torch.cat(cosines[name]).mean().item(), 7)}
            | {"min": round(torch.cat(cosines[name]).min().item(), 6)},
            "completions": len(prompts),
            "first_differences": first_differences(answers[name], answers[BASE]),
        }
        for name, value in bits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint whose speed is measured")
    parser.add_argument("--quality", type=Path, help="checkpoint of the bundled model's tokenizer and training data")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--windows", type=int, default=0, help="of held-out text, spread over it; 0 is all")
    parser.add_argument("--prompts", type=int, default=0, help="of greedy completions")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.cpu and args.threads != 1:
        parser.error("--cpu counts one thread's time: give --threads 1")
    result: dict[str, Any] = {**own_setting("torch"), "threads": args.threads, "clock": "cpu" if args.cpu else "wall"}
    if args.model is not None:
        result["speed"] = speed(args.model, args)
    if args.quality is not None:
        result["quality"] = quality(args.quality, args)
    if args.out is not None:
        save(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
