"""The products of experts with their rows, one expert after the other, on any device.

`ends` [E] lies on the CPU: a loop has to know on the host which rows are whose. Tensors are cut
into experts once, not in each product, and PEFT's B, whose numbers lie apart, is made contiguous
once: with a few rows for each expert, such steps take as long as the products.
"""

from collections.abc import Sequence

import torch

from shardwise.kernels.grouped_linear.gradients import Gradients, Needs

Parts = Sequence[torch.Tensor]
"""A view for each expert; none of a tensor that there is not."""


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
    counts = _counts(ends, len(x))
    x_of, y_of, weight_of = x.split(counts), y.split(counts), weight.mT.unbind()
    a_of, b_of = _transposed(a), _transposed(b)
    for e in _with_rows(counts):
        torch.mm(x_of[e], weight_of[e], out=y_of[e])
        if a_of:
            y_of[e].addmm_(x_of[e] @ a_of[e], b_of[e], alpha=scale)
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
    dx = x.new_empty(x.shape) if needs.x else None
    dweight = torch.zeros_like(weight) if needs.weight else None
    da = a.new_zeros(a.shape) if a is not None and needs.factors else None
    db_t = b.new_zeros(b.mT.shape) if b is not None and needs.factors else None  # [E, R, out]
    counts = _counts(ends, len(x))
    x_of, dy_of, weight_of = x.split(counts), dy.split(counts), weight.unbind()
    a_of, b_of = _transposed(a), _transposed(b)
    dx_of: Parts = () if dx is None else dx.split(counts)
    dweight_of, da_of, db_t_of = (() if d is None else d.unbind() for d in (dweight, da, db_t))
    for e in _with_rows(counts):
        if dx_of:
            torch.mm(dy_of[e], weight_of[e], out=dx_of[e])
        if dweight_of:
            torch.mm(dy_of[e].T, x_of[e], out=dweight_of[e])
        if not a_of:
            continue
        g = dy_of[e] @ b_of[e].T  # [rows, R]
        if dx_of:
            dx_of[e].addmm_(g, a_of[e].T, alpha=scale)
        if da_of:
            torch.mm(g.T, x_of[e], out=da_of[e])
            # A CPU takes five times as long for the transposed product, which has R columns.
            torch.mm((x_of[e] @ a_of[e]).T, dy_of[e], out=db_t_of[e])
    if da is None or db_t is None:
        return Gradients(dx, dweight, None, None)
    return Gradients(dx, dweight, da.mul_(scale), db_t.mul_(scale).mT.contiguous())


def _transposed(factor: torch.Tensor | None) -> Parts:
    """Return the transposes of all experts' factors, of each of which the numbers lie together."""
    return () if factor is None else factor.contiguous().mT.unbind()


def _counts(ends: torch.Tensor, num_rows: int) -> list[int]:
    """Return how many rows each expert has."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    assert sum(counts) == num_rows, f"{num_rows} rows, of which experts have {sum(counts)}"
    return counts


def _with_rows(counts: list[int]) -> list[int]:
    """Return the experts that have rows."""
    return [expert for expert, count in enumerate(counts) if count]
