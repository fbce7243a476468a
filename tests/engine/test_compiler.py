"""Constraints are compiled off the loop, once, within limits; matchers follow tokens wherever they begin."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvrelay.engine.constrain.compiler import (
    DEFAULT_LIMITS,
    MAX_GRAMMARS,
    ConstraintCompiler,
    ConstraintLimits,
    LlMatcher,
)
from kvrelay.engine.constrain.grammar import Constraint, ConstraintError
from kvrelay.models import resolve
from support.processes import wait_until
from support.schemas import random_schema

VOCAB, EOS = 4096, 1
REGEX = Constraint("regex", "(ab|cd){2,5}")


def with_compiler(
    test: Callable[[ConstraintCompiler], Awaitable[None]],
    folder: Path | None = None,
    limits: ConstraintLimits = DEFAULT_LIMITS,
) -> None:
    async def run() -> None:
        compiler = ConstraintCompiler(folder or resolve("pico"), VOCAB, [EOS], limits)
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
                mask = whole.mask(60)
                assert np.array_equal(mask, grammar.matcher(tokens).mask(60))
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
    """Tokens come so after a step that kept several guesses."""

    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(Constraint("json_schema", json.dumps(random_schema(random.Random(3)))))
        draw, tokens = random.Random(0), list[int]()
        while len(tokens) < 6:
            tokens.append(draw.choice(allowed(grammar.matcher(tokens).mask(60))))
        expected = grammar.matcher(tokens).mask(60)
        for _ in range(100):
            matcher = grammar.matcher([])
            for token in tokens:
                matcher.push(token)
            assert np.array_equal(matcher.mask(60), expected)

    with_compiler(test)


def test_tokens_that_do_not_obey_are_refused() -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(REGEX)
        with pytest.raises(ConstraintError, match="doesn't obey"):
            grammar.matcher([EOS, 7]).mask(60)

    with_compiler(test)


def chain(rules: int) -> str:
    """A grammar that the library follows by as many calls within another."""
    return "start: r0\n" + "".join([f"r{i}: r{i + 1}\n" for i in range(rules)]) + f'r{rules}: "a"'


AMBIGUOUS = Constraint("grammar", 'start: a\na: a a | a a a | "x" | ""')


def walk(matcher: LlMatcher, count: int) -> list[int]:
    """Draws up to `count` tokens that the matcher allows, without the end of sequence."""
    draw, tokens = random.Random(0), list[int]()
    while len(tokens) < count:
        choices = [token for token in allowed(matcher.mask(60)) if token != EOS]
        if not choices:
            break
        tokens.append(draw.choice(choices))
        matcher.push(tokens[-1])
    return tokens


def test_a_grammar_that_ends_the_library_is_refused_and_ends_nobody() -> None:
    """The grammar overflows the library's stack."""

    async def test(compiler: ConstraintCompiler) -> None:
        matcher = (await compiler.compile(REGEX)).matcher([])
        with pytest.raises(ConstraintError, match="its library ended"):
            await compiler.compile(Constraint("grammar", chain(5000)))
        assert len(walk(matcher, 4)) > 0
        await compiler.compile(Constraint("regex", "after"))

    with_compiler(test)


def test_processes_that_are_killed_change_no_mask() -> None:
    """The lane, and the one that it is forked from."""

    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(Constraint("json_schema", json.dumps(random_schema(random.Random(3)))))
        whole, tokens = grammar.matcher([]), list[int]()
        for token in walk(grammar.matcher([]), 12):
            template = compiler.lanes.template._process
            victim = children_of(template.pid)[-1] if len(tokens) % 2 else template.pid
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda victim=victim: is_over(victim), "the process ends")
            assert np.array_equal(whole.mask(60), grammar.matcher(tokens).mask(60))
            tokens.append(token)
            whole.push(token)

    with_compiler(test)


def is_over(pid: int) -> bool:
    """Whether a process has ended, whoever has heard of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_mask_that_takes_too_much_time_ends_its_request_only() -> None:
    async def test(compiler: ConstraintCompiler) -> None:
        grammar = await compiler.compile(AMBIGUOUS)
        sound = (await compiler.compile(REGEX)).matcher([])
        with pytest.raises(ConstraintError, match=r"0\.3 s \(engine\.constraint_seconds\)"):
            walk(grammar.matcher([]), 1000)
        assert len(walk(sound, 4)) > 0

    with_compiler(test, limits=ConstraintLimits(seconds=0.3))


def test_no_step_waits_for_the_masks_of_a_costly_constraint() -> None:
    """Not even for the first ones of another completion; those of others are waited for as ever."""

    async def test(compiler: ConstraintCompiler) -> None:
        grammar, sound = await compiler.compile(AMBIGUOUS), await compiler.compile(REGEX)
        walk(sound.matcher([]), 4)
        walk(grammar.matcher([]), 100)
        assert grammar.costly
        assert not sound.costly
        matcher = grammar.matcher([])
        for _ in range(8):
            if matcher.ready(surely=True) or matcher.ready():
                matcher.mask(0)
            token = next(each for each in allowed(matcher.mask(30)) if each != EOS)
            matcher.push(token)
        assert matcher._lane is compiler.lanes.slow
        assert sound.matcher([])._lane is compiler.lanes.fast

    with_compiler(test)


def test_a_schema_that_compiles_does_not_fail_by_size_later() -> None:
    """1,000 optional properties, and a completion that has some of them."""
    properties = {f"k{number}": {"type": "integer"} for number in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = json.dumps({f"k{number}": number for number in range(0, 1000, 90)})

    async def test(compiler: ConstraintCompiler) -> None:
        matcher = (await compiler.compile(Constraint("json_schema", json.dumps(schema)))).matcher([])
        tokenizer = Tokenizer.from_file(str(resolve("pico") / "tokenizer.json"))
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            assert token in allowed(matcher.mask(60))
            matcher.push(token)
        assert EOS in allowed(matcher.mask(60))

    with_compiler(test)


def test_compiled_constraints_are_bounded_by_bytes_and_made_again() -> None:
    """80 schemas are followed side by side, in memory for a few of them; each mask is the right one."""
    limits = ConstraintLimits(seconds=60.0, most_bytes=2**20)

    async def test(compiler: ConstraintCompiler) -> None:
        schemas = [json.dumps(random_schema(random.Random(seed))) for seed in range(80)]
        grammars = [await compiler.compile(Constraint("json_schema", schema)) for schema in schemas]
        matchers = [grammar.matcher([]) for grammar in grammars]
        for _ in range(3):
            for grammar, matcher in zip(grammars, matchers, strict=True):
                mask = matcher.mask(60)
                assert np.array_equal(mask, grammar.matcher(matcher._tokens).mask(60))
                assert compiler.lanes.fast.held_bytes <= limits.most_bytes // 2
                choices = [token for token in allowed(mask) if token != EOS]
                if choices:
                    matcher.push(choices[len(choices) // 2])

    with_compiler(test, limits=limits)


COSTLY = {
    "a long chain of options": Constraint("regex", "a?" * 30_000),
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
                token = draw.choice(await asyncio.to_thread(lambda: allowed(matcher.mask(60))))
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
