"""The page of measured collectives is what the record says."""

from __future__ import annotations

import json
from statistics import median

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tools import messages


def test_the_page_is_that_of_the_record():
    assert messages.PAGE.read_text("utf-8") == messages.page(), "run python -m tools.messages"


def test_a_cell_is_the_median_of_its_calls():
    rows = json.loads(messages.RESULTS.read_text("utf-8"))["processes"]["4"]
    of = next(of for kind, num_bytes, of in rows if (kind, num_bytes) == ("reduce", 2**26))
    assert {len(of) for _, num, of in rows if num == 2**26} == {3 * messages.CALLS[-1]}
    line = messages.page().split("## 4 processes")[1].split("| reduce |")[1].splitlines()[0]
    value, unit, *_ = line.split("|")[-2].split()
    assert float(value) * {"ms": 1e-3, "s": 1}[unit] == pytest.approx(median(of), rel=5e-3)


def moved() -> dict[str, list[float]]:
    """What each kind leaves of tensors that are full of a rank's number, from 1."""
    found = {}
    for kind, call in messages.calls_of(16, 2).items():
        for tensor in filter(torch.is_tensor, call.args):
            tensor.fill_(dist.get_rank() + 1)
        call()
        found[kind] = call.args[0].tolist()
    return found


def test_each_call_is_the_collective_of_its_name():
    first, second = run_ranks(2, moved)
    gathered, summed = [1.0, 1.0, 2.0, 2.0], [3.0] * 4
    expected = {"all-reduce": summed, "all-gather": gathered, "reduce-scatter": summed[:2]}
    expected |= {"all-to-all": gathered, "broadcast": [1.0] * 4}
    assert first == expected | {"reduce": summed}
    del second["reduce"]  # is left to the library
    assert second == expected
