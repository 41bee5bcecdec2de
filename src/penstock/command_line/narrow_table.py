"""A table on a narrow terminal: in pieces one below the other, so that no figure is cut."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["NarrowTable"]

BOUNDLESS = 10_000


@dataclass(frozen=True)
class NarrowTable:
    """``table``, cut into pieces that fit; each begins with its first ``keys`` columns."""

    table: Table
    keys: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wide = options.update(max_width=BOUNDLESS)
        keys, others = self.table.columns[: self.keys], self.table.columns[self.keys :]
        shown: list[Column] = []
        for column in others:
            piece = self.piece([*keys, *shown, column])
            if shown and Measurement.get(console, wide, piece).maximum > options.max_width:
                yield self.piece([*keys, *shown])
                shown = []
            shown.append(column)
        yield self.piece([*keys, *shown])

    def piece(self, columns: list[Column]) -> Table:
        """The table with these columns only."""
        piece = copy(self.table)
        piece.columns = [replace(column, _index=k) for k, column in enumerate(columns)]
        return piece
