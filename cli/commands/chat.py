"""`kvrelay chat`: a conversation with the model."""

import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvrelay.cli.common import class_option, connection, target_option
from kvrelay.client.errors import KvrelayError
from kvrelay.cluster.errors import ERROR_PREFIX, ClusterError, RunError, UsageError

if TYPE_CHECKING:
    from kvrelay.cli.generate import Router
    from kvrelay.client import Client, GenerateOptions

PROMPT = "> "
RESET = "/reset"
USAGE = f"Ctrl-C stops an answer, {RESET} forgets the conversation, Ctrl-D ends."


@dataclass(slots=True)
class Conversation:
    """A conversation, and the client that continues it."""

    client: "Client"
    system: str
    """Instructions that stay; empty for none."""
    options: "GenerateOptions"
    stoppable: bool
    """Whether Ctrl-C stops an answer, not the command."""
    said: list[dict[str, str]] = field(default_factory=list)
    """The user's messages and the answers, by turns."""
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Session key of all turns, so that they go to the same workers, which have the KV of earlier turns."""

    def reset(self) -> None:
        """Forgets what was said."""
        self.said.clear()
        self.session = uuid.uuid4().hex

    def answer(self, text: str) -> str:
        """Prints the answer to a message as it arrives. One that is stopped is kept as far as it came.

        Returns:
            Why it is not whole, for the user; empty if it is.

        Raises:
            KvrelayError: the request failed; the message isn't kept.
        """
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.said, asked]
        options: GenerateOptions = {**self.options, "session": self.session}
        came, note = "", ""
        try:
            with self.client.generate(messages, **options) as stream:
                for chunk in stream:
                    came += chunk.text
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                    if chunk.finish_reason == "length":
                        note = "the answer was cut at its longest, by --max-tokens or the model's context"
        except KeyboardInterrupt:
            if not self.stoppable:
                raise
            note = "stopped"
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if came:
            self.said += [asked, {"role": "assistant", "content": came}]
        return note


@click.command()
@target_option
@connection
@click.option("--system", default="", metavar="TEXT", help="Instructions for the model.")
@click.option("--max-tokens", type=click.IntRange(1, 2**32 - 1), metavar="N", help="Tokens of an answer at most.")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy.")
@click.option("--top-p", type=float, metavar="P", help="Keep the likeliest tokens up to this total probability.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Equal seeds give equal answers.")
@class_option
def chat(target: str | None, tls: bool, ca: Path | None, api_key: str | None, system: str, **sampling: Any) -> None:
    """Talks with the model: each line is a message, each answer is printed as it is generated.

    Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends. If stdin is no terminal, its lines are the
    messages, and an error ends it.
    """
    from kvrelay.cli.generate import Router

    router = Router.find(target, tls, ca, api_key)
    with router.client() as client:
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        conversation = Conversation(client, system, cast("GenerateOptions", sampling), stoppable=on_terminal)
        try:
            model = client.model_info()
        except KvrelayError as error:
            raise router.failure(error) from None
        if not model.has_chat_template:
            raise RunError(
                f"model {model.name} has no chat template; `kvrelay up --chat-template FILE` gives it one, "
                "and `kvrelay generate` continues a text without one"
            )
        if on_terminal:
            click.echo(f"{model.name}. {USAGE}")
            _talk(conversation, router)
        else:
            for line in _lines():
                if note := _take(conversation, router, line):
                    click.echo(ERROR_PREFIX + note, err=True)


def _talk(conversation: Conversation, router: "Router") -> None:
    """Reads messages from the terminal until Ctrl-D."""
    with suppress(ImportError):  # not everywhere; it lets the user edit lines and recall earlier ones
        import readline  # noqa: F401
    while True:
        try:
            line = input(PROMPT)
            if note := _take(conversation, router, line):
                click.echo(f"({note})")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:  # while a line is typed
            click.echo()
        except ClusterError as error:
            click.echo(f"{ERROR_PREFIX}{error}", err=True)
        except UnicodeDecodeError:
            click.echo(f"{ERROR_PREFIX}the line is not UTF-8", err=True)


def _take(conversation: Conversation, router: "Router", line: str) -> str:
    """Obeys a command, or prints the answer to a message; returns a note for the user.

    Raises:
        ClusterError: there is no such command, or the request failed.
    """
    if not line.strip():
        return ""
    if line.strip() == RESET:
        conversation.reset()
        return "the conversation is forgotten"
    if line.startswith("/"):
        raise UsageError(f"{line.split()[0]} is no command; allowed: {RESET}; a space before it makes it a message")
    try:
        return conversation.answer(line.strip())
    except KvrelayError as error:
        raise router.failure(error) from None


def _lines() -> Iterator[str]:
    """The lines of stdin as they come.

    Raises:
        UsageError: one is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: line {number}: byte {error.start} is not UTF-8") from None
