"""The command `kvrelay`."""

import sys


def main() -> None:
    """Runs `cli/main.py`. Ctrl-C ends its imports, too, without a trace: they take a second on a busy machine."""
    try:
        from kvrelay.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
