"""What went wrong, for the one who typed the command."""

from collections.abc import Sequence


class ClusterError(Exception):
    """A command can't do what it was told; `lines` say why, one for each reason, and `code` is its exit code."""

    def __init__(self, lines: Sequence[str], code: int) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
        self.code = code


class UsageError(ClusterError):
    """What the user wrote can't be used: exit code 2."""

    def __init__(self, *lines: str) -> None:
        super().__init__(lines, 2)


class RunError(ClusterError):
    """What the user wrote is fine, but it can't be done now: exit code 1."""

    def __init__(self, *lines: str) -> None:
        super().__init__(lines, 1)
