"""Errors that a command prints for its user."""

ERROR_PREFIX = "kvrelay: "
"""Of each line of an error on stderr."""
NO_CLUSTER = "no cluster is running; `kvrelay up` starts one"


class ClusterError(Exception):
    """Why a command failed: one line for each reason; `code` is the command's exit code."""

    code = 1

    @property
    def lines(self) -> list[str]:
        return [str(line) for line in self.args]


class RunError(ClusterError):
    """The input is valid, but the command can't be done now."""


class UsageError(ClusterError):
    """The user's input can't be used."""

    code = 2
