"""Fused attention of some queries on some keys equals all scores at once, merged or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.attention import (
    Merged,
    Sight,
    attend,
    attend_backward,
    blocks,
    naive,
    operators,
)
from shardwise.metrics.memory import PeakMemory


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(
    num_queries: int,
    num_keys: int,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v and a gradient of the output."""
    key_size, value_size = sizes
    q = drawn(2, heads[0], num_queries, key_size, dtype=dtype, seed=1)
    k = drawn(2, heads[1], num_keys, key_size, dtype=dtype, seed=2)
    v = drawn(2, heads[1], num_keys, value_size, dtype=dtype, seed=3)
    return q, k, v, drawn(2, heads[0], num_queries, value_size, dtype=dtype, seed=4)


def with_documents(sight: Sight, num_queries: int, num_keys: int) -> Sight:
    """Return the sight with documents of up to 3 tokens, those of queries where keys have them."""
    end = max(sight.offset + num_queries, num_keys)
    begins = torch.rand(2, end + 40, generator=torch.Generator().manual_seed(5)) < 0.4
    documents = begins.cumsum(1)
    first = max(0, -sight.offset)
    queries = documents[:, first + sight.offset :][:, :num_queries]
    return sight._replace(query_documents=queries, key_documents=documents[:, first:][:, :num_keys])


def output(q, k, v, sight) -> Merged:
    merged = Merged.without_keys(q, v)
    attend(q, k, v, sight, merged)
    return merged


def backward(grad_out, q, k, v, out, lse, sight) -> tuple[torch.Tensor, ...]:
    gradients = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    attend_backward(grad_out, q, k, v, out, lse, sight, gradients)
    return gradients


def check(q, k, v, grad_out, sight, within: float) -> None:
    out, lse = output(q, k, v, sight)
    reference_out, reference_lse = naive.attend(q, k, v, sight)
    torch.testing.assert_close(out, reference_out.to(out.dtype), rtol=0, atol=within)
    torch.testing.assert_close(lse, reference_lse, rtol=0, atol=within)
    gradients = backward(grad_out, q, k, v, out.to(q.dtype), lse, sight)
    wanted = naive.attend_backward(grad_out, q, k, v, reference_out, reference_lse, sight)
    for gradient, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, reference.to(gradient.dtype), rtol=0, atol=within)


@settings(max_examples=25, deadline=None)
@given(
    num_queries=st.integers(1, 21),
    num_keys=st.integers(1, 21),
    offset=st.integers(-25, 25),
    window=st.none() | st.integers(1, 25),
    apart=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    sizes=st.sampled_from([(8, 8), (5, 3), (3, 5)]),
    cap=st.sampled_from([None, 0.4, 3.0]),
)
@example(1, 16, -5, None, False, (4, 2), (8, 8), None)  # a query before all keys
@example(1, 16, -1, None, False, (4, 2), (8, 8), None)
def test_equals_all_scores_at_once(num_queries, num_keys, offset, window, apart, heads, sizes, cap):
    sight = Sight(0.3, offset, window, cap=cap)
    if apart:
        sight = with_documents(sight, num_queries, num_keys)
    check(*inputs(num_queries, num_keys, heads, sizes), sight, within=1e-12)


@pytest.mark.parametrize("window", [None, 300, 600])
@pytest.mark.parametrize("apart", [False, True])
def test_more_queries_than_are_computed_together(window, apart):
    num_tokens = blocks.QUERIES + 90
    sight = Sight(0.3, 0, window)
    if apart:
        sight = with_documents(sight, num_tokens, num_tokens)
    check(*inputs(num_tokens, num_tokens, (2, 1)), sight, within=1e-12)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("offset", [-20, 0, 40])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_more_keys_than_are_computed_together(monkeypatch, window, offset, apart, cap):
    monkeypatch.setattr(blocks, "QUERIES", 16)
    monkeypatch.setattr(blocks, "KEYS", 24)
    sight = Sight(0.3, offset, window, cap=cap)
    if apart:
        sight = with_documents(sight, 100, 110)
    check(*inputs(100, 110, (2, 1)), sight, within=1e-12)


def test_causal_queries_need_no_mask_wherever_they_lie_in_the_row():
    """A rank that gathers all keys computes its queries on those before them, then on their own."""
    kilo = 1024
    pieces = blocks.computed(range(16 * kilo, 20 * kilo), range(128 * kilo), None)
    assert pieces == [(4 * kilo, 16 * kilo, False), (4 * kilo, 4 * kilo, False)]
    assert blocks.computed(range(4 * kilo), range(128 * kilo), None) == [(4 * kilo,) * 2 + (False,)]


def test_documents_take_no_memory_that_grows_with_the_keys():
    def added_bytes(num_keys: int) -> int:
        q, k, v, grad_out = inputs(32, num_keys, (2, 1), dtype=torch.float32)
        documents = torch.arange(num_keys).expand(2, -1) // 100
        sight = Sight(0.3, num_keys - 32, None, documents[:, -32:], documents)
        with PeakMemory(torch.device("cpu")) as peak:
            out, lse = output(q, k, v, sight)
            backward(grad_out, q, k, v, out, lse, sight)
        return peak.added_bytes() - 2 * k.nbytes  # the gradients of k and v

    assert added_bytes(3 * blocks.KEYS) == added_bytes(2 * blocks.KEYS)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_inputs_of_16_bits(dtype, within, window, cap):
    q, k, v, grad_out = inputs(9, 12, dtype=dtype)
    sight = Sight(0.3, 3, window, cap=cap)
    check(q, k, v, grad_out, sight, within)
    out, lse = output(q, k, v, sight)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_the_reference_has_the_gradients_of_autograd():
    q, k, v, grad_out = inputs(5, 7)
    sight = with_documents(Sight(0.3, 2, 4), 5, 7)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = naive.attend(q, k, v, sight)
    mask = sight.mask(5, 7, q.device)
    other = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, other)
    wanted = torch.autograd.grad(out, (q, k, v), grad_out)
    gradients = naive.attend_backward(grad_out, q, k, v, out, lse, sight)
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-12)


def test_the_reference_has_the_gradients_of_autograd_with_a_cap():
    q, k, v, grad_out = (x.requires_grad_() for x in inputs(5, 7))
    sight = with_documents(Sight(0.3, 2, 4, cap=0.5), 5, 7)
    out, lse = naive.attend(q, k, v, sight)
    scores = torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.3 / 0.5) * 0.5
    scores = scores.masked_fill(~sight.mask(5, 7, q.device), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
    wanted = torch.autograd.grad(out, (q, k, v), grad_out)
    gradients = naive.attend_backward(grad_out, q, k, v, out, lse, sight)
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-12)


def test_queries_that_see_no_key():
    q, k, v, grad_out = inputs(4, 3)
    sight = Sight(0.3, offset=-2)
    out, lse = output(q, k, v, sight)
    assert bool((out[:, :, :2] == 0).all())
    assert bool((lse[:, :, :2] == -torch.inf).all())
    gradients = backward(grad_out, q, k, v, out, lse, sight)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][:, :, :2] == 0).all())
    nothing = output(q, k, v, Sight(0.3, offset=-4))
    assert bool((nothing[0] == 0).all())
    assert bool((nothing[1] == -torch.inf).all())


def merged_in_three(q, k, v, grad_out) -> tuple[torch.Tensor, ...]:
    """Return output and gradients of keys in three blocks, the last of which comes first."""
    stretches = [slice(8, 13), slice(0, 3), slice(3, 8)]
    sights = [Sight(0.3, offset=-stretch.start) for stretch in stretches]
    merged = Merged.without_keys(q, v)
    for stretch, sight in zip(stretches, sights):
        attend(q, k[:, :, stretch], v[:, :, stretch], sight, merged)
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for keys, sight in zip(stretches, sights):
        some = (k[:, :, keys], v[:, :, keys])
        gradients = grad_q, grad_k[:, :, keys], grad_v[:, :, keys]
        attend_backward(grad_out, q, *some, *merged, sight, gradients)
    return merged.out, grad_q, grad_k, grad_v


def differs_from_one_block() -> float:
    q, k, v, grad_out = inputs(13, 13)
    sight = Sight(0.3)
    out, lse = naive.attend(q, k, v, sight)
    wanted = out, *naive.attend_backward(grad_out, q, k, v, out, lse, sight)
    pairs = zip(merged_in_three(q, k, v, grad_out), wanted, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_blocks_of_keys_merge_exactly():
    assert differs_from_one_block() < 1e-12


ADD = Merged.add


def add_without_rescaling(self, out, lse):
    self.out.add_(out)
    self.lse.copy_(torch.logaddexp(self.lse, lse))


def add_and_keep_the_last_lse(self, out, lse):
    ADD(self, out, lse)
    self.lse.copy_(lse)


@pytest.mark.parametrize("planted", [add_without_rescaling, add_and_keep_the_last_lse])
def test_a_wrong_merge_is_seen(monkeypatch, planted):
    monkeypatch.setattr(Merged, "add", planted)
    assert not differs_from_one_block() < 1e-3


def test_operators_on_cuda_take_what_they_are_given():
    """Run the shape functions of torch's operators; no kernel runs."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, grad_out, out = (torch.empty(2, 4, 40, 64, **meta) for _ in range(3))
    k, v = (torch.empty(2, 2, 40, 64, **meta) for _ in range(2))
    bias = operators._bias(torch.ones(40, 40, dtype=torch.bool, device="meta"), q)
    for compute, backward, mask in (
        (operators.flash, operators.flash_backward, None),
        (operators.efficient, operators.efficient_backward, None),
        (operators.efficient, operators.efficient_backward, bias),
    ):
        out, lse = compute(q, k, v, mask, mask is None, 0.3)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        gradients = backward(grad_out, q, k, v, out, lse, mask, mask is None, 0.3)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
