"""Errors that a command prints for its user."""

from collections.abc import Iterable

ERROR_PREFIX = "kvrelay: "
"""Beginning of each line of an error on stderr."""
NO_CLUSTER = "no cluster is running; `kvrelay up` starts one"
MOST_LISTED = 10
"""The most members that a message names."""


def listed(names: Iterable[str]) -> str:
    """The first ten of some names or facts, and how many more there are."""
    found = list(names)
    more = len(found) - MOST_LISTED
    return ", ".join(found[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


class ClusterError(Exception):
    """The failure of a command: one line for each reason; `code` is the command's exit code."""

    code = 1

    @property
    def lines(self) -> list[str]:
        return [str(line) for line in self.args]


class RunError(ClusterError):
    """The input is valid, but the command can't be done now."""


class UsageError(ClusterError):
    """The user's input can't be used."""

    code = 2
