"""Downloads a model where it is missing, and prints its folder: `python -m kvrelay.models MODEL [--no-weights]`."""

import argparse
import sys

from kvrelay.models import resolve


def main() -> None:
    """Runs the command; exit code 2 with one line if the model can't be had."""
    parser = argparse.ArgumentParser(
        prog="python -m kvrelay.models", description="Downloads a model where it is missing."
    )
    parser.add_argument("model", help="ORG/NAME[@REVISION] of the Hugging Face hub, a folder, or a bundled model")
    parser.add_argument("--no-weights", action="store_true", help="only what a tokenizer needs")
    given = parser.parse_args()
    try:
        print(resolve(given.model, weights=not given.no_weights))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
