"""`kvrelay chat`: what the model is asked, on a terminal and from a pipe."""

import os
import sys
from pathlib import Path

import pytest
from capital_router import SECONDS, CapitalRouter, serving
from command import call

from support.router_fakes import background
from support.terminal import CTRL_C, CTRL_D, Terminal

COMMAND = [sys.executable, "-m", "kvrelay.cli", "chat"]


def asked(router: CapitalRouter, index: int) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in router.requests[index].messages.messages]


def test_a_conversation_on_a_terminal(router: CapitalRouter, target: str) -> None:
    def say(text: str, answer: str) -> None:
        terminal.press(f"{text}\n")
        terminal.wait_for(answer)

    with Terminal([*COMMAND, "--target", target, "--system", "Be brief."], os.environ) as terminal:
        terminal.wait_for("Ctrl-D ends.")
        say("hello", "HELLO")
        say("wait", "WAIT")
        router.ended.clear()
        terminal.press(CTRL_C)
        terminal.wait_for("(stopped)")
        assert router.ended.wait(SECONDS), "the request has ended, too"
        terminal.press("never sent")
        terminal.wait_for("> never sent")
        terminal.press(CTRL_C)
        terminal.wait_until(lambda lines: lines[-1] == ">", "new prompt")
        say("and now", "AND NOW")
        say("full", "kvrelay: --target " + target + ": 1024 requests are in flight")
        say("/quit", "kvrelay: /quit is no command; allowed: /reset")
        say("/reset", "(the conversation is forgotten)")
        say(" /new", "/NEW")
        # A terminal drops a Ctrl-D that comes before the prompt has switched line editing on.
        terminal.wait_until(lambda lines: lines[-1] == ">", "new prompt")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
        assert "Traceback" not in " ".join(terminal.lines)
    system, hello = ("system", "Be brief."), [("user", "hello"), ("assistant", "HELLO")]
    stopped = [("user", "wait"), ("assistant", "WAIT")]
    assert asked(router, 0) == [system, ("user", "hello")]
    assert asked(router, 2) == [system, *hello, *stopped, ("user", "and now")]
    assert asked(router, 4) == [system, ("user", "/new")]
    sessions = [request.session for request in router.requests]
    assert len(set(sessions[:4])) == 1
    assert sessions[4] not in sessions[:4]


def test_lines_of_a_pipe_are_messages(router: CapitalRouter, target: str) -> None:
    result = call(
        *("chat", "--target", target, "--max-tokens", "7", "--temperature", "0", "--slo-class", "batch"),
        said="one\n\ntwo\n/reset\nthree",
    )
    assert (result.exit_code, result.stdout) == (0, "ONE\nTWO\nTHREE\n")
    assert asked(router, 1) == [("user", "one"), ("assistant", "ONE"), ("user", "two")]
    assert asked(router, 2) == [("user", "three")]
    assert all(
        (each.sampling.max_tokens, each.sampling.temperature, each.slo_class) == (7, 0.0, "batch")
        for each in router.requests
    )


@pytest.mark.parametrize(
    ("said", "code", "error"),
    [
        ("one\nfull\ntwo\n", 1, "1024 requests are in flight"),
        ("one\n/quit\ntwo\n", 2, "/quit is no command; allowed: /reset"),
        (b"one\ncaf\xe9\ntwo\n", 2, "stdin: line 2: byte 3 is not UTF-8"),
    ],
)
def test_a_mistake_ends_a_pipe(target: str, said: str | bytes, code: int, error: str) -> None:
    result = call("chat", "--target", target, said=said)
    assert (result.exit_code, result.stdout.split()) == (code, ["ONE"])
    assert len(result.stderr.splitlines()) == 1
    assert error in result.stderr


def test_a_model_without_a_chat_template_is_told_before_the_first_message() -> None:
    with serving(CapitalRouter(has_chat_template=False)) as target:
        result = call("chat", "--target", target, said="hello\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "model capitals has no chat template; `kvrelay up --chat-template FILE` gives it one" in result.stderr
    assert "--target 127.0.0.1:1: " in call("chat", "--target", "127.0.0.1:1").stderr


def test_a_router_applies_its_template_to_all_that_was_said(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    with background(tmp_path / "cluster", lambda index: 40 + index, chat_template=str(template)) as cluster:
        target = cluster.router.address
        result = call("chat", "--target", target, "--max-tokens", "3", "--temperature", "0", said="one\ntwo\n")
        assert result.exit_code == 0, result.stderr
        first, second = (record.prompt_tokens for record in cluster.records)
    assert second > first, "it has the first message and its answer, too"
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr.count("the answer was cut") == 2
