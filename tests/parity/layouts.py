"""The layouts that the matrix has to prove: all that some family may run under."""

from __future__ import annotations

from shardwise.config.rules import offered_layouts

EXPERTS = tuple(layout for layout in offered_layouts() if "ep" in layout.split("-"))
CONTEXT = tuple(
    layout for layout in offered_layouts() if "cp" in layout.split("-") and layout not in EXPERTS
)
PROVEN = tuple(layout for layout in offered_layouts() if layout not in (*CONTEXT, *EXPERTS))
WITH_TENSOR = tuple(layout for layout in PROVEN if "tp" in layout.split("-"))
