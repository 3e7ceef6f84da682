"""Masks by hash: the same numbers everywhere, and none that shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.kernels.dropout import MULTIPLIERS, Dropout, hash32, mix, threshold

int32 = st.integers(-(2**31), 2**31 - 1)


def plain_mix(x: int) -> int:
    """As the module's first lines have it, of whole numbers."""
    x &= 2**32 - 1
    x ^= x >> 16
    x = x * MULTIPLIERS[0] % 2**32
    x ^= x >> 15
    x = x * MULTIPLIERS[1] % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


@settings(deadline=None)
@given(int32, int32)
def test_the_hash_is_what_it_says(seed, counter):
    actual = hash32(
        torch.tensor([seed], dtype=torch.int32), torch.tensor([counter], dtype=torch.int32)
    )
    assert actual.item() == plain_mix(seed ^ plain_mix(counter))


def test_known_numbers():
    # By the formula, worked out with whole numbers: the same in every kernel.
    numbers = [0, 1753845952, 1734902346]
    assert [plain_mix(x) for x in (0, 1, -1)] == numbers
    assert mix(torch.tensor([0, 1, -1], dtype=torch.int32)).tolist() == numbers


def test_every_bit_of_a_counter_turns_half_of_the_bits():
    x = torch.randint(
        -(2**31), 2**31, (20_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    for bit in range(32):
        turned = mix(x) ^ mix(x ^ (1 << bit if bit < 31 else -(2**31)))
        share = torch.stack([(turned >> i) & 1 for i in range(32)]).float().mean(1)
        # 20,000 draws of 1/2: standard deviation 0.0035; six of them.
        assert (share - 0.5).abs().max() < 0.021


def mask(p: float, num_tokens: int = 512, num_features: int = 512) -> torch.Tensor:
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    return ~Dropout(p, hash32(torch.tensor([12345], dtype=torch.int32), tokens)[None]).keep(
        0, num_features
    )


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_over_all_over_tokens_and_over_features(p):
    dropped = mask(p).float()
    spread = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * spread / 512
    for dim in (0, 1):
        means = dropped.mean(dim)
        assert (means - p).abs().max() < 5 * spread / 512**0.5  # of 512 means, each of 512 draws
        # Neither more even nor less than chance has it: a variance of 512 draws is known to
        # sqrt(2/512), 6 %; five.
        assert abs(means.var() / (p * (1 - p) / 512) - 1) < 0.32


@pytest.mark.parametrize(
    ("tokens", "features"), [(0, 1), (1, 0), (1, 1), (0, 2), (0, 64), (64, 0), (3, 5), (128, 128)]
)
def test_neighbours_are_independent(tokens, features):
    dropped = mask(0.5).float() - 0.5
    shifted = dropped.roll((tokens, features), (0, 1))
    # 262,144 products of +-1/4: standard deviation of the mean 0.25/512; five of them.
    assert abs((dropped * shifted).mean()) < 5 * 0.25 / 512


def test_any_rate():
    assert threshold(0.0) == -(2**31)  # keeps all
    assert threshold(0.5) == 0
    assert threshold(1 - 1e-12) == 2**31 - 1
    assert not mask(0.0).any()


def test_features_by_their_place_in_the_whole():
    seeds = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    some = torch.tensor([7, 1], dtype=torch.int32)
    for module in (0, 1):
        whole = Dropout(0.5, seeds).keep(module, 8)
        assert torch.equal(Dropout(0.5, seeds, some).keep(module, 2), whole[:, [7, 1]])


def test_what_is_dropped_is_zero_even_if_infinite():
    drop = Dropout(0.5, torch.zeros(1, 1, dtype=torch.int32))
    x = torch.full((1, 64), float("inf"))
    assert torch.equal(drop.drop(x) == 0, ~drop.keep(0, 64))
