"""The speed of models with experts, latents and states: in kvrelay's own way, and in others, on a CPU.

    python benchmarks/architectures.py [--models gpt_oss,mamba2] [--cells prefill_512] [--long] [--prefix] [--out FILE]

Models of random weights in the shape of their class, of about 135m, in bfloat16. Each runs in several ways in one
process, in turns:

    experts   `fast`: the fast path; `general`: the general path, with native products of experts; `before`: the same
              with transformers' products of experts
    others    `flat`: as it is served; `gather`: without any native kernels but products: keys and values are
              expanded in each step, and norms and states are computed by transformers' functions in plain torch

`prefill_N` is the prefill of a prompt, `decode_N` a decode step of N sequences with 128 tokens before each; figures are
tokens a second, and the ratio of each turn. Where other work shares the machine, start it at real-time priority (`chrt
--fifo 1 python benchmarks/architectures.py`, as root), or take

    --cpu       seconds of the process's CPU time; with `--threads 1`, because threads also spend it on waiting

Other figures:

    --long      decode steps of 8 sequences at 16k tokens: a hybrid of three layers with states to one with attention,
                against Llama of the same size on the fast path; and the bytes that a hand-off of 16k tokens takes
    --prefix    the time to the first token of a prompt of 4k tokens, and of the same one again
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from checkpoint import EXPERTS, write, write_experts
from steps import Cell, in_turns, ratios
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from turns import earlier, own_setting, save, spread

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.general import choose
from kvrelay.engine.models.general.norms import swap_norms
from kvrelay.engine.request import Request, SamplingParams

VOCABULARY = 49152
LAYERS = 24
HYBRID = (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4)
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 576, "tie_word_embeddings": True}
MAMBA = {"mamba_n_heads": 18, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2}
LATENTS = {
    **COMMON,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 9,
    "q_lora_rank": None,
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "intermediate_size": 1536,
    "first_k_dense_replace": 30,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **COMMON,
        **ATTENTION,
        "num_hidden_layers": LAYERS,
        "layer_types": HYBRID,
        "intermediate_size": 1536,
        "mlp_only_layers": list(range(LAYERS)),
        "num_experts": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "mamba2": {
        **COMMON,
        # In more layers of random weights, the roundings of bfloat16 grow beyond what the check at the start allows.
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_heads": 32,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "expand": 2,
    },
    "bamba": {
        **COMMON,
        **ATTENTION,
        **MAMBA,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 1536,
        "attn_layer_indices": list(range(3, LAYERS, 4)),
    },
    "granitemoehybrid": {
        **COMMON,
        **ATTENTION,
        **MAMBA,
        "num_hidden_layers": LAYERS,
        "layer_types": HYBRID,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 1536,
        "shared_intermediate_size": 1536,
    },
    "nemotron_h": {
        **COMMON,
        **ATTENTION,
        "layers_block_type": (["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"]) * 6,
        "mamba_num_heads": 18,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 1,
        "intermediate_size": 2304,
    },
    "falcon_h1": {
        **COMMON,
        **ATTENTION,
        **MAMBA,
        "mamba_d_ssm": 1152,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 1024,
    },
    "lfm2": {
        **COMMON,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": LAYERS,
        "layer_types": (["conv"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "intermediate_size": 1536,
        "block_auto_adjust_ff_dim": False,
    },
    "rwkv": {**COMMON, "hidden_size": 768, "num_hidden_layers": 12, "context_length": 1024},
    "kimi_linear": {
        **LATENTS,
        "num_hidden_layers": LAYERS,
        "layer_types": HYBRID,
        "mlp_layer_types": ["dense"] * LAYERS,
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek_v2": {**LATENTS, "topk_method": "greedy"},
    "deepseek_v3": LATENTS,
}
"""Fields of each model type's config."""
CELLS = ("prefill_512", "decode_1", "decode_8")
ROWS = 8
"""Sequences of the largest batch; slots of states take memory for each."""
LONG = 16384
PREFIX = 4096


def checkpoint(folder: Path, name: str, positions: int = 8192) -> int:
    """Writes a checkpoint of a shape; returns the number of its weights."""
    if name in EXPERTS:
        return write_experts(folder, name, "moe-135m")
    config_class = CONFIG_MAPPING[name]
    known = config_class().to_dict()
    limits = {"max_position_embeddings": positions} if "max_position_embeddings" in known else {}
    torch.manual_seed(0)
    config = config_class(**SHAPES[name], **limits)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


@contextmanager
def without_kernels() -> Iterator[None]:
    """Context in which the general path has no native kernels but products: modules of several products are computed
    product by product, with torch's norms."""
    runner, ways = "kvrelay.engine.runner.general", ("gather", "gather, whole prompts", "again")
    with (
        patch.object(choose, "WAYS", tuple(way for way in choose.WAYS if way[0] in ways)),
        patch(f"{runner}.fuse", lambda *given: 0),
        patch(f"{runner}.swap_norms", lambda model, team: swap_norms(model)),
    ):
        yield


def ways_of(name: str) -> dict[str, tuple[AbstractContextManager[object], dict[str, Any]]]:
    """The ways in which a model is run: within which it is built, and with which options."""
    if name not in EXPERTS:
        flat = patch.object(choose, "WAYS", tuple(way for way in choose.WAYS if way[0] == "flat"))
        return {"flat": (flat, {}), "gather": (without_kernels(), {})}
    general = {"model_path": "general"}
    plain = patch("kvrelay.engine.runner.general.swap_experts", lambda *given: 0)
    return {
        "fast": (nullcontext(), {"model_path": "fast"}),
        "general": (nullcontext(), general),
        "before": (plain, general),
    }


def options(threads: int, tokens: int, **others: Any) -> EngineConfig:
    """Options of an engine with room for so many tokens of a sequence of 135m."""
    sizes = {"kv_memory_bytes": tokens * 2**15 + 2**29, "max_sequences": ROWS}
    given = {"threads": threads, "prefix_cache": False, **sizes, **others}
    return EngineConfig(**given).on("cpu")


def clear(runner: Any) -> None:
    """Fills the pools with zeros: attention and states cost as much for any numbers that aren't denormal."""
    for pool in getattr(runner, "pools", (runner.pool,)):
        pool.bytes.zero_()


def measured(runners: dict[str, Any], names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of each cell, and ratios of the first runner to the others, with each of which it takes turns alone: how
    many threads torch has depends on the runner, and to change their number slows the next steps."""
    first, *others = runners
    found: dict[str, Any] = {name: {} for name in names}
    cells = [Cell.of(name) for name in names]
    clock = time.process_time if args.cpu else time.perf_counter
    for name in others or [first]:
        pair = {each: runners[each] for each in (first, name)}
        of_cells = in_turns(pair, cells, args.repeats, lambda cell: 1 if cell.length > 1 else 3, clock)
        for cell, rates in of_cells.items():
            for each, values in rates.items():
                found[cell].setdefault(each, {"tokens_per_s": spread(values, 1)})
            if name != first:
                found[cell][f"{first} / {name}"] = ratios(rates, first, name)
    return found


def short(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each model in both ways."""
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            weights = checkpoint(Path(folder), name)
            runners = {}
            for way, (within, given) in ways_of(name).items():
                if args.ways and way not in args.ways:
                    continue
                with within:
                    _, runner = build_engine(Path(folder), "bfloat16", options(args.threads, 4096, **given))
                clear(runner)
                runners[way] = runner
        how = {"threads": args.threads, "cpu_time": args.cpu}
        yield (
            name,
            {"weights": weights, **{cell: how | found for cell, found in measured(runners, args.cells, args).items()}},
        )


def long(args: argparse.Namespace) -> dict[str, Any]:
    """A hybrid and Llama at LONG tokens."""
    runners: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    for name in ("qwen3_next", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            sizes[name] = (
                write(Path(folder), "135m", 2 * LONG) if name == "llama" else checkpoint(Path(folder), name, 2 * LONG)
            )
            room = {"llama": 8 * (LONG + 64) * 23040, "qwen3_next": 8 * (LONG + 64) * 3072 + 2**30}[name]
            given = options(args.threads, 0, kv_memory_bytes=room)
            _, runner = build_engine(Path(folder), "bfloat16", given)
            runners[name] = runner
        clear(runner)
        layout = getattr(runner, "cache_layout", None)
        tracks = [("full", runner.layout)] if layout is None else [(layout.groups[g].kind, t) for g, t in layout.tracks]
        bytes_of[name] = sum(
            track.block_bytes if kind == "state" else LONG * track.token_bytes for kind, track in tracks
        )
    found = measured(runners, [f"decode_8_{LONG}"], args)
    ratio = bytes_of["qwen3_next"] / bytes_of["llama"]
    return {"weights": sizes, **found, "handoff_bytes_16384": {**bytes_of, "ratio": round(ratio, 4)}}


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of PREFIX tokens and a few, first and again."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), "qwen3_next")
        given = replace(options(args.threads, 0), kv_memory_bytes=2**30, prefix_cache=True)
        engine, _ = build_engine(Path(folder), "bfloat16", given)
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {"first": [], "again": []}
    for turn in range(args.repeats):
        prompt = tuple(random.integers(2, VOCABULARY, PREFIX + 16).tolist())
        for name in times:
            tokens = (*prompt[:PREFIX], *random.integers(2, VOCABULARY, 16).tolist()) if name == "again" else prompt
            start = time.perf_counter()
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            engine.scheduler.add(Request(f"{turn} {name}", 0, tokens, len(tokens), sampling))
            while engine.has_work:
                engine.step()
            times[name].append(time.perf_counter() - start)
    found = {name: {"seconds": spread(values, 4)} for name, values in times.items()}
    return {**found, "again / first": ratios(times, "again", "first")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*EXPERTS, *SHAPES])
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS))
    parser.add_argument("--ways", type=lambda text: text.split(","), help="some of them: before takes minutes")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file, whose other figures stay as they are")
    args = parser.parse_args()
    result = earlier(args.out) | own_setting("torch", "transformers")
    result.setdefault("threads", args.threads)
    figures: Iterator[tuple[str, dict[str, Any]]] = short(args)
    if args.long or args.prefix:
        asked = {"long": long} if args.long else {}
        asked |= {"prefix": prefix} if args.prefix else {}
        figures = ((name, measure(args)) for name, measure in asked.items())
    for name, found in figures:
        figure = result.setdefault("figures", {}).setdefault(name, {})
        figure |= found
        print(json.dumps({name: found}), flush=True)
        if args.out is not None:
            save(args.out, result)


if __name__ == "__main__":
    main()
