"""Costs of steps before the first request: those that a worker of the same kind has kept, or of a few measured steps.

Files are kept in the user's cache folder, one for each model, device, precision and degree. What a file says is where
the fit begins; the steps that follow correct it.
"""

import json
import logging
import os
import platform
import time
from hashlib import sha256
from pathlib import Path

import torch

from kvrelay.engine.engine import Engine
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.machine.cache import user_cache

logger = logging.getLogger(__name__)

MEASURE_SECONDS = 0.5
"""Seconds after which no other measurement is begun."""
SHAPES = ((16, 1), (64, 1), (4, 16), (2**31, 1), (256, 1), (4, 4), (1024, 1))
"""(tokens of each prompt, prompts) that are measured, in this order. 2**31 stands for a full step's."""
STEPS = 4
"""Steps of each shape behind its prompts, each of which computes a token of every sequence."""


def begin_costs(engine: Engine, runner: Runner, folder: Path | None = None) -> None:
    """Lets the engine's fit begin with what is known. The engine must be idle, and is so afterwards.

    Args:
        folder: with the files; None for the user's cache.
    """
    path = _path(engine, runner, folder)
    try:
        engine.scheduler.fit.restore(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if path.exists():
            logger.warning("kept costs are damaged, so they are measured", extra={"path": str(path), "why": str(error)})
        measure(engine, runner.spec)
        keep_costs(engine, runner, folder)


def keep_costs(engine: Engine, runner: Runner, folder: Path | None = None) -> None:
    """Keeps the engine's fit for the next worker of its kind; logs if that fails."""
    path = _path(engine, runner, folder)
    with engine.lock:
        state = engine.scheduler.fit.state()
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(state))
        new.replace(path)
    except OSError as error:
        logger.warning("costs can't be kept", extra={"path": str(path), "why": str(error)})


def measure(engine: Engine, spec: ModelSpec, seconds: float = MEASURE_SECONDS) -> None:
    """Computes made-up prompts and decodes for about so many seconds, without guesses of tokens. Leaves no sequence, no
    cached block and no counted step."""
    scheduler, began = engine.scheduler, time.monotonic()
    config = scheduler.config
    room = min(spec.max_context, scheduler.prefix.pool.total * config.block_size // 2) - 2 * STEPS
    full = min(config.max_batch_tokens, room)
    guesses, scheduler.speculation = scheduler.speculation, None
    try:
        for number, (prompt, batch) in enumerate(SHAPES):
            if time.monotonic() - began > seconds:
                break
            if batch <= min(config.max_sequences, room // config.block_size) and (prompt < full or prompt == 2**31):
                _run(engine, number, min(prompt, full), batch, spec.vocab_size)
    finally:
        scheduler.speculation = guesses
    logger.info("costs measured", extra={"steps": engine.steps, "seconds": round(time.monotonic() - began, 3)})
    engine.forget_steps()


def _run(engine: Engine, number: int, prompt: int, batch: int, vocabulary: int) -> None:
    """Computes `batch` prompts of so many tokens, and STEPS tokens of each."""
    scheduler = engine.scheduler
    with engine.lock:
        sequences = [
            scheduler.add(
                Request(
                    f"costs-{number}-{row}",
                    1,
                    tuple((7 * number + 3 * row + place) % vocabulary for place in range(prompt)),
                    prompt,
                    SamplingParams(max_tokens=STEPS + 1, temperature=0.0),
                )
            )
            for row in range(batch)
        ]
    # Where blocks are few, sequences wait for each other.
    for _ in range(batch * (prompt + 2 * STEPS)):
        if not engine.has_work:
            return
        engine.step()
        with engine.lock:
            for sequence in sequences:
                if not sequence.hold.released:
                    scheduler.prefix.withdraw(sequence.hold)
    with engine.lock:
        for sequence in sequences:
            scheduler.cancel(sequence.request.key)


def _path(engine: Engine, runner: Runner, folder: Path | None) -> Path:
    config = engine.scheduler.config
    on_gpu = config.device == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else (platform.machine(), len(os.sched_getaffinity(0)))
    kind = runner.spec.fingerprint, device, config.threads, runner.cache_layout, config.degree, config.quantization
    return (folder or user_cache() / "costs") / f"{sha256(repr(kind).encode()).hexdigest()[:24]}.json"
