"""Cells in which Muon updates the matrices of layers, and AdamW everything else."""

from __future__ import annotations

from tests.parity.harness import Cell

CELLS = tuple(
    Cell(family, layout, "full", nproc, "muon")
    for family in ("llama", "qwen3_5_text", "granitemoehybrid", "qwen3_moe")
    for layout, nproc in (("ddp", 2), ("fsdp2", 2), ("hsdp", 4))
)
FIXED = (
    Cell("qwen3_5_text", "ddp", "full", 2, "muon"),
    Cell("llama", "fsdp2", "full", 2, "muon"),
    Cell("qwen3_moe", "fsdp2", "full", 2, "muon"),
)
"""Of these `make test` runs."""
