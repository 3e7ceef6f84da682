"""The gated delta rule in chunks against token by token: outputs, states, and every gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.kernels.delta_rule import AT_ONCE
from shardwise.kernels.gated_delta_rule import RECURRENCE, chunked, gated_delta_rule, naive
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


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs in float64 with documents, heads that share keys, and decays of a drawn strength."""
    rows, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 140))
    keys, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    key_size, value_size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = keys * group
    rate = torch.rand(rows, tokens, heads, generator=generator, dtype=torch.float64)
    tensors = [
        normal(rows, tokens, keys, key_size),
        normal(rows, tokens, keys, key_size),
        normal(rows, tokens, heads, value_size),
        -draw(st.sampled_from([0.0, 0.01, 1.0, 100.0])) * rate,
        normal(rows, tokens, heads).sigmoid(),
        normal(rows, heads, key_size, value_size),
    ]
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    begins = torch.rand(rows, tokens, generator=generator) < share
    return [x.requires_grad_() for x in tensors], begins.cumsum(1)


@settings(max_examples=20)
@given(packed())
def test_documents_and_shared_keys_equal_the_recurrence(drawn):
    tensors, documents = drawn
    outs, grads = run(lambda *args: chunked.gated_delta_rule(*args, documents), tensors)
    expected, expected_grads = run(lambda *args: naive.gated_delta_rule(*args, documents), tensors)
    for mine, other in zip((*outs, *grads), (*expected, *expected_grads)):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_document_is_what_it_is_alone():
    q, k, v, g, beta, state = inputs(150)
    documents = (torch.arange(150) >= 70).long().expand(2, -1)
    out, last = chunked.gated_delta_rule(q, k, v, g, beta, state, documents)
    alone, end = gated_delta_rule(*(x[:, 70:] for x in (q, k, v, g, beta)))
    assert relative_error(out[:, 70:], alone) < 1e-5
    assert relative_error(last, end) < 1e-5


def test_the_backward_keeps_the_inputs_and_a_state_per_chunk():
    tensors = inputs(200)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked.gated_delta_rule(*tensors)
    state_bytes = tensors[5].untyped_storage().nbytes()
    assert (
        sum(kept.values()) == sum(x.untyped_storage().nbytes() for x in tensors) + 3 * state_bytes
    )


@pytest.mark.parametrize("documents", [None, (1, 63, 70)])
def test_chunks_at_once_equal_one_after_the_other(documents, monkeypatch):
    tensors = inputs(200)
    if documents is not None:
        ids = torch.arange(200).expand(2, -1)
        documents = sum((ids >= begin).long() for begin in documents)

    def rule(*given):
        return chunked.gated_delta_rule(*given, documents)

    outs, grads = run(rule, tensors)
    monkeypatch.setitem(AT_ONCE, "cpu", AT_ONCE["cuda"])
    outs_at_once, grads_at_once = run(rule, tensors)
    for one, other in zip((*outs, *grads), (*outs_at_once, *grads_at_once)):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("with_documents", [False, True])
def test_pieces_of_a_row_pass_their_maps_on(with_documents):
    """Four ranks with 1, 64, 30 and 55 tokens, by hand: what each computes alone is the whole."""
    tensors = [x.detach().requires_grad_() for x in inputs(150, torch.float64, with_state=False)]
    ids = torch.zeros(2, 150, dtype=torch.long)
    if with_documents:  # in row 0 a document begins with a rank's first token, in row 1 within one
        ids[0, 65:] = 1
        ids[1, 40:] = 1
    bounds = list(pairwise([0, 1, 65, 95, 150]))
    out, last = naive.gated_delta_rule(*tensors, documents=ids)
    grad_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((out * grad_out).sum(), tensors)

    pieces = [[x[:, a:b].detach().requires_grad_() for x in tensors] for a, b in bounds]
    maps = [RECURRENCE.summary(*piece, ids[:, a:b]) for piece, (a, b) in zip(pieces, bounds)]
    goes_on = [(ids[:, a] == ids[:, a - 1])[:, None, None, None] for a, _ in bounds[1:]]
    before = [torch.zeros_like(last)]
    for (transition, after), same in zip(maps, goes_on):
        before.append((RECURRENCE.pass_on(transition, before[-1]) + after) * same)
    grad_after = [torch.zeros_like(last)]
    for place in (3, 2, 1):
        a, b = bounds[place]
        given = RECURRENCE.grad_before(*pieces[place], grad_out[:, a:b], ids[:, a:b])
        back = RECURRENCE.pass_back(maps[place].transition, grad_after[0]) + given
        grad_after.insert(0, back * goes_on[place - 1])
    for place, (a, b) in enumerate(bounds):
        piece_out, piece_last = RECURRENCE.run(*pieces[place], before[place], ids[:, a:b])
        assert relative_error(piece_out, out[:, a:b]) < 1e-10
        loss = (piece_out * grad_out[:, a:b]).sum() + (piece_last * grad_after[place]).sum()
        for gradient, whole in zip(torch.autograd.grad(loss, pieces[place]), expected):
            assert (gradient - whole[:, a:b]).abs().max() < 1e-10
