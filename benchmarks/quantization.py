"""The speed of each format of quantized weights, and of KV in int8, against bfloat16 in the same run.

    python benchmarks/checkpoint.py MODEL --gguf smollm2
    python benchmarks/quantization.py MODEL --gguf smollm2 --threads 1 --cpu \\
        --out benchmarks/results/quantization-2-cores.json
    python benchmarks/quantization.py MODEL --formats none,kv-int8 --cells decode_32_2048 --threads 1 --cpu

Steps of every format in turn, then of every one again, and so on, in one process: `decode_N` is a decode step of N
sequences with 128 tokens before each, or as many as `decode_N_TOKENS` says; `prefill_N` the prefill of a prompt. Rates
are tokens a second of wall time, or, with `--cpu`, of CPU time of the stepping thread, which others on the machine
disturb less (then one thread computes). `token_bytes` are those of a token's KV, and so of its hand-off. The quality of
each format is measured by `evaluation.py`.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from steps import Cell, in_turns, ratios
from turns import own_setting, save, spread

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import CacheDtype, EngineConfig, Quantization
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.models import resolve

BASE: Quantization = "none"
KV_INT8, GGUF, GGUF_DENSE = "kv-int8", "gguf", "gguf-dense"
SPECIAL: dict[str, Quantization] = {KV_INT8: BASE, GGUF: BASE, GGUF_DENSE: "dense"}
"""Quantization, as the engine's option has it, of formats that aren't values of it: weights of BASE and KV in int8; a
GGUF file with its weights kept in their bits, and held in bfloat16."""
FORMATS: tuple[str, ...] = tuple(name for name in get_args(Quantization) if name != "dense")
CELLS = ("decode_1", "decode_8", "decode_32", "prefill_512")
TRIES = {"decode_1": 10, "decode_8": 5}
"""Steps of a format before the next format's turn, by cell; 3 in others that decode, 1 in prefill."""
OUT = 64
"""Tokens of a greedy completion."""


def tries(cell: Cell) -> int:
    """Steps of a format before the next format's turn."""
    return 1 if cell.length > 1 else TRIES.get(cell.name, 3)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the speed by cell and format: tokens a second, and their ratio to bfloat16's, repeat by repeat."""
    cells = [Cell.of(name) for name in args.cells]
    room = max(cell.rows * (cell.start + cell.length + 16) for cell in cells)
    runners = {name: runner_of(args, name, room)[0] for name in args.formats}
    for runner in runners.values():
        # Prompts aren't computed first: attention costs as much for any KV, if it isn't denormal.
        runner.pool.tensor.fill_(1)
        if runner.pool.scales is not None:
            runner.pool.scales.fill_(1)
    clock = time.thread_time if args.cpu else time.perf_counter
    found: dict[str, Any] = {}
    for cell, rates in in_turns(runners, cells, args.repeats, tries, clock).items():
        found[cell] = {
            name: {"tokens_per_s": spread(values, 1), "token_bytes": runners[name].layout.token_bytes}
            for name, values in rates.items()
        }
        for name in rates if BASE in rates else ():
            found[cell][name]["of_bfloat16"] = ratios(rates, name, BASE)
    return found


def runner_of(args: argparse.Namespace, name: str, tokens: int) -> tuple[CpuRunner, EngineConfig]:
    """A runner of this format, with a pool of so many tokens.

    Args:
        args: `model`, a folder or name; `gguf`, a file or name, for formats of a GGUF file; `threads`.
    """
    model = resolve(args.gguf if name in (GGUF, GGUF_DENSE) else args.model)
    weights: Quantization = SPECIAL.get(name, name)  # type: ignore[arg-type]  # from argv
    kv: CacheDtype = "int8" if name == KV_INT8 else "auto"
    options = EngineConfig(threads=args.threads, prefix_cache=False, quantization=weights, kv_dtype=kv).on("cpu")
    layout = read_config(model).kv_layout("bfloat16", kv, options.block_size, "NHD")
    options = replace(options, kv_memory_bytes=layout.blocks_for(tokens) * layout.block_bytes)
    return build_cpu_runner(model, "bfloat16", options), options


def completions(runner: CpuRunner, options: EngineConfig, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """OUT greedy tokens after each prompt."""
    engine = engine_on(runner, options)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=OUT, temperature=0.0)
        engine.scheduler.add(Request(str(index), 0, prompt, len(prompt), sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for report in engine.step():
            if report.token is not None:
                tokens[int(report.sequence.request.request_id)].append(report.token)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--formats", type=lambda text: text.split(","), help="all unless given; gguf too with --gguf")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS))
    parser.add_argument("--cpu", action="store_true", help="rates by CPU time; with --threads 1")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.cpu and args.threads != 1:
        parser.error("--cpu counts one thread's time: give --threads 1")
    args.formats = args.formats or [*FORMATS, *([GGUF] if args.gguf else [])]
    result: dict[str, Any] = {**own_setting("torch"), "model": Path(args.model).name, "threads": args.threads}
    result |= {"clock": "cpu" if args.cpu else "wall", "speed": speed(args)}
    if args.out is not None:
        save(args.out, result)
    print(json.dumps(result))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `runner_of` reads, and where results go."""
    parser.add_argument("model", help="folder of a checkpoint in bfloat16")
    parser.add_argument("--gguf", help="a GGUF file of the same model, or smollm2, for the formats gguf and gguf-dense")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the results")


if __name__ == "__main__":
    main()
