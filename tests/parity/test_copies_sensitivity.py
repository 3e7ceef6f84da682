"""Known bugs of copies of weights in 16 bits, planted one at a time as in test_sensitivity.py: each
must turn a cell red."""

from __future__ import annotations

import pytest
import torch

from shardwise.models import casting
from shardwise.parallel import fsdp2
from tests.parity.features.copies import FIXED
from tests.parity.test_sensitivity import check_caught, planted

SHARDED, WITH_WIDE, REPLICATED, *_ = FIXED


def gradients_reduced_in_16_bits():
    policy = fsdp2.MixedPrecisionPolicy

    def of_one_dtype(**options):
        return policy(**{**options, "reduce_dtype": options["param_dtype"]})

    fsdp2.MixedPrecisionPolicy = of_one_dtype


def all_weights_gathered_in_16_bits():
    fsdp2.copied_names = lambda cfg, hf: {name for name, _ in hf.named_parameters()}


def copies_in_float32():
    casting.hidden_dtype = lambda cfg: torch.float32


BUGS = (
    (gradients_reduced_in_16_bits, SHARDED),
    (all_weights_gathered_in_16_bits, WITH_WIDE),
    (copies_in_float32, REPLICATED),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_a_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
