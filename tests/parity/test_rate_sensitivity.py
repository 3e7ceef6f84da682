"""Known bugs of the rate of LoRA's B, planted one at a time as in test_sensitivity.py: each must
turn a cell red."""

from __future__ import annotations

import pytest

from shardwise.assembly import build, optimizer
from tests.parity.features.rates import FIXED
from tests.parity.test_sensitivity import check_caught, planted

NAIVE, CUT, STAGES, EXPERTS = FIXED


def ratio_on_a():
    optimizer.is_factor_b = lambda name: ".lora_A." in name


def ratio_lost():
    optimizer.is_factor_b = lambda name: False


def ratio_lost_in_the_schedule():
    make = build.make_lr_schedule

    def with_one_rate(cfg, of_run, *args):
        for group in of_run.param_groups:
            group["lr"] = cfg.lr
        return make(cfg, of_run, *args)

    build.make_lr_schedule = with_one_rate


def ratio_lost_after_the_first_step():
    make = build.make_lr_schedule

    def with_one_rate(cfg, of_run, *args):
        schedule = make(cfg, of_run, *args)
        schedule.base_lrs = [cfg.lr] * len(schedule.base_lrs)
        return schedule

    build.make_lr_schedule = with_one_rate


def experts_left_out():
    is_factor_b = optimizer.is_factor_b
    optimizer.is_factor_b = lambda name: is_factor_b(name) and ".experts." not in name


BUGS = (
    *((ratio_on_a, cell) for cell in FIXED),
    (ratio_lost, NAIVE),
    (ratio_lost_in_the_schedule, CUT),
    (ratio_lost_after_the_first_step, STAGES),
    (experts_left_out, EXPERTS),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
