"""Which weights LoRA adapts and which it leaves frozen, by kind of layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CoverageRow:
    """The weights that an adapter could be on, over all layers of one kind."""

    kind: str
    layers: int
    weights: int  # linears, and stacks of experts
    adapted: int
    frozen: tuple[str, ...]  # those without an adapter, by their name in the layer


@dataclass(frozen=True)
class Coverage:
    """Linears that LoRA trains: printed at the start of a run and kept in its record."""

    rows: tuple[CoverageRow, ...]
    trainable: int  # parameters
    total: int  # parameters, adapters included

    @property
    def percent(self) -> float:
        """Trainable parameters in percent of all."""
        return 100.0 * self.trainable / self.total

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for record.json."""
        return {**asdict(self), "percent": self.percent}

    def __str__(self) -> str:
        head = ("layers", "count", "weights", "adapted", "left frozen")
        body = [
            (row.kind, row.layers, row.weights, row.adapted, ", ".join(row.frozen) or "-")
            for row in self.rows
        ]
        table = [[str(cell) for cell in row] for row in (head, *body)]
        name, *numbers, _ = [max(map(len, column)) for column in zip(*table)]
        lines = []
        for kind, *counts, frozen in table:
            right = [count.rjust(width) for count, width in zip(counts, numbers)]
            lines.append("  ".join([kind.ljust(name), *right, frozen]))
        lines.append(
            f"trainable: {self.trainable:,} of {self.total:,} parameters ({self.percent:.2f} %)"
        )
        return "\n".join(lines)
