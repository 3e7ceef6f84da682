"""Numbers that a CPU is slow with, in a rank and after it."""

import numpy as np
import pytest
import torch

from shardwise.launch.rank import _without_denormals


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU has no such switch")
def test_denormal_numbers_are_zeros_in_a_rank_alone():
    small = np.float32(1e-39)
    assert small * np.float32(1) != 0
    with _without_denormals():
        assert small * np.float32(1) == 0
        with _without_denormals():
            pass
        assert small * np.float32(1) == 0
    assert small * np.float32(1) != 0
