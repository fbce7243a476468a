"""Attention over latents, windows, soft caps and sinks on the native CPU kernels, each beside what it replaces.

    python benchmarks/attention.py latent windows --out benchmarks/results/attention-2-cores.json

latent   a decode step of 16 heads (128 numbers and 64 rotated, values of 128) at a context of 8,192: over latents of
         512 numbers with absorbed weights, and over the keys and values of all heads, held as heads of 160 numbers:
         the same bytes and products. Bytes of a token's hand-off, of 16 heads and of 128.
windows  a decode step of 8 sequences at a context of 32,768, 6 layers of 9 heads and 3 KV heads of 64: a window of
         1,024 in 5 of 6 layers, and none; soft caps and sinks in all layers, and none.

What is compared takes turns in one process; ratios are those of each turn. KV is in bfloat16 and random; the layers of
a step don't fit into caches together.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from turns import own_setting, save, spread

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.cpu import latent as latents
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, PagedAttention
from kvrelay.kernels.cpu.library import instruction_set, library
from kvrelay.kernels.cpu.program import Program, Team

HEADS, PLAIN, ROTATED, LATENT, VALUE = 16, 128, 64, 512, 128
CONTEXT = 8192
LAYERS = 4
"""Layers of a step over latents; a fourth of them over the keys and values of all heads, which are as many bytes."""
BLOCK = 16
BATCH, LONG, WINDOW = 8, 32768, 1024
Runs = Mapping[str, Callable[[], object]]


def in_turns(runs: Runs, repeats: int, least: int = 3) -> dict[str, list[float]]:
    """Seconds of each run by turn: the least of some tries, since other processes can only make it longer."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            tries = []
            for _ in range(least):
                start = time.perf_counter()
                run()
                tries.append(time.perf_counter() - start)
            if turn:  # the first one warms caches and buffers
                found[name].append(min(tries))
    return found


def ratios(slow: list[float], fast: list[float]) -> dict[str, float]:
    return spread([one / other for one, other in zip(slow, fast, strict=True)])


def milliseconds(seconds: list[float], layers: int = 1) -> dict[str, float]:
    return spread([1000 * each / layers for each in seconds])


def pool_of(layout: KVLayout, tokens: int) -> KVPool:
    """A pool with random numbers."""
    pool = KVPool(layout, layout.blocks_for(tokens))
    pool.tensor.copy_(torch.randn(pool.tensor[:1].shape).to(torch.bfloat16).expand_as(pool.tensor))
    return pool


def tables_of(rows: int, context: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    blocks = -(-context // BLOCK)
    return np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)


def measure_latent(args: argparse.Namespace, team: Team) -> dict[str, Any]:
    starts, lengths = np.array([CONTEXT - 1]), np.array([1])
    shape = [KVLayout(LAYERS, 1, size, BLOCK, "bfloat16", planes=1) for size in (LATENT, ROTATED)]
    held = [pool_of(layout, CONTEXT) for layout in shape]
    kernels = latents.LatentAttention(team.library, held[0].tensor, held[1].tensor, HEADS, team.threads)
    kernels.plan(starts, lengths, tables_of(1, CONTEXT))
    plain, absorbed = torch.randn(1, HEADS, PLAIN), torch.randn(1, HEADS, LATENT + ROTATED)
    sums, out = torch.zeros(1, HEADS, LATENT), torch.zeros(1, HEADS, VALUE)
    new = torch.randn(1, LATENT), torch.randn(1, ROTATED)
    keys = torch.randn(LAYERS, HEADS, PLAIN, LATENT).to(torch.bfloat16)
    values = torch.randn(LAYERS, HEADS, LATENT, VALUE).to(torch.bfloat16)
    scale = (PLAIN + ROTATED) ** -0.5
    steps: list[Any] = []
    for layer in range(LAYERS):
        steps += [
            (latents.WRITE, kernels.write(layer, layer, *new)),
            (latents.PRODUCTS, kernels.products(plain, keys[layer], absorbed)),
            (latents.ATTEND, kernels.attend(layer, layer, absorbed, sums, scale)),
            (latents.PRODUCTS, kernels.products(sums, values[layer], out)),
        ]
    over_latents = Program(team.library, *steps)
    expanded = KVLayout(1, HEADS, (PLAIN + ROTATED + VALUE) // 2, BLOCK, "bfloat16")
    run, keep = attention_run(team, [pool_of(expanded, CONTEXT)], HEADS, [0], starts, lengths, tables_of(1, CONTEXT))
    found = in_turns({"latents": lambda: team.run(over_latents), "expanded": run}, args.repeats)
    del keep
    times = {"latents": [each / LAYERS for each in found["latents"]], "expanded": found["expanded"]}
    kept = sum(layout.token_bytes for layout in shape) // LAYERS
    return {
        "heads": HEADS,
        "context": CONTEXT,
        "ms_a_layer": {name: milliseconds(values) for name, values in times.items()},
        "expanded_of_latents": ratios(times["expanded"], times["latents"]),
        "bytes_of_a_token": {"latents": kept, "expanded": expanded.token_bytes},
        "bytes_of_expanded": {
            "16 heads": round(kept / expanded.token_bytes, 4),
            "128 heads": round(kept / (128 * (PLAIN + ROTATED + VALUE) * 2), 4),
        },
    }


def attention_run(
    team: Team,
    pools: list[KVPool],
    heads: int,
    windows: list[int],
    starts: Any,
    lengths: Any,
    tables: Any,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[Callable[[], object], object]:
    """A run of all layers' attention, and what must be kept for it."""
    layout = pools[0].layout
    tokens, dim = int(lengths.sum()), layout.head_dim
    qkv, out = torch.randn(tokens, heads + 2 * layout.kv_heads, dim), torch.zeros(tokens, heads, dim)
    steps: list[Any] = []
    attentions = []
    for pool in pools:
        own = windows[: pool.layout.layers]
        windows = windows[pool.layout.layers :]
        attention = PagedAttention(team.library, pool.tensor, heads, own, team.threads)
        attention.plan(starts, lengths, tables)
        attentions.append(attention)
        for layer in range(pool.layout.layers):
            addresses = qkv.data_ptr(), qkv[0].numel(), out.data_ptr(), out[0].numel()
            arguments = attention.args(layer, *addresses, None, 0.0, softcap=softcap, sinks=sinks)
            steps += [(WRITE, arguments), (ATTEND, arguments)]
    program = Program(team.library, *steps)
    return lambda: team.run(program), (qkv, out, attentions, pools)


def measure_windows(args: argparse.Namespace, team: Team) -> dict[str, Any]:
    layers, heads, kv_heads, dim = 6, 9, 3, 64
    starts, lengths = np.full(BATCH, LONG - 1), np.ones(BATCH, np.int64)
    tables = tables_of(BATCH, LONG)
    pool = pool_of(KVLayout(layers, kv_heads, dim, BLOCK, "bfloat16"), BATCH * LONG)
    mixed = [WINDOW] * 5 + [0]
    sinks = torch.randn(heads)
    cases: dict[str, tuple[list[int], float, torch.Tensor | None]] = {
        "full": ([0] * layers, 0.0, None),
        "windows": (mixed, 0.0, None),
        "windows, sinks": (mixed, 0.0, sinks),
        "windows, soft caps": (mixed, 50.0, None),
        "full, sinks": ([0] * layers, 0.0, sinks),
        "full, soft caps": ([0] * layers, 50.0, None),
    }
    runs, kept = {}, []
    for name, (windows, softcap, scores) in cases.items():
        runs[name], keep = attention_run(team, [pool], heads, windows, starts, lengths, tables, softcap, scores)
        kept.append(keep)
    found = in_turns(runs, args.repeats)
    one = PagedAttention(team.library, pool.tensor, heads, mixed, team.threads)
    two = [
        PagedAttention(team.library, pool.tensor[:, :count], heads, windows, team.threads)
        for count, windows in ((1, [0]), (5, [WINDOW] * 5))
    ]
    plans = in_turns(
        {
            "one group": lambda: one.plan(starts, lengths, tables),
            "two groups": lambda: [each.plan(starts, lengths, tables) for each in two],
        },
        args.repeats,
        20,
    )
    return {
        "batch": BATCH,
        "context": LONG,
        "window": WINDOW,
        "ms_a_step": {name: milliseconds(values) for name, values in found.items()},
        "full_of_windows": ratios(found["full"], found["windows"]),
        "cost": {name: ratios(values, found[name.partition(",")[0]]) for name, values in found.items() if "," in name},
        "plan_ms": {name: milliseconds(values) for name, values in plans.items()},
        "plan_of_two_groups": ratios(plans["two groups"], plans["one group"]),
    }


MODES = {"latent": measure_latent, "windows": measure_windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results; other modes' figures in it are kept")
    args = parser.parse_args()
    kernels = library()
    if kernels is None:
        parser.error("the native CPU kernels aren't available here")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    result = {**before, **own_setting("torch", "transformers"), "threads": args.threads}
    result["instruction set"] = instruction_set(kernels)
    team = Team(kernels, args.threads)
    with torch.inference_mode():
        for mode in args.modes:
            result[mode] = MODES[mode](args, team)
            print(json.dumps({mode: result[mode]}), flush=True)
            if args.out is not None:
                save(args.out, result)


if __name__ == "__main__":
    main()
