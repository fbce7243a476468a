"""Constraints are compiled off the loop, once, within limits; matchers follow tokens wherever they begin."""

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.constrain.compiler import (
    DEFAULT_LIMITS,
    MAX_GRAMMARS,
    ConstraintCompiler,
    ConstraintLimits,
    LlGrammar,
    LlMatcher,
)
from kvrelay.engine.constrain.grammar import Constraint, ConstraintError
from kvrelay.models import resolve
from support.processes import wait_until
from support.schemas import random_schema

VOCAB, EOS = 4096, 1
REGEX = Constraint("regex", "(ab|cd){2,5}")


class Scene:
    """A compiler with its event loop."""

    def __init__(self, compiler: ConstraintCompiler, runner: asyncio.Runner) -> None:
        self.compiler = compiler
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(work, 60))

    def compile(self, *constraints: Constraint) -> list[LlGrammar]:
        """Compiles them side by side."""
        found: list[LlGrammar] = []

        async def all_of_them() -> None:
            found.extend(await asyncio.gather(*map(self.compiler.compile, constraints)))

        self.run(all_of_them())
        return found

    def matcher(self, constraint: Constraint) -> LlMatcher:
        """A matcher at the beginning of a text."""
        return self.compile(constraint)[0].matcher([])


@contextmanager
def compiling(folder: Path | None = None, limits: ConstraintLimits = DEFAULT_LIMITS) -> Iterator[Scene]:
    compiler = ConstraintCompiler(folder or resolve("pico"), VOCAB, [EOS], limits)
    with closing(compiler), asyncio.Runner() as runner:
        yield Scene(compiler, runner)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with compiling() as scene:
        yield scene


def schema_of(seed: int) -> Constraint:
    return Constraint("json_schema", json.dumps(random_schema(random.Random(seed))))


def allowed(mask: NDArray[np.int32]) -> list[int]:
    assert mask.shape == (VOCAB // 32,)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: LlMatcher, count: int, seed: int = 0) -> list[int]:
    """Draws up to `count` tokens that the matcher allows, without the end of sequence."""
    draw, tokens = random.Random(seed), list[int]()
    while len(tokens) < count:
        choices = [token for token in allowed(matcher.mask(60)) if token != EOS]
        if not choices:
            break
        tokens.append(draw.choice(choices))
        matcher.push(tokens[-1])
    return tokens


def test_a_matcher_that_begins_anywhere_allows_the_same_tokens(scene: Scene) -> None:
    for seed in range(5):
        (grammar,) = scene.compile(schema_of(seed))
        draw, whole, tokens = random.Random(seed), grammar.matcher([]), list[int]()
        while EOS not in tokens:
            mask = whole.mask(60)
            assert np.array_equal(mask, grammar.matcher(tokens).mask(60))
            tokens.append(draw.choice(allowed(mask)))
            if tokens[-1] != EOS:
                whole.push(tokens[-1])


def test_equal_constraints_are_compiled_once_and_the_oldest_are_forgotten(scene: Scene) -> None:
    first, same = scene.compile(REGEX, REGEX)
    assert first is same
    scene.compile(*[Constraint("regex", f"x{number}") for number in range(MAX_GRAMMARS)])
    assert scene.compile(REGEX)[0] is not first


def test_requests_may_come_at_any_turn_of_the_loop(scene: Scene) -> None:
    """One that comes just when the process of an earlier one has started looks at that process again."""

    async def one_a_turn() -> None:
        asked = []
        while not asked or not all(each.done() for each in asked[:300]):
            asked.append(asyncio.create_task(scene.compiler.compile(REGEX)))
            await asyncio.sleep(0)
        assert len(set(await asyncio.gather(*asked))) == 1

    scene.run(one_a_turn())


def test_tokens_may_come_before_the_masks_between_them_are_there(scene: Scene) -> None:
    """Tokens come so after a step that kept several guesses."""
    (grammar,) = scene.compile(schema_of(3))
    tokens = walk(grammar.matcher([]), 6)
    expected = grammar.matcher(tokens).mask(60)
    for _ in range(100):
        matcher = grammar.matcher([])
        for token in tokens:
            matcher.push(token)
        assert np.array_equal(matcher.mask(60), expected)
    with pytest.raises(ConstraintError, match="doesn't obey"):
        grammar.matcher([EOS, 7]).mask(60)


def test_a_choice_may_have_any_character(scene: Scene) -> None:
    text = "".join(map(chr, range(1, 0x180)))
    (grammar,) = scene.compile(Constraint("choice", json.dumps([text, f"{text}."])))
    tokens = Tokenizer.from_file(str(resolve("pico") / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert EOS in allowed(grammar.matcher(tokens).mask(60))


def test_the_longest_time_that_the_option_allows_is_no_hindrance() -> None:
    with compiling(limits=ConstraintLimits(seconds=86400.0)) as scene:
        assert allowed(scene.matcher(REGEX).mask(60))
    for seconds in (86401.0, math.inf):
        with pytest.raises(ValueError, match=rf"constraint_seconds is {seconds}; allowed: 0\.01 to 86400"):
            EngineConfig(constraint_seconds=seconds)


def test_a_grammar_that_ends_the_library_is_refused_and_ends_nobody(scene: Scene) -> None:
    """The library follows the grammar by as many calls within another, which overflows its stack."""
    rules = 5000
    chain = "start: r0\n" + "".join([f"r{i}: r{i + 1}\n" for i in range(rules)]) + f'r{rules}: "a"'
    matcher = scene.matcher(REGEX)
    with pytest.raises(ConstraintError, match="its library ended"):
        scene.compile(Constraint("grammar", chain))
    assert len(walk(matcher, 4)) > 0
    scene.compile(Constraint("regex", "after"))


def test_processes_that_are_killed_change_no_mask(scene: Scene) -> None:
    """The lane, and the one that it is forked from."""
    (grammar,) = scene.compile(schema_of(3))
    whole, tokens = grammar.matcher([]), list[int]()
    for token in walk(grammar.matcher([]), 12):
        template = scene.compiler.lanes.template._process
        victim = children_of(template.pid)[-1] if len(tokens) % 2 else template.pid
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda victim=victim: is_over(victim), "the process ends")
        assert np.array_equal(whole.mask(60), grammar.matcher(tokens).mask(60))
        tokens.append(token)
        whole.push(token)


def is_over(pid: int) -> bool:
    """Whether a process has ended, whoever has heard of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_mask_that_takes_too_much_time_ends_its_request_only() -> None:
    ambiguous = Constraint("grammar", 'start: a\na: a a | a a a | "x" | ""')
    with compiling(limits=ConstraintLimits(seconds=0.3)) as scene:
        sound = scene.matcher(REGEX)
        with pytest.raises(ConstraintError, match=r"0\.3 s \(engine\.constraint_seconds\)"):
            walk(scene.matcher(ambiguous), 1000)
        assert len(walk(sound, 4)) > 0


def test_no_step_waits_for_the_masks_of_a_costly_constraint() -> None:
    """Not even for the first ones of another completion; those of others are waited for as ever."""
    ambiguous = Constraint("grammar", 'start: a\na: a a | a a a | "x" | ""')
    with compiling() as scene:
        grammar, sound = scene.compile(ambiguous, REGEX)
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


def test_a_schema_that_compiles_does_not_fail_by_size_later(scene: Scene) -> None:
    """1,000 optional properties, and a completion that has some of them."""
    properties = {f"k{number}": {"type": "integer"} for number in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = json.dumps({f"k{number}": number for number in range(0, 1000, 90)})
    matcher = scene.matcher(Constraint("json_schema", json.dumps(schema)))
    tokenizer = Tokenizer.from_file(str(resolve("pico") / "tokenizer.json"))
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        assert token in allowed(matcher.mask(60))
        matcher.push(token)
    assert EOS in allowed(matcher.mask(60))


def test_compiled_constraints_are_bounded_by_bytes_and_made_again() -> None:
    """Schemas are followed side by side, in memory for a few of them; each mask is the right one."""
    limits = ConstraintLimits(seconds=60.0, most_bytes=2**20)
    with compiling(limits=limits) as scene:
        grammars = [scene.compile(schema_of(seed))[0] for seed in range(80)]
        followed = [(grammar, grammar.matcher([]), list[int]()) for grammar in grammars]
        for _ in range(3):
            for grammar, matcher, tokens in followed:
                mask = matcher.mask(60)
                assert np.array_equal(mask, grammar.matcher(tokens).mask(60))
                assert scene.compiler.lanes.fast.held_bytes <= limits.most_bytes // 2
                choices = [token for token in allowed(mask) if token != EOS]
                if choices:
                    tokens.append(choices[len(choices) // 2])
                    matcher.push(tokens[-1])


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if name == "a long chain of options" else ()) for name in COSTLY]
)
def test_a_costly_constraint_ends_or_is_refused_soon_and_blocks_no_loop(name: str) -> None:
    async def serve() -> None:
        longest, at = 0.0, time.monotonic()

        async def watch() -> None:
            nonlocal longest, at
            while True:
                await asyncio.sleep(0.01)
                longest, at = max(longest, time.monotonic() - at), time.monotonic()

        watching = asyncio.create_task(watch())
        with suppress(ConstraintError):
            matcher = (await scene.compiler.compile(COSTLY[name])).matcher([])
            await asyncio.to_thread(walk, matcher, 60)
        watching.cancel()
        assert longest < DEFAULT_LIMITS.seconds, "it waited for the constraint"

    with compiling() as scene:
        scene.compile(REGEX)
        scene.run(serve())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with compiling() as scene:
        for _ in range(2):
            with pytest.raises(ConstraintError, match=r"pip install 'kvrelay\[structured\]'"):
                scene.compile(REGEX)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with compiling(tmp_path) as scene, pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        scene.compile(REGEX)
