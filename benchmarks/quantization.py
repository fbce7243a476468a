"""Each format of quantized weights: speed, and what it costs in quality, against bfloat16 in the same run.

    python benchmarks/checkpoint.py MODEL --shape 135m
    python benchmarks/quantization.py MODEL --quality models/pico --out benchmarks/results/quantization.json --markdown

Speed: steps of every format in turn, then of every one again, and so on, in one process: decode steps of a batch with
128 tokens before each, and the prefill of a prompt. Rates are tokens a second of wall time, or, with `--cpu`, of CPU
time of the stepping thread, which others on the machine disturb less (then one thread computes).

Quality: bits per byte of the held-out files of the bundled model's training data, in windows of 512 tokens, and the
mean Kullback-Leibler divergence, in nats a token, of each next-token distribution from bfloat16's.
"""

import argparse
import math
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from turns import own_setting, save, spread

from kvrelay.engine.config import EngineConfig, Quantization
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner

FORMATS: tuple[Quantization, ...] = get_args(Quantization)
BASE = "none"
CONTEXT = 128
"""Tokens of context before a decode step."""
STEPS = {"decode_1": 10, "decode_8": 5, "decode_32": 3, "prefill_512": 1}
"""Steps of a format before the next format's turn, by cell."""
WINDOW = 512


class Steps:
    """The steps of one cell, with a fixed plan. Prompts aren't computed first: KV of any values costs as much."""

    def __init__(self, runner: CpuRunner, cell: str) -> None:
        self._runner = runner
        kind, count = cell.split("_")
        rows, self.tokens = (1, int(count)) if kind == "prefill" else (int(count), int(count))
        length, start = self.tokens // rows, 0 if kind == "prefill" else CONTEXT
        blocks = runner.layout.blocks_for(start + length)
        self._plan = StepPlan(
            step=0,
            handles=tuple(range(rows)),
            tokens=np.random.default_rng(0).integers(2, runner.spec.vocab_size, self.tokens).astype(np.int32),
            starts=np.full(rows, start, np.int32),
            lengths=np.full(rows, length, np.int32),
            block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
            sample=np.ones(rows, np.bool_),
            sampling=(SamplingParams(temperature=0.0),) * rows,
            generated=np.zeros(rows, np.int32),
        )

    def seconds(self, clock: Callable[[], float], count: int) -> float:
        """Seconds of one step: the least of `count` tries, since other processes can only make a step longer."""
        found = []
        for _ in range(count):
            start = clock()
            self._runner.launch(self._plan)
            found.append(clock() - start)
        return min(found)


def speed(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the speed by cell and format: tokens a second, and their ratio to bfloat16's, repeat by repeat."""
    clock = time.thread_time if args.cpu else time.perf_counter
    runners = {name: runner_of(model, name, args.threads) for name in args.formats}
    cells: dict[str, Any] = {}
    for cell in args.cells:
        steps = {name: Steps(runner, cell) for name, runner in runners.items()}
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(args.repeats + 1):
            for name, of_format in steps.items():
                seconds = of_format.seconds(clock, STEPS[cell])
                if turn:  # the first one warms caches and buffers
                    rates[name].append(of_format.tokens / seconds)
        cells[cell] = {}
        for name, values in rates.items():
            cells[cell][name] = {"tokens_per_s": spread(values, 1)}
            if BASE in rates:
                ratios = [value / other for value, other in zip(values, rates[BASE], strict=True)]
                cells[cell][name]["of_bfloat16"] = spread(ratios)
    return cells


def runner_of(model: Path, quantization: Quantization, threads: int) -> CpuRunner:
    options = EngineConfig(threads=threads, kv_memory_bytes=2**28, quantization=quantization)
    return build_cpu_runner(model, "bfloat16", options)


def held_out(folder: Path) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """The held-out files as tokens, and their number of bytes."""
    train = runpy.run_path(str(Path(__file__).parents[1] / "models" / "train.py"))
    texts = [text for path, text in train["library_files"]().items() if train["is_held_out"](path)]
    stream = train["token_stream"](Tokenizer.from_file(str(folder / "tokenizer.json")), texts)
    return stream, sum(len(text.encode()) for text in texts)


def window_logits(runner: CpuRunner, tokens: Tensor) -> Tensor:
    """float32 [tokens, vocabulary] of one window, without context before it."""
    blocks = runner.layout.blocks_for(len(tokens))
    plan = StepPlan(
        step=0,
        handles=(0,),
        tokens=tokens.numpy().astype(np.int32),
        starts=np.zeros(1, np.int32),
        lengths=np.array([len(tokens)], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        sample=np.array([True]),
        sampling=(SamplingParams(temperature=0.0),),
        generated=np.zeros(1, np.int32),
    )
    with torch.inference_mode():
        return runner.model.logits(runner.forward(plan).clone()).clone()


def windows(stream: np.ndarray[Any, np.dtype[np.int64]], most: int) -> Iterator[Tensor]:
    """[up to WINDOW + 1] tokens; the last of each is only predicted."""
    for index, start in enumerate(range(0, len(stream) - 1, WINDOW)):
        if not most or index < most:
            yield torch.from_numpy(stream[start : start + WINDOW + 1])


def quality(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the quality by format: bits per byte, their excess over bfloat16's, and the divergence from it."""
    runners = {name: runner_of(folder, name, args.threads) for name in dict.fromkeys((BASE, *args.formats))}
    stream, size = held_out(folder)
    nats, divergences, tokens = dict.fromkeys(runners, 0.0), dict.fromkeys(runners, 0.0), 0
    for window in windows(stream, args.windows):
        tokens += len(window) - 1
        base = functional.log_softmax(window_logits(runners[BASE], window[:-1]), -1)
        for name, runner in runners.items():
            found = base if name == BASE else functional.log_softmax(window_logits(runner, window[:-1]), -1)
            nats[name] += functional.nll_loss(found, window[1:], reduction="sum").item()
            divergences[name] += functional.kl_div(found, base, log_target=True, reduction="sum").item()
    # Of some windows only, bytes are those of as large a share of the files.
    read = size * tokens / (len(stream) - 1)
    bits = {name: value / math.log(2) / read for name, value in nats.items()}
    return {
        name: {
            "bits_per_byte": round(value, 5),
            "more_than_bfloat16": round(value / bits[BASE] - 1, 5),
            "divergence": round(divergences[name] / tokens, 6),
        }
        for name, value in bits.items()
    }


def markdown(result: dict[str, Any]) -> str:
    """A row for each format: bits per byte, divergence, and its speed as a multiple of bfloat16's."""
    cells, losses = result.get("speed", {}), result.get("quality", {})
    names = dict.fromkeys([*losses, *(name for cell in cells.values() for name in cell)])
    lines = [
        "| format | bits per byte | divergence | " + " | ".join(cells) + " |",
        "|---" * (3 + len(cells)) + "|",
    ]
    for name in names:
        loss = losses.get(name)
        columns = ["-", "-"]
        if loss is not None:
            columns = [f"{loss['bits_per_byte']:.4f} ({loss['more_than_bfloat16']:+.2%})", f"{loss['divergence']:.5f}"]
        for cell in cells.values():
            found = cell.get(name)
            columns.append(
                "-" if found is None else "{median:.2f}x ({min:.2f}-{max:.2f})".format(**found["of_bfloat16"])
            )
        lines.append(f"| {name} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint whose speed is measured")
    parser.add_argument("--quality", type=Path, help="checkpoint of the bundled model's tokenizer and training data")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--windows", type=int, default=0, help="of held-out text; 0 is all")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--markdown", action="store_true", help="print a table")
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
    print(markdown(result))


if __name__ == "__main__":
    main()
