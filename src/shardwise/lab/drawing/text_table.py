"""Tables of texts, for the terminal and for pages."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE
from rich.table import Table


class TextTable(NamedTuple):
    """A table whose cells are texts."""

    columns: Sequence[str]
    """Their names; > before a name sets the column flush right."""
    rows: Sequence[Sequence[str]]

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """The name of each column, and whether it is set flush right."""
        return [(name.removeprefix(">"), name.startswith(">")) for name in self.columns]

    def for_terminal(self) -> Table:
        """Return the table as rich prints it."""
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        for name, is_right in self.heads:
            table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table
