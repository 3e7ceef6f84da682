"""Merged LoRA linears: what unmerged ones compute, and what rounding W' costs."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.lora_linear import lora_linear, merge, merged_lora_linear, naive
from tests.kernels.lora_linear.cases import draw, run, to, worst


def merged(problem, dtype=None):
    """The forward with W' in a dtype."""
    held = [torch.empty_like(linear.weight, dtype=dtype) for linear in problem.linears]
    for linear, weight in zip(problem.linears, held):
        merge(linear, weight)
    return lambda x, linears, _: merged_lora_linear(x, linears, held)


@pytest.mark.parametrize("shape", [(7, 5, (3,), 1), (33, 17, (9, 4, 5), 2), (0, 5, (3, 4), 2)])
def test_equals_the_unmerged(shape):
    problem = draw(*shape)
    before = [linear.weight.clone() for linear in problem.linears]
    assert worst(run(merged(problem), problem), run(lora_linear, problem)) < 1e-13
    assert all(torch.equal(linear.weight, weight) for linear, weight in zip(problem.linears, before))


def test_without_autocast_in_mixed_dtypes_and_with_it():
    problem = draw(48, 33, (20, 7), 8, torch.bfloat16, torch.float32)
    found = run(merged(problem), problem)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 4
    eps = torch.finfo(torch.bfloat16).eps
    assert worst(found, run(naive.lora_linear, to(problem, torch.float64))) < 3 * eps
    with torch.autocast("cpu", torch.bfloat16):
        assert worst(run(merged(problem), problem), run(naive.lora_linear, to(problem, torch.float64))) < 5 * eps


def test_the_adapter_of_an_output_that_nobody_uses_has_no_gradient():
    problem, plain = draw(12, 10, (6, 8), 2), draw(12, 10, (6, 8), 2)
    merged(problem)(*problem)[1].sum().backward()
    naive.lora_linear(*plain)[1].sum().backward()
    found, expected = ([t.grad for t in one.inputs()] for one in (problem, plain))
    assert [grad is None for grad in found] == [grad is None for grad in expected] == [False, True, False, True, False]
    assert worst(found[::2], expected[::2]) < 1e-13


def test_an_adapter_below_the_weights_rounding_is_lost(capsys):
    """An update of a fraction of the weight's last place: what of it is in the output, merged and not."""
    lines = []
    for share in (1 / 16, 1 / 256, 1 / 4096):
        problem = draw(64, 512, (128,), 8, torch.bfloat16, torch.float32, bias=False)
        (linear,) = problem.linears
        size = share * linear.weight.float().std() / (linear.scale * (linear.b @ linear.a).std())
        problem = problem._replace(linears=[linear._replace(scale=linear.scale * size.item())])
        without = [one._replace(scale=0.0) for one in problem.linears]
        wide = to(problem, torch.float64)
        update = (
            naive.lora_linear(*wide)[0]
            - naive.lora_linear(wide.x, to(problem._replace(linears=without), torch.float64).linears)[0]
        )
        # Outputs in float32, so that only W' is rounded.
        narrow = to(problem, torch.float32)
        held = torch.empty(128, 512, dtype=torch.bfloat16)
        merge(problem.linears[0], held)
        found = narrow.x.detach() @ held.float().t() - narrow.x.detach() @ narrow.linears[0].weight.t()
        error = ((found - update).norm() / update.norm()).item()
        lines.append(f"  update of 1/{round(1 / share)} of the weights: relative error of its output {error:.1%}")
        # What lies well above the last of bfloat16's 8 bits is rounded by 2^-7 / sqrt(12) of a weight's power of two,
        # which is 0.72 of the weight; what lies below is lost.
        assert error == pytest.approx(min(1.0, 2**-7 / 12**0.5 * 0.72 / share), rel=0.4)
    with capsys.disabled():
        print("", *lines, sep="\n")
