"""What a part of a model does by itself."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.base.interfaces import Part


@pytest.mark.parametrize("mode", [True, False])
def test_a_part_sets_the_mode_of_all_modules_where_it_changes(mode):
    part = Part()
    part.hf = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    part.train(not mode)
    assert all(module.training is not mode for module in part.modules())
    part.train(mode)
    assert all(module.training is mode for module in part.modules())
    part.hf.train(not mode)  # the caller's doing, of which the part itself knows nothing
    part.train(mode)
    assert all(module.training is mode for module in part.modules())


def test_a_part_whose_mode_is_set_walks_over_no_modules():
    part = Part()
    part.hf = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    part.hf[0].eval()
    part.train()
    assert not part.hf[0].training
