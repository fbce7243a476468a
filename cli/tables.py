"""Tables on terminals."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

MOST_COLUMNS = 10_000
"""Width limit of a table's line, in terminal columns."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Draws a table as wide as its cells are. Where there is less room, its right end is missing, not a part of each
    cell."""

    table: "Table"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.measure import Measurement

        unbounded = options.update(max_width=MOST_COLUMNS)
        width = Measurement.get(console, unbounded, self.table).maximum
        yield from console.render(self.table, options.update(width=width))
