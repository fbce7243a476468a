"""KV in int8 against KV in the model's dtype, bfloat16, in the same run: speed, bytes, and what it costs in quality.

    python benchmarks/checkpoint.py MODEL --shape 135m
    python benchmarks/kv_dtype.py MODEL --quality models/pico --out benchmarks/results/kv-dtype-2-cores.json

Speed: decode steps of a batch with one context for all, of both in turn, then of both again, and so on. The clock is
the CPU time of the stepping thread, with one thread, because others on the machine disturb it less than wall time.

Bytes: of a token in a pool, and so of its hand-off; the rest of a frame is a checksum.

Quality: bits per byte of the held-out files of the bundled model's training data, in windows of 512 tokens; cosines of
each token's logits; and greedy completions of prompts from these files: where the first token differs, and in how many.
"""

import argparse
import math
import runpy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from turns import own_setting, save, spread

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import CacheDtype, EngineConfig
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner

KINDS: tuple[CacheDtype, ...] = ("auto", "int8")
WINDOW = 512
PROMPT = 64
GREEDY = SamplingParams(temperature=0.0)


def runner_of(model: Path, kind: CacheDtype, tokens: int) -> tuple[CpuRunner, EngineConfig]:
    """A runner of one thread, with a pool of so many tokens."""
    options = EngineConfig(threads=1, kv_memory_bytes=1, kv_dtype=kind, prefix_cache=False).on("cpu")
    layout = read_config(model).kv_layout("bfloat16", kind, options.block_size, "NHD")
    options = replace(options, kv_memory_bytes=layout.blocks_for(tokens) * layout.block_bytes)
    return build_cpu_runner(model, "bfloat16", options), options


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


def speed(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each kind, and int8's as a multiple of bfloat16's, repeat by repeat."""
    steps = {}
    for kind in KINDS:
        runner, _ = runner_of(model, kind, args.batch * (args.context + 16))
        # Attention costs as much for any numbers, if they aren't denormal.
        runner.pool.tensor.fill_(1)
        if runner.pool.scales is not None:
            runner.pool.scales.fill_(1)
        tokens = np.random.default_rng(0).integers(2, runner.spec.vocab_size, args.batch).astype(np.int32)
        steps[kind] = runner, plan_of(runner, tokens, args.batch, args.context - 1)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(args.repeats + 1):
        for kind, (runner, plan) in steps.items():
            seconds = []
            for _ in range(args.steps):
                start = time.thread_time()
                runner.launch(plan)
                seconds.append(time.thread_time() - start)
            if turn:  # the first one warms caches and buffers
                rates[kind].append(args.batch / min(seconds))
    ratios = [int8 / wide for int8, wide in zip(rates["int8"], rates["auto"], strict=True)]
    bytes_of = {kind: runner.layout.token_bytes for kind, (runner, _) in steps.items()}
    return {
        "batch": args.batch,
        "context": args.context,
        "tokens_per_s": {kind: spread(values, 1) for kind, values in rates.items()},
        "of_bfloat16": spread(ratios),
        "token_bytes": bytes_of,
        "bytes_of_bfloat16": round(bytes_of["int8"] / bytes_of["auto"], 4),
    }


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


def completions(
    runner: CpuRunner, options: EngineConfig, prompts: list[tuple[int, ...]], count: int
) -> list[list[int]]:
    """`count` greedy tokens after each prompt."""
    engine = engine_on(runner, options)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        engine.scheduler.add(Request(str(index), 0, prompt, len(prompt), sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for report in engine.step():
            if report.token is not None:
                tokens[int(report.sequence.request.request_id)].append(report.token)
    return tokens


def quality(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the quality of int8 KV against bfloat16."""
    made = {kind: runner_of(folder, kind, 2**15) for kind in KINDS}
    stream, size = held_out(folder)
    nats, read = dict.fromkeys(KINDS, 0.0), 0
    cosines = []
    starts = np.arange(0, len(stream) - WINDOW - 1, WINDOW)
    for start in starts[:: max(1, len(starts) // args.windows)]:
        window = stream[start : start + WINDOW + 1]
        found = {kind: logits_of(runner, window[:-1]) for kind, (runner, _) in made.items()}
        for kind, logits in found.items():
            nats[kind] += functional.cross_entropy(logits, torch.from_numpy(window[1:]).long(), reduction="sum").item()
        cosines.append(functional.cosine_similarity(found["auto"], found["int8"], -1))
        read += WINDOW
    bits = {kind: value / math.log(2) / (size * read / len(stream)) for kind, value in nats.items()}
    cosine = torch.cat(cosines)
    every = len(stream) // args.prompts
    prompts = [tuple(stream[index * every :][:PROMPT].tolist()) for index in range(args.prompts)]
    wide, int8 = (completions(*made[kind], prompts, args.tokens) for kind in KINDS)
    firsts = [
        next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        for one, other in zip(wide, int8, strict=True)
    ]
    differing = sorted(first for first in firsts if first is not None)
    return {
        "windows": len(cosines),
        "bits_per_byte": {kind: round(value, 5) for kind, value in bits.items()},
        "more_bits_than_bfloat16": round(bits["int8"] / bits["auto"] - 1, 6),
        "logits_cosine": {"mean": round(cosine.mean().item(), 7), "min": round(cosine.min().item(), 6)},
        "greedy": {
            "prompts": len(prompts),
            "tokens": args.tokens,
            "equal": len(prompts) - len(differing),
            "first_difference": differing[0] if differing else None,
            "median_first_difference": differing[len(differing) // 2] if differing else None,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint whose speed is measured")
    parser.add_argument("--quality", type=Path, help="checkpoint of the bundled model's tokenizer and training data")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a kind, before the other's turn; the best counts")
    parser.add_argument("--windows", type=int, default=100, help="of held-out text, spread over it")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each greedy completion")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    result: dict[str, Any] = {**own_setting("torch"), "threads": 1, "clock": "cpu"}
    if args.model is not None:
        result["speed"] = speed(args.model, args)
    if args.quality is not None:
        result["quality"] = quality(args.quality, args)
    print({name: result[name] for name in ("speed", "quality") if name in result})
    if args.out is not None:
        save(args.out, result)


if __name__ == "__main__":
    main()
