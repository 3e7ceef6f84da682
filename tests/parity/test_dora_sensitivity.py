"""Known bugs of DoRA, planted one at a time: each must turn a cell red."""

from __future__ import annotations

import pytest

from shardwise.assembly import state
from shardwise.models.names import is_magnitude
from shardwise.models.patches import lora_kernel
from shardwise.models.tensor_cuts import DimCut, Rows, Segment
from shardwise.parallel import tensor_parallel
from tests.parity.features.dora import FIXED
from tests.parity.test_sensitivity import check_caught, planted

TENSOR, SHARED_TOKENS, MAMBA, HALVED, STORED, FLAT = FIXED


def length_of_a_ranks_part():
    norms = lora_kernel.row_norms
    lora_kernel.row_norms = lambda weight, a, b, scale, add_up: norms(weight, a, b, scale)


def gradient_through_the_length():
    norms = lora_kernel.row_norms.__wrapped__
    lora_kernel.row_norms = norms

    def scaled(y, magnitude, norms, bias, half):
        scaled = magnitude / norms * y
        return scaled if bias is None else scaled + bias

    lora_kernel.with_magnitude = scaled


def length_of_the_base_alone():
    norms = lora_kernel.row_norms
    lora_kernel.row_norms = lambda weight, a, b, scale, add_up: norms(weight, a, b, 0.0, add_up)


def gradient_of_one_rank():
    """The gradient of a magnitude that every rank holds is this rank's partial sum."""
    split_block = tensor_parallel._Splitter._split_block

    def without(self, path, split):
        split_block(self, path, split)
        self.result.partial_sums -= {*filter(is_magnitude, self.result.partial_sums)}

    tensor_parallel._Splitter._split_block = without


def lengths_in_another_order():
    """Magnitudes are cut into even parts where the rows of their matrix are not."""
    cuts_of = tensor_parallel.parameter_cuts

    def even(block, split):
        cuts = cuts_of(block, split)
        for name, cut in cuts.items():
            if is_magnitude(name):
                cuts[name] = DimCut(0, Rows(cut.rows.num_ranks, (Segment(cut.rows.size, 2),)))
        return cuts

    tensor_parallel.parameter_cuts = even


def no_gradient_in_the_second_half():
    with_magnitude = lora_kernel.with_magnitude

    def frozen(y, magnitude, norms, bias, half):
        if half is not None and magnitude.requires_grad:
            magnitude.register_hook(lambda grad: grad * (half.current != "weight"))
        return with_magnitude(y, magnitude, norms, bias, half)

    lora_kernel.with_magnitude = frozen


def start_from_the_weights_of_the_files():
    """Magnitudes start from weights that the run does not compute with."""
    quantise, read = state.quantised, []

    def noting(full, *args):
        read[:] = [full]
        return quantise(full, *args)

    state.quantised, state.dequantise = noting, lambda *args: read[0]


def start_from_one():
    first = state.lora.first_magnitude
    state.lora.first_magnitude = lambda layer, weight: first(layer, weight).fill_(1.0)


BUGS = (
    *((length_of_a_ranks_part, cell) for cell in (TENSOR, SHARED_TOKENS, MAMBA, STORED)),
    (gradient_through_the_length, FLAT),
    *((length_of_the_base_alone, cell) for cell in (FLAT, STORED)),
    *((gradient_of_one_rank, cell) for cell in (TENSOR, SHARED_TOKENS)),
    (lengths_in_another_order, SHARED_TOKENS),
    (no_gradient_in_the_second_half, HALVED),
    (start_from_the_weights_of_the_files, STORED),
    (start_from_one, FLAT),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
