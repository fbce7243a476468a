"""Constraints are compiled off the loop, once, within limits; matchers follow tokens wherever they begin."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.constrain.compiler import MAX_GRAMMARS, ConstraintCompiler
from kvrelay.engine.constrain.grammar import Constraint, ConstraintError
from kvrelay.models import resolve
from support.schemas import random_schema

VOCAB, EOS = 4096, 1
REGEX = Constraint("regex", "(ab|cd){2,5}")


def with_compiler(test: Callable[[ConstraintCompiler], Awaitable[None]], folder: Path | None = None) -> None:
    async def run() -> None:
        compiler = ConstraintCompiler(folder or resolve("pico"), VOCAB, [EOS])
        try:
            async with asyncio.timeout(60):
                await test(compiler)
        finally:
            compiler.close()

    asyncio.run(run())


def allowed(mask: NDArray[np.int32]) -> list[int]:
    assert mask.shape == (VOCAB // 32,)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_matcher_that_begins_anywhere_allows_the_same_tokens() -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        for seed in range(5):
            draw = random.Random(seed)
            grammar = await compiler.compile(Constraint("json_schema", json.dumps(random_schema(draw))))
            whole, tokens = grammar.matcher([]), []
            while EOS not in tokens:
                mask = whole.mask()
                assert np.array_equal(mask, grammar.matcher(tokens).mask())
                tokens.append(draw.choice(allowed(mask)))
                if tokens[-1] != EOS:
                    whole.push(tokens[-1])

    with_compiler(test)


def test_equal_constraints_are_compiled_once_and_the_oldest_are_forgotten() -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        first, same = await asyncio.gather(compiler.compile(REGEX), compiler.compile(REGEX))
        assert first is same
        for number in range(MAX_GRAMMARS):
            await compiler.compile(Constraint("regex", f"x{number}"))
        assert await compiler.compile(REGEX) is not first

    with_compiler(test)


def test_tokens_may_come_before_the_masks_between_them_are_there() -> None:
    """As they do after a step that kept several guesses."""

    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(Constraint("json_schema", json.dumps(random_schema(random.Random(3)))))
        draw, tokens = random.Random(0), list[int]()
        while len(tokens) < 6:
            tokens.append(draw.choice(allowed(grammar.matcher(tokens).mask())))
        expected = grammar.matcher(tokens).mask()
        for _ in range(100):
            matcher = grammar.matcher([])
            for token in tokens:
                matcher.push(token)
            assert np.array_equal(matcher.mask(), expected)

    with_compiler(test)


def test_tokens_that_do_not_obey_are_refused() -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(REGEX)
        with pytest.raises(ConstraintError, match="doesn't obey"):
            grammar.matcher([EOS, 7]).mask()

    with_compiler(test)


COSTLY = {
    "nested repetitions": Constraint("regex", "((((a{0,200}b?){0,200}c?){0,200}d?){0,200}e?){0,200}"),
    "exponential states": Constraint("regex", "(.*a.{80}){3}|(.*b.{90}){3}"),
    "deep schema": Constraint("json_schema", '{"items":' * 100 + "{}" + "}" * 100),
    "many alternatives": Constraint(
        "json_schema", json.dumps({"anyOf": [{"properties": {f"k{i}": {"enum": [i]}}} for i in range(1000)]})
    ),
    "an endless rule": Constraint("grammar", 'start: start start | "a" start | "a"'),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_constraint_ends_or_is_refused_soon_and_blocks_no_loop(name: str) -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        await compiler.compile(REGEX)
        longest, at = 0.0, time.monotonic()

        async def watch() -> None:
            nonlocal longest, at
            while True:
                await asyncio.sleep(0.01)
                longest, at = max(longest, time.monotonic() - at), time.monotonic()

        watching = asyncio.create_task(watch())
        with suppress(ConstraintError):
            matcher = (await compiler.compile(COSTLY[name])).matcher([])
            draw = random.Random(0)
            for _ in range(60):
                token = draw.choice(await asyncio.to_thread(lambda: allowed(matcher.mask())))
                if token == EOS:
                    break
                matcher.push(token)
        watching.cancel()
        assert longest < 1.0

    with_compiler(test)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def test(compiler: ConstraintCompiler) -> None:
        for _ in range(2):
            with pytest.raises(ConstraintError, match=r"pip install 'kvrelay\[structured\]'"):
                await compiler.compile(REGEX)

    with_compiler(test)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
            await compiler.compile(REGEX)

    with_compiler(test, tmp_path)
