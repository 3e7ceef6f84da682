"""Random LoRA linears, what a forward makes of them, and what they are measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import Linear


class Problem(NamedTuple):
    """Arguments of `lora_linear`."""

    x: torch.Tensor
    linears: list[Linear]
    drop: Dropout | None

    def inputs(self) -> list[torch.Tensor]:
        """What may need a gradient: x, then every a, then every b."""
        return [
            self.x,
            *(linear.a for linear in self.linears),
            *(linear.b for linear in self.linears),
        ]


def draw(
    num_rows: int,
    num_in: int,
    sizes: Sequence[int],
    rank: int,
    dtype: torch.dtype = torch.float64,
    factors: torch.dtype | None = None,
    bias: bool = True,
    p: float = 0.0,
    device: str = "cpu",
) -> Problem:
    """Return a linear for each of `sizes`; `factors` is the dtype of a and b if it is another."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).to(
            device, dtype
        )

    linears = [
        Linear(
            randn(size, num_in, std=num_in**-0.5),
            randn(size) if bias else None,
            randn(rank, num_in, std=num_in**-0.5, dtype=factors or dtype).requires_grad_(),
            randn(size, rank, std=rank**-0.5, dtype=factors or dtype).requires_grad_(),
            0.5 + i,
        )
        for i, size in enumerate(sizes)
    ]
    seeds = torch.randint(
        -(2**31), 2**31, (len(sizes), num_rows), generator=generator, dtype=torch.int32
    ).to(device)
    return Problem(
        randn(num_rows, num_in).requires_grad_(), linears, Dropout(p, seeds) if p else None
    )


def to(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same numbers in another dtype."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype).requires_grad_()

    linears = [
        Linear(w.to(dtype), None if c is None else c.to(dtype), leaf(a), leaf(b), scale)
        for w, c, a, b, scale in problem.linears
    ]
    return Problem(leaf(problem.x), linears, problem.drop)


def run(forward: Callable[..., tuple[torch.Tensor, ...]], problem: Problem) -> list[torch.Tensor]:
    """Return outputs, then the gradients of `problem.inputs()`; no two outputs' are equal."""
    ys = forward(*problem)
    places = [torch.arange(y.numel(), device=y.device).view(y.shape) for y in ys]
    # Sixteenths from -1 to 1, exact in every dtype.
    dys = [
        ((16 * torch.cos(place * (i + 1.0))).round() / 16).to(y)
        for i, (y, place) in enumerate(zip(ys, places))
    ]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, problem.inputs(), dys)]


def worst(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest expected number of its tensor."""
    assert [t.shape for t in actual] == [t.shape for t in expected]
    return max(
        (
            (one.double() - other.double()).abs().max()
            / other.double().abs().max().clamp_min(1e-300)
        ).item()
        for one, other in zip(actual, expected, strict=True)
        if other.numel()
    )
