"""The gated delta rule in chunks against token by token: outputs, states, and every gradient."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.gated_delta_rule import chunked, gated_delta_rule, naive
from tests.models.tiny import relative_error

# A chunk has 64 tokens: one token, odd lengths, one less than a chunk, a chunk, one more, and the
# same of two.
LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200)


def inputs(tokens: int, dtype: torch.dtype = torch.float32, with_state: bool = True):
    """Of 2 rows and 3 heads, queries and keys of size 5 and values of size 8; decays from 1 down to
    e^-8.
    """
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, tokens, 3, 5, generator=generator) for _ in range(2))
    v = torch.randn(2, tokens, 3, 8, generator=generator)
    g = -(torch.rand(2, tokens, 3, generator=generator) ** 4) * 8
    beta = torch.rand(2, tokens, 3, generator=generator)
    state = [torch.randn(2, 3, 5, 8, generator=generator)] if with_state else []
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, *state)]


def run(rule, tensors):
    """The outputs, and the gradients of a sum that weighs every element of them differently."""
    out, state = rule(*tensors)
    loss = sum(
        (x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in (out, state)
    )
    return (out, state), torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_equals_the_recurrence(tokens, with_state):
    tensors = inputs(tokens, with_state=with_state)
    outs, grads = run(chunked.gated_delta_rule, tensors)
    expected, expected_grads = run(naive.gated_delta_rule, tensors)
    for out, other in zip(outs, expected):
        assert relative_error(out, other) < 1e-5
    for grad, other in zip(grads, expected_grads):
        # One token that starts from nothing: nothing decays, and the gradient of its decay is 0 in
        # both.
        assert other.abs().max() > 0 or (
            tokens == 1 and not with_state and other.shape == tensors[3].shape
        )
        assert (
            relative_error(grad, other) < 1e-4 if other.abs().max() > 0 else grad.abs().max() == 0
        )


@pytest.mark.parametrize("tokens", [3, 70])
def test_gradients_by_differences(tokens):
    tensors = [x.detach()[:1].requires_grad_() for x in inputs(tokens, torch.float64)]
    fast = tokens > 3  # differences in a few random directions
    assert torch.autograd.gradcheck(chunked.gated_delta_rule, tensors, fast_mode=fast)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 129])
def test_a_sequence_goes_on_from_its_state(cut):
    q, k, v, g, beta = inputs(130, with_state=False)
    whole, last = gated_delta_rule(q, k, v, g, beta)
    first, state = gated_delta_rule(*(x[:, :cut] for x in (q, k, v, g, beta)))
    second, end = gated_delta_rule(*(x[:, cut:] for x in (q, k, v, g, beta)), state)
    assert relative_error(torch.cat([first, second], 1), whole) < 1e-5
    assert relative_error(end, last) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    tensors = inputs(100, dtype)
    outs, grads = run(gated_delta_rule, tensors)
    assert outs[0].dtype == dtype
    assert outs[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads)
    # Computed wide, so that all that is left of 16 bits is the rounding of the output.
    expected, _ = gated_delta_rule(*(x.detach().to(torch.float64) for x in tensors))
    assert relative_error(outs[0].double(), expected) < max(torch.finfo(dtype).eps, 1e-12)


def test_autocast_does_not_reach_the_state():
    tensors = inputs(100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out, state), _ = run(chunked.gated_delta_rule, tensors)
    expected, last = chunked.gated_delta_rule(*tensors)
    assert torch.equal(out, expected)
    assert torch.equal(state, last)


@pytest.mark.parametrize("strongest", [50.0, 400.0])
def test_strong_decay_among_weak_ones(strongest):
    # Sums of g in a chunk come to 10 to 60 times `strongest`, of which float32 has 7 digits, but
    # the decay between two tokens after the strong ones is near 1. And e^50 per token overflows
    # within a chunk, if it is ever formed.
    tensors = inputs(130)
    with torch.no_grad():
        weak = torch.rand(2, 130, 3, generator=torch.Generator().manual_seed(0)) < 0.8
        tensors[3].mul_(torch.where(weak, 0.01, strongest / 8))
    outs, grads = run(chunked.gated_delta_rule, tensors)
    expected, expected_grads = run(naive.gated_delta_rule, tensors)
    for mine, other in zip((*outs, *grads), (*expected, *expected_grads)):
        assert relative_error(mine, other) < 2e-6
    with torch.no_grad():
        tensors[3].fill_(-strongest)
    _, grads = run(chunked.gated_delta_rule, tensors)
    assert all(grad.isfinite().all() for grad in grads)
