"""Known bugs of weights in few bits, planted one at a time as in test_sensitivity.py: each must
turn a cell red."""

from __future__ import annotations

import pytest
import torch

from shardwise.assembly import order, state
from shardwise.kernels import quantised
from shardwise.kernels.grouped_linear import fused as grouped
from shardwise.kernels.lora_linear import fused
from shardwise.models import quantise
from shardwise.models.stored import Stored
from shardwise.models.tensor_cuts import DimCut, even
from tests.parity.features.bases import FIXED
from tests.parity.test_sensitivity import check_caught, planted

CUT, SPREAD, SHARDED, STAGES, POWERS, POWERS_OF_EXPERTS, *_ = FIXED


def scales_of_another_rank():
    quantise_whole = state.quantised

    def rolled(matrix, fmt, name):
        tensors = quantise_whole(matrix, fmt, name)
        return {**tensors, "scales": tensors["scales"].roll(matrix.shape[-2] // 2, -2)}

    state.quantised = rolled


def rows_of_scales_in_the_order_of_the_file():
    cuts = Stored.cuts

    def in_order(self, cut):
        for name, of_tensor in cuts(self, cut):
            rows = of_tensor.rows
            is_codes = name == "codes" or cut.dim == len(self.shape) - 1
            plain = even(rows.num_ranks, rows.size, "rows")
            yield name, of_tensor if is_codes else DimCut(cut.dim, plain)

    Stored.cuts = in_order


def steps_of_scales_lost():
    dequantise = quantised.dequantise

    def without(tensors, fmt, dtype):
        steps = torch.tensor([0.0, 1 / 255]).expand_as(tensors["steps"])
        return dequantise({**tensors, "steps": steps}, fmt, dtype)

    quantised.dequantise = without


def values_scaled_twice_in_the_backward():
    weights_of = fused.weights_of
    calls = []

    def twice(tensors, layouts):
        calls.append(0)
        for weight in weights_of(tensors, layouts):
            # A forward reads weights before its backward does.
            yield weight.to(weight.dtype) * 1.01 if len(calls) > 100 else weight

    fused.weights_of = twice


def halves_of_a_byte_exchanged():
    dequantise = quantised.dequantise

    def exchanged(tensors, fmt, dtype):
        codes = tensors["codes"]
        return dequantise({**tensors, "codes": codes >> 4 | (codes & 15) << 4}, fmt, dtype)

    quantised.dequantise = exchanged


def stacks_of_experts_read_as_other_experts():
    weights_of = grouped.weights_of

    def rolled(tensors, layouts):
        for weight in weights_of(tensors, layouts):
            rest = tuple(tensor.roll(1, 0) for tensor in weight.tensors)
            yield weight._replace(tensors=rest)

    grouped.weights_of = rolled


def scales_of_the_block_before():
    dequantise = quantised.dequantise

    def rolled(tensors, fmt, dtype):
        return dequantise({**tensors, "scales": tensors["scales"].roll(1, -1)}, fmt, dtype)

    quantised.dequantise = rolled


def base_kept_as_it_was():
    order.quantise_frozen = lambda hf, spec, fmt: None


def stacks_of_experts_kept_as_they_were():
    stored_paths = quantise.stored_paths

    def without_experts(hf, spec, base):
        paths = stored_paths(hf, spec, base)
        yield from (path for path in paths if "experts" not in path.split("."))

    quantise.stored_paths = without_experts


BUGS = (
    (scales_of_another_rank, CUT),
    (rows_of_scales_in_the_order_of_the_file, CUT),
    (steps_of_scales_lost, CUT),
    (values_scaled_twice_in_the_backward, CUT),
    *((halves_of_a_byte_exchanged, cell) for cell in (SPREAD, POWERS)),
    *((scales_of_the_block_before, cell) for cell in (POWERS, POWERS_OF_EXPERTS)),
    (stacks_of_experts_read_as_other_experts, SPREAD),
    (stacks_of_experts_kept_as_they_were, SPREAD),
    (base_kept_as_it_was, SHARDED),
    (base_kept_as_it_was, STAGES),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
