"""`kvrelay` in this process, and in one of its own."""

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from kvrelay.cli.main import main

KVRELAY = str(Path(sys.executable).parent / "kvrelay")
LISTENING_TO_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job ignores, and so would its children
os.execv(sys.argv[1], sys.argv[1:])
"""
SECONDS = 60.0


def call(*arguments: object, said: str | bytes | None = None) -> Result:
    """Runs a command.

    Args:
        said: its stdin.
    """
    return CliRunner().invoke(main, [str(each) for each in arguments], input=said)


def fails(code: int, pattern: str, *arguments: object) -> None:
    """Checks that a command ends with this code and one line of stderr, in which the pattern is found."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert re.search(pattern, result.stderr), result.stderr


def run(*arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
    """Runs a command in a process of its own."""
    return subprocess.run([KVRELAY, *arguments], capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
