"""Known bugs of 8-bit AdamW, planted one at a time as in test_sensitivity.py: each turns a cell
red."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly import build
from shardwise.kernels import eight_bit
from shardwise.parallel.optimizers.adamw8bit import AdamW8bitUpdate
from tests.parity.features.eight_bit import FIXED
from tests.parity.test_sensitivity import check_caught, planted

SHARDED, ADAPTERS, SHARED, EXPERTS, CUT, HALVED, TOKENS, *_ = FIXED


def scales_of_another_ranks_blocks():
    quantise_ = eight_bit.quantise_

    def of_next(moment, is_signed):
        codes, scales = quantise_(moment, is_signed)
        ranks = [torch.empty_like(scales) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, scales)
        return codes, ranks[(dist.get_rank() + 1) % len(ranks)]

    eight_bit.quantise_ = of_next


def one_scale_for_a_ranks_columns():
    def by_row(moment, is_signed):
        blocks = moment.shape[-1] // eight_bit.BLOCK
        scales = moment.abs().amax(-1, keepdim=True)
        codes = eight_bit.nearest(moment / scales.where(scales > 0, 1.0), is_signed)
        return codes, scales.repeat_interleave(blocks, -1)

    eight_bit.quantise_ = by_row


def selected_by_the_size_of_a_shard():
    make_optimizer = build.make_optimizer

    def by_shard(cfg, named, decayed, selected, precision):
        small = {name for name, p in named if p.to_local().numel() < eight_bit.LEAST}
        return make_optimizer(cfg, named, decayed, selected - small, precision)

    build.make_optimizer = by_shard


def everything_in_32_bits():
    AdamW8bitUpdate.selected = lambda *_: frozenset()


def moments_forgotten_in_each_step():
    eight_bit.dequantise = lambda codes, scales, is_signed: torch.zeros(codes.shape)


def second_moment_in_the_scales_of_the_first():
    update_ = eight_bit.update_

    def mixed(parameter, gradient, state, *args):
        state["exp_avg_sq_scales"].copy_(state["exp_avg_scales"])
        update_(parameter, gradient, state, *args)

    eight_bit.update_ = mixed


def steps_not_counted():
    update_ = eight_bit.update_

    def always_the_first(parameter, gradient, state, *args):
        state["step"].fill_(1)
        update_(parameter, gradient, state, *args)

    eight_bit.update_ = always_the_first


BUGS = (
    (scales_of_another_ranks_blocks, SHARDED),
    (selected_by_the_size_of_a_shard, ADAPTERS),
    (everything_in_32_bits, TOKENS),
    (moments_forgotten_in_each_step, EXPERTS),
    (one_scale_for_a_ranks_columns, CUT),
    (second_moment_in_the_scales_of_the_first, SHARED),
    (steps_not_counted, HALVED),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
