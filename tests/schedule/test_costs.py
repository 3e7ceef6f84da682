from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.base.schedule.costs import COUNTED, Cost, CostSource, effective
from shardwise.base.schedule.orders import ORDERS
from shardwise.base.schedules import HALVING

FROZEN = Cost(
    "layers.0",
    1.0,
    2.0,
    0.0,
    10,
    7,
    weight_bytes=100,
    parameters=50,
    trainable=False,
    split_seconds=0.5,
)
TRAINED = Cost("layers.1", 3.0, 4.0, 5.0, 20, 8, 100, 40, 80, parameters=50, split_seconds=0.25)


def test_neighbours_add_up():
    both = FROZEN + TRAINED + TRAINED
    assert both.name == "layers.0 to layers.1"
    assert both.seconds == 3 + 12 + 12
    assert both.backward_seconds == 2 + 9 + 9
    assert both.split_seconds == 1.0
    assert both.activation_bytes == 50
    assert both.output_bytes == 8  # the last one's, to the next chunk
    assert both.state_bytes == 100 + 220 + 220
    assert both.parameters == 150
    assert both.trainable
    assert both.backward


@pytest.mark.parametrize("schedule", ORDERS)
def test_below_the_lowest_trainable_unit_is_no_backward(schedule):
    units = effective([FROZEN, TRAINED, FROZEN], schedule)
    if schedule not in HALVING:
        assert units[0].seconds == 1.0
        assert (units[0].activation_bytes, units[0].state_bytes) == (0, 100)
        assert not units[0].backward
    else:
        assert units[0] == FROZEN
    assert units[1:] == (TRAINED, FROZEN)  # above it gradients pass through what is frozen


def test_the_source_of_costs_in_words():
    assert str(COUNTED) == "counted FLOPs"
    assert str(replace(COUNTED, rate="2 TFLOP/s")) == "counted FLOPs at 2 TFLOP/s"
    measured = CostSource("abc", num_processes=2)
    assert (str(measured), measured.is_measured) == ("profile abc, 2 processes", True)
    assert not COUNTED.is_measured


def test_schedules_know_each_other():
    assert set(HALVING) <= set(ORDERS)


def test_nothing_trainable_is_forward_only():
    assert [unit.seconds for unit in effective([FROZEN, FROZEN], "1f1b")] == [1.0, 1.0]


def test_the_package_is_a_leaf():
    modules = ", ".join(
        f"shardwise.base.schedule.{name}"
        for name in ("costs", "orders", "simulate", "split", "timeline")
    )
    heavy = {"torch", "transformers", "matplotlib"}
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
