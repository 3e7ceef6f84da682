"""The layouts that the matrix has to prove: all that some family may run under."""

from __future__ import annotations

from shardwise.rules import offered_layouts

PROVEN = offered_layouts()
WITH_TENSOR = tuple(layout for layout in PROVEN if "tp" in layout.split("-"))
