"""The requests of a benchmark: synthetic ones, those of a trace, or those of a dataset."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.cli.bench.options import ArrivalOptions, WorkloadOptions
from kvrelay.cluster.errors import UsageError

TRACE_BLOCK_TOKENS = 512
"""Tokens of the block that each of a trace's `hash_ids` names."""
SHAREGPT_LEAST_TOKENS, SHAREGPT_MOST_INPUT, SHAREGPT_MOST_TOKENS = 4, 1024, 2048
"""Conversations that are used: as `vllm bench serve` chooses them."""
TOKENIZERS = 16
"""Texts that are converted to tokens at once."""

SAMPLE_TEXT = """
The quick brown fox jumps over the lazy dog. A cluster serves a language model: one worker reads the prompt and
computes its keys and values, another one continues the text from there. Numbers such as 3, 14, 159 and 2653, names like
Anna, Boris, Chen and Dalia, and words for time, weather, water, stone, music, light and trade make up this paragraph.
def average(values): return sum(values) / len(values) if values else None
for index, value in enumerate(sorted({"b": 2, "a": 1}.items())): print(index, value, "done", sep="; ")
class Queue: pass  # import os, sys, json, math; while True: try: x += 1; except ValueError as error: raise
"""
"""Synthetic prompts are random sequences of its tokens: all of them are ordinary ones, in every vocabulary."""

Tokenize = Callable[[str], Awaitable[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    output_tokens: int
    at: float | None = None
    """Seconds after the start, by the trace; None elsewhere."""


async def asks(options: WorkloadOptions, tokenize: Tokenize, seed: int) -> list[Ask]:
    """The requests, the same ones for equal options, seeds and tokenizers.

    Raises:
        UsageError: a file can't be used.
    """
    rng = np.random.default_rng([seed, 1])
    if options.dataset is not None:
        return await _dataset(options.dataset, options, tokenize, rng)
    vocabulary = np.unique(np.asarray(await tokenize(SAMPLE_TEXT), dtype=np.int64))
    maker = Prompts(vocabulary, seed)
    if options.trace is not None:
        return _trace(options.trace, options, maker)
    count = options.num_prompts
    inputs, outputs = options.input_tokens.draw(count, rng), options.output_tokens.draw(count, rng)
    shared = maker.tokens((0,), options.shared_prefix)
    return [
        Ask((shared + maker.tokens((1, at), max(0, length - len(shared))))[: max(length, len(shared))], output)
        for at, (length, output) in enumerate(zip(inputs, outputs, strict=True))
    ]


class Prompts:
    """Random sequences of ordinary tokens, each by its key."""

    def __init__(self, vocabulary: Any, seed: int) -> None:
        """`vocabulary`: int64 array of the tokens to use."""
        self._vocabulary = vocabulary
        self._seed = seed

    def tokens(self, key: Sequence[int], count: int) -> tuple[int, ...]:
        """The first `count` tokens of the sequence with this key."""
        rng = np.random.default_rng([self._seed, *key])
        return tuple(int(token) for token in rng.choice(self._vocabulary, count))


def _trace(path: Path, options: WorkloadOptions, maker: Prompts) -> list[Ask]:
    scale = options.length_scale
    block = max(1, round(TRACE_BLOCK_TOKENS * scale))
    found = []
    for number, entry in _json_lines(path, options.num_prompts):
        try:
            at = float(entry["timestamp"]) / 1000.0
            length = max(1, round(int(entry["input_length"]) * scale))
            output = max(1, round(int(entry["output_length"]) * scale))
            blocks = [int(each) for each in entry.get("hash_ids", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"--trace {path}, line {number}: {type(error).__name__} {error}; allowed: timestamp (ms), input_length "
                "and output_length as numbers, and hash_ids as a list of integers"
            ) from None
        prompt: tuple[int, ...] = ()
        for each in blocks[: -(-length // block)]:
            prompt += maker.tokens((3, each), block)
        if len(prompt) < length:
            prompt += maker.tokens((4, number), length - len(prompt))
        found.append(Ask(prompt[:length], output, at))
    if not found:
        raise UsageError(f"--trace {path}: it is empty")
    found.sort(key=lambda ask: ask.at or 0.0)
    first = found[0].at or 0.0
    return [replace(ask, at=(ask.at or 0.0) - first) for ask in found]


def _json_lines(path: Path, most: int) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            taken = 0
            for number, line in enumerate(lines, 1):
                if line.strip() and taken < most:
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise UsageError(f"--trace {path}, line {number}: allowed: a JSON object")
                    taken += 1
                    yield number, entry
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--trace {path}: not JSON lines: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--dataset {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--dataset {path}: not UTF-8") from None


async def _dataset(path: Path, options: WorkloadOptions, tokenize: Tokenize, rng: np.random.Generator) -> list[Ask]:
    text = await asyncio.to_thread(_read, path)
    if text.lstrip().startswith("["):
        return await _sharegpt(path, text, options.num_prompts, tokenize, rng)
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UsageError(f"--dataset {path}: it has no prompt")
    chosen = [prompts[at % len(prompts)] for at in _order(len(prompts), options.num_prompts, rng)]
    outputs = options.output_tokens.draw(len(chosen), rng)
    return [Ask(prompt, output) for prompt, output in zip(chosen, outputs, strict=True)]


async def _sharegpt(path: Path, text: str, count: int, tokenize: Tokenize, rng: np.random.Generator) -> list[Ask]:
    """The first turn of each conversation is the prompt, and the second one gives the completion's length."""
    try:
        entries = json.loads(text)
        turns = [[str(turn["value"]) for turn in entry["conversations"][:2]] for entry in entries]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'--dataset {path}: allowed: text lines, or a JSON list of {{"conversations": [{{"value": ...}}, ...]}}'
        ) from None
    pairs = [(turn[0], turn[1]) for turn in turns if len(turn) == 2 and all(turn)]
    gate = asyncio.Semaphore(TOKENIZERS)

    async def length(each: str) -> int:
        async with gate:
            return len(await tokenize(each))

    found: list[Ask] = []
    order = _order(len(pairs), len(pairs), rng)
    for start in range(0, len(order), TOKENIZERS):
        chosen = [pairs[at] for at in order[start : start + TOKENIZERS]]
        lengths = await asyncio.gather(*(length(each) for pair in chosen for each in pair))
        for (prompt, _), given, wanted in zip(chosen, lengths[::2], lengths[1::2], strict=True):
            short = min(given, wanted) < SHAREGPT_LEAST_TOKENS
            if not short and given <= SHAREGPT_MOST_INPUT and given + wanted <= SHAREGPT_MOST_TOKENS:
                found.append(Ask(prompt, wanted))
        if len(found) >= count:
            return found[:count]
    if not found:
        raise UsageError(
            f"--dataset {path}: no conversation has two turns of {SHAREGPT_LEAST_TOKENS} tokens or more, of which the "
            f"first one has up to {SHAREGPT_MOST_INPUT} and both together up to {SHAREGPT_MOST_TOKENS}"
        )
    return [found[at % len(found)] for at in range(count)]


def _order(known: int, count: int, rng: np.random.Generator) -> list[int]:
    """Indices of `count` prompts, each of the known ones as often as any other."""
    shuffled = [int(at) for at in rng.permutation(known)]
    return [shuffled[at % known] for at in range(count)] if known else []


def offsets(options: ArrivalOptions, count: int, rng: np.random.Generator) -> list[float]:
    """Seconds from the start to each arrival, in order; the first one arrives at its own gap after the start.

    The gaps are of a gamma distribution with shape `burstiness` and mean 1/rate, and are then scaled so that the last
    request arrives at count/rate exactly: two runs with different seeds have the same load. `vllm bench serve` does the
    same, so equal options mean equal loads.
    """
    if math.isinf(options.request_rate):
        return [0.0] * count
    mean = 1.0 / options.request_rate
    if options.arrivals == "constant":
        gaps = np.full(count, mean)
    else:
        shape = options.burstiness if options.arrivals == "gamma" else 1.0
        gaps = rng.gamma(shape, mean / shape, count)
    times = np.cumsum(gaps)
    last = float(times[-1])
    if last > 0.0:
        times *= count * mean / last
    return [float(time) for time in times]
