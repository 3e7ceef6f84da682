"""The products of experts with their rows, one expert after the other, on any device.

`ends` [E] lies on the CPU: a loop has to know on the host which rows are whose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.kernels.grouped_linear.gradients import Gradients, Needs


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return y [rows, out] as a new tensor."""
    y = x.new_empty(len(x), weight.shape[1])
    for expert, rows in _spans(ends, len(x)):
        torch.mm(x[rows], weight[expert].T, out=y[rows])
        if a is not None and b is not None:
            y[rows].addmm_(x[rows] @ a[expert].T, b[expert].T, alpha=scale)
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
    needs: Needs,
) -> Gradients:
    """Return the gradients that are needed as new tensors. Those of experts without rows are 0."""
    dx = torch.empty_like(x) if needs.x else None
    dweight = torch.zeros_like(weight) if needs.weight else None
    da = torch.zeros_like(a) if a is not None and needs.factors else None
    db = torch.zeros_like(b) if b is not None and needs.factors else None
    for expert, rows in _spans(ends, len(x)):
        if dx is not None:
            torch.mm(dy[rows], weight[expert], out=dx[rows])
        if dweight is not None:
            dweight[expert] = dy[rows].T @ x[rows]
        if a is None or b is None:
            continue
        g = (dy[rows] @ b[expert]).mul_(scale)  # [rows, R]
        if dx is not None:
            dx[rows].addmm_(g, a[expert])
        if da is not None and db is not None:
            h = x[rows] @ a[expert].T  # [rows, R]
            da[expert] = g.T @ x[rows]
            db[expert] = (dy[rows].T @ h).mul_(scale)
    return Gradients(dx, dweight, da, db)


def _spans(ends: torch.Tensor, num_rows: int) -> Iterator[tuple[int, slice]]:
    """Yield every expert that has rows, and which rows these are."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
    assert start == num_rows, f"{num_rows} rows, of which experts have {start}"
