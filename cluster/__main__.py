"""The command `kvrelay`."""

import sys


def main() -> None:
    """Runs `cluster/cli.py`. Ctrl-C ends its imports, too, without a trace: they take a second on a busy machine."""
    try:
        from kvrelay.cluster.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
