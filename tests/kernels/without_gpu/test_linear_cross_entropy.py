"""The loss with Triton's softmax, interpreted, against the plain one, at odd sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shardwise.config import UserError
from shardwise.kernels import triton_support
from shardwise.kernels.linear_cross_entropy import chunked, naive, triton
from tests.distributed import run_ranks
from tests.kernels.linear_cross_entropy.cases import IGNORED, inputs, run, run_shared

ours = partial(chunked.linear_cross_entropy, kernel="triton")
V = 37


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Three blocks a row, the last not full; three rows of float64 a chunk."""
    monkeypatch.setattr(triton, "BLOCK", 16)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * V * 8)


CASES = [
    (1, True, {"with_bias": False}),
    (3, False, {"with_bias": True}),
    (4, True, {"with_bias": False, "scale": 0.3}),
    (4, True, {"with_bias": True, "softcap": 2.0}),
    (8, False, {"with_bias": True, "scale": 1.7, "softcap": 2.3}),
    (8, False, {"with_bias": False}),
]


def check(found, expected, dtype):
    """Sums of at most 37 numbers in another order: a few units in the last place of their largest
    partial sums.
    """
    precision = 50 * torch.finfo(dtype).eps
    (value, grads), (expected_value, expected_grads) = found, expected
    torch.testing.assert_close(value, expected_value, rtol=precision, atol=0)
    assert len(grads) == len(expected_grads)
    for grad, expected_grad in zip(grads, expected_grads):
        assert (grad - expected_grad).abs().max() <= precision * expected_grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "frozen", "options"), CASES)
def test_equals_the_plain_loss(n, frozen, options, dtype):
    tensors, labels = inputs(n, 5, V, ignored=0.3 if n > 1 else 0.0, frozen=frozen, dtype=dtype)
    found = run(ours, tensors, labels, **options)
    check(found, run(naive.linear_cross_entropy, tensors, labels, **options), dtype)
    assert found[0].dtype == dtype
    assert (found[1][0][labels == IGNORED] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_torchs_operators(dtype):
    """Both round logits and their gradient to `dtype`, and nothing else but sums in float32."""
    exact, labels = inputs(7, 16, V)
    stored = [t.detach().to(dtype).requires_grad_() for t in exact]
    value, grads = run(ours, stored, labels, softcap=5.0)
    expected, expected_grads = run(
        partial(chunked.linear_cross_entropy, kernel="torch"), stored, labels, softcap=5.0
    )
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    for grad, expected_grad in zip(grads, expected_grads):
        # Of the same rounded logits, so that a rounding goes the other way now and then: one unit
        # of one summand.
        assert (grad - expected_grad).abs().max() <= 2 * torch.finfo(
            dtype
        ).eps * expected_grad.abs().max()


def test_large_logits_stay_finite():
    weight = torch.tensor([[1e4], [0.0], [-1e4]])
    hidden = torch.ones(2, 1, requires_grad=True)
    loss = ours(hidden, weight, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == 1e4
    assert hidden.grad.flatten().tolist() == [0.0, 1e4]


def test_no_gradient_is_taken_where_none_is_needed(monkeypatch):
    monkeypatch.setattr(triton, "gradient_kernel", None)  # it would fail
    tensors, labels = inputs(5, 5, V, dtype=torch.float32)
    with torch.no_grad():
        assert torch.isfinite(ours(*tensors[:2], labels))


def shared() -> list:
    # Four rows of the last rank's 18 float64 logits, but three of the first one's 19: both must
    # take three.
    chunked.CHUNK_BYTES, triton.BLOCK = 4 * 8 * 18, 16
    found = []
    for n, frozen, options in CASES[2:5]:
        tensors, labels = inputs(n, 5, V, frozen=frozen)
        found.append(run_shared(tensors, labels, kernel="triton", **options))
    return found


def test_vocabulary_over_two_ranks():
    for (n, frozen, options), *ranks in zip(CASES[2:5], *run_ranks(2, shared), strict=True):
        tensors, labels = inputs(n, 5, V, frozen=frozen)
        assert torch.equal(ranks[0][0], ranks[1][0])
        for found in ranks:
            check(found, run(naive.linear_cross_entropy, tensors, labels, **options), torch.float64)


def test_a_wish_that_cannot_be_met_is_an_error(monkeypatch):
    monkeypatch.setattr(triton_support, "INTERPRETED", False)
    triton_support.why_not.cache_clear()
    tensors, labels = inputs(5, 5, V)
    with pytest.raises(UserError, match=r"loss here: .* need a GPU, not cpu$"):
        ours(*tensors[:2], labels)
    triton_support.why_not.cache_clear()


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_that_is_no_token_is_not_taken_for_one(label):
    hidden, weight = torch.randn(2, 5), torch.randn(V, 5)
    assert ours(hidden, weight, torch.tensor([1, label])).isnan()
