"""Known bugs of products in 8 bits, planted one at a time as in test_sensitivity.py: each must
turn a cell red."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.kernels import float8 as kernel
from shardwise.kernels.float8 import Float8
from shardwise.models.patches import lora_kernel
from shardwise.parallel import float8_scales
from tests.parity.features.products import FIXED
from tests.parity.test_sensitivity import check_caught, planted

CUT, SHARED, REPLICATED, TOKENS, SHARDED, HALVED, *_ = FIXED


def largest_of_its_own_share():
    float8_scales._largest = lambda group, amax: amax


def largest_of_another_rank():
    def of_next(group, amax):
        shares = [torch.empty_like(amax) for _ in range(group.size())]
        dist.all_gather(shares, amax.contiguous(), group=group)
        return shares[(dist.get_rank(group) + 1) % group.size()]

    float8_scales._largest = of_next


def gradients_scaled_by_their_own_share():
    over_shares = float8_scales._over_shares

    def without_out(products, *args):
        over_shares(products, *args)
        products.largest.pop("out", None)

    float8_scales._over_shares = without_out


def partial_sums_rounded_one_by_one():
    float8_scales._sum_on_one_rank = lambda rows, group, dy: dy


def sums_multiplied_on_every_rank():
    def on_every_rank(rows, group, dy):
        complete = dy.clone()
        for segment, start, length, place in rows.shared_segments(dist.get_rank(group)):
            summed = torch.zeros(len(dy), segment.size)
            summed[:, place : place + length] = dy[:, start : start + length]
            dist.all_reduce(summed, group=group)
            complete[:, start : start + length] = summed[:, place : place + length]
        return complete

    float8_scales._sum_on_one_rank = on_every_rank


def scales_of_weights_from_before_the_step():
    in_8_bits, kept = Float8._in_8_bits, {}

    def stale(self, operand, dims, summed):
        values, scale = in_8_bits(self, operand, dims, summed)
        if dims != ("out", "in"):
            return values, scale
        scale = kept.setdefault((self, summed), scale)
        return kernel.rounded((operand * scale).clamp(-448, 448), torch.float8_e4m3fn), scale

    Float8._in_8_bits = stale


def gradients_in_the_format_of_activations():
    in_8_bits = Float8._in_8_bits

    def without_range(self, operand, dims, summed):
        return in_8_bits(self, operand, ("rows", "in") if dims[1] == "out" else dims, "in")

    Float8._in_8_bits = without_range


def weights_scaled_by_row_in_the_backward_too():
    in_8_bits = Float8._in_8_bits

    def by_row(self, operand, dims, summed):
        if dims == ("out", "in") and summed == "out":
            values, scale = in_8_bits(self, operand, dims, "in")
            return values / scale * scale.amin(), scale.amin().view(1, 1)
        return in_8_bits(self, operand, dims, summed)

    Float8._in_8_bits = by_row


def linears_with_adapters_left_out():
    compute = lora_kernel._Shared._compute

    def plain(self, layers, x):
        self.float8 = {}
        return compute(self, layers, x)

    lora_kernel._Shared._compute = plain


def halves_that_give_no_gradient_of_weights():
    Float8.weight_gradient = lambda self, dy, x: torch.zeros(dy.shape[1], x.shape[1])


BUGS = (
    (largest_of_its_own_share, CUT),
    (largest_of_its_own_share, SHARED),
    (largest_of_its_own_share, TOKENS),
    (largest_of_another_rank, CUT),
    (largest_of_another_rank, TOKENS),
    (gradients_scaled_by_their_own_share, CUT),
    (partial_sums_rounded_one_by_one, SHARED),
    (partial_sums_rounded_one_by_one, REPLICATED),
    (sums_multiplied_on_every_rank, SHARED),
    (sums_multiplied_on_every_rank, REPLICATED),
    (scales_of_weights_from_before_the_step, SHARDED),
    (gradients_in_the_format_of_activations, SHARDED),
    (weights_scaled_by_row_in_the_backward_too, HALVED),
    (linears_with_adapters_left_out, CUT),
    (halves_that_give_no_gradient_of_weights, HALVED),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
