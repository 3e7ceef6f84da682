"""Rows of experts equal those that are taken one by one, and their gradient its sums."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.grouped_linear import rows_of_experts
from tests.kernels.gates import error
from tests.kernels.grouped_linear.test_fused import UNEVEN, ends_of


@pytest.mark.parametrize("counts", [UNEVEN, (0, 0, 0), (3,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_rows_that_are_taken_one_by_one(counts, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(counts), 5, generator=generator).to(dtype).requires_grad_()
    places = [expert for expert, count in enumerate(counts) for _ in range(count)]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return rows_of_experts(x, ends_of(counts), sum(counts))

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[place] for place in places]) if places else x[:0]

    if not places:
        assert ours(x).shape == (0, 5)
        assert torch.autograd.grad(ours(x).sum(), x)[0].count_nonzero() == 0
        return
    assert error(ours, one_by_one, [x]) < {torch.bfloat16: 2**-7}.get(dtype, 1e-6)
