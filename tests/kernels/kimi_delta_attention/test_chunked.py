"""Kimi Delta Attention in chunks against token by token: outputs, states, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from shardwise.kernels.delta_rule import AT_ONCE
from shardwise.kernels.kimi_delta_attention import RECURRENCE, chunked, kimi_delta_attention, naive
from shardwise.models.kinds.kda import KimiDeltaAttention
from tests.kernels.gated_delta_rule.test_chunked import run
from tests.models.tiny import relative_error


def inputs(
    tokens: int,
    dtype: torch.dtype = torch.float32,
    strongest: float = 8.0,
    sizes: tuple[int, int, int, int] = (2, 3, 5, 8),
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return q, k, v, g, beta and a state of rows, heads, key size and value size; decays go from 1
    down to e^-strongest, most of them weak.
    """
    rows, heads, key_size, value_size = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rates = torch.rand(rows, tokens, heads, key_size, generator=generator, dtype=torch.float64)
    tensors = [
        normal(rows, tokens, heads, key_size),
        normal(rows, tokens, heads, key_size),
        normal(rows, tokens, heads, value_size),
        -strongest * rates**4,
        normal(rows, tokens, heads).sigmoid(),
        normal(rows, heads, key_size, value_size),
    ]
    return [x.to(dtype).requires_grad_() for x in tensors]


def check_against_naive(
    tensors: list[torch.Tensor], documents: torch.Tensor | None = None, tolerance: float = 1e-10
) -> None:
    outs, grads = run(lambda *x: chunked.kimi_delta_attention(*x, documents=documents), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected, expected_grads = run(
        lambda *x: naive.kimi_delta_attention(*x, documents=documents), exact
    )
    for tensor, other in zip((*outs, *grads), (*expected, *expected_grads)):
        assert tensor.isfinite().all()
        difference = (tensor.double() - other).abs().max()
        # What only decays give may be 0 in all elements.
        assert difference <= tolerance * other.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129])
def test_float32_is_close_to_the_recurrence_in_float64(tokens):
    check_against_naive(inputs(tokens), tolerance=3e-6)


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs in float64 with documents, and decays of a drawn strength."""
    sizes = tuple(draw(st.integers(1, largest)) for largest in (2, 3, 6, 6))
    tokens, seed = draw(st.integers(1, 140)), draw(st.integers(0, 2**30))
    strongest = draw(st.sampled_from([0.0, 0.01, 1.0, 100.0, 1e4]))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(sizes[0], tokens, generator=generator) < share
    return inputs(tokens, torch.float64, strongest, sizes, seed), begins.cumsum(1)


@settings(max_examples=15)
@given(packed())
def test_documents_and_decays_of_any_strength_equal_the_recurrence(drawn):
    check_against_naive(*drawn)


def test_all_chunks_at_once_are_the_same(monkeypatch):
    tensors = inputs(150, torch.float64)
    documents = (torch.arange(150) >= 70).long().expand(2, -1)
    monkeypatch.setitem(AT_ONCE, "cpu", AT_ONCE["cuda"])
    check_against_naive(tensors, documents)
    check_pieces(tensors, documents, [140])


def test_no_gradient_crosses_into_another_document():
    tensors, documents = inputs(100, strongest=0.1), (torch.arange(100) >= 40).long().expand(2, -1)
    out, _ = chunked.kimi_delta_attention(*tensors, documents)
    *grads, grad_state = torch.autograd.grad(out[:, 40:].square().sum(), tensors)
    assert all(grad[:, 40:].abs().max() > 0 for grad in grads)
    assert all(grad[:, :40].abs().max() == 0 for grad in grads)
    assert grad_state.abs().max() == 0


@pytest.mark.parametrize("tokens", [3, 66])
def test_gradients_by_differences(tokens):
    tensors = inputs(tokens, torch.float64, sizes=(1, 2, 3, 4))
    documents = (torch.arange(tokens) >= 2).long()[None]
    assert torch.autograd.gradcheck(
        lambda *x: chunked.kimi_delta_attention(*x, documents=documents), tensors, fast_mode=True
    )


def test_equals_the_function_of_transformers():
    *tensors, state = inputs(100)
    ours = kimi_delta_attention(*tensors, state)
    q, k, v, g, beta = tensors
    flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    theirs = chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, initial_state=state, **flags)
    for one, other in zip(ours, theirs):
        assert relative_error(one, other) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_are_computed_in_32(dtype):
    tensors = inputs(100, dtype)
    outs, grads = run(kimi_delta_attention, tensors)
    assert (outs[0].dtype, outs[1].dtype) == (dtype, torch.float32)
    expected, expected_grads = run(
        kimi_delta_attention, [x.detach().float().requires_grad_() for x in tensors]
    )
    # All that is left of 16 bits is the rounding of what is given out.
    for tensor, other in zip((*outs, *grads), (*expected, *expected_grads)):
        assert relative_error(tensor.float(), other) < torch.finfo(dtype).eps
    assert all(grad.dtype == dtype for grad in grads)


def test_autocast_does_not_reach_the_state():
    tensors = inputs(100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs, grads = run(chunked.kimi_delta_attention, tensors)
    expected, expected_grads = run(chunked.kimi_delta_attention, tensors)
    for tensor, other in zip((*outs, *grads), (*expected, *expected_grads)):
        assert torch.equal(tensor, other)


def test_a_decay_to_nothing_begins_anew():
    tensors = inputs(100)
    with torch.no_grad():
        tensors[3][:, 40:].fill_(-1e-3)
        tensors[3][:, ::40] = -torch.inf
    check_against_naive(tensors, tolerance=3e-6)


def check_pieces(tensors: list[torch.Tensor], documents: torch.Tensor, cuts: list[int]) -> None:
    """Compute the pieces of rows each by itself, with what the maps of the others pass on."""
    *tensors, state = (x.detach() for x in tensors)
    leaves = [x.clone().requires_grad_() for x in (*tensors, state)]
    out, last = naive.kimi_delta_attention(*leaves, documents)
    generator = torch.Generator().manual_seed(0)
    grad_out = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    grad_last = torch.randn(last.shape, generator=generator, dtype=last.dtype)
    expected = torch.autograd.grad((out, last), leaves, (grad_out, grad_last))

    ends = [*cuts, out.shape[1]]
    pieces = [slice(start, end) for start, end in zip([0, *cuts], ends)]
    parts = [[x[:, piece] for x in tensors] for piece in pieces]
    ids = [documents[:, piece] for piece in pieces]
    goes_on = [(documents[:, cut] == documents[:, cut - 1])[:, None, None, None] for cut in cuts]
    summaries = [RECURRENCE.summary(*part, doc) for part, doc in zip(parts, ids)]
    befores, grad_afters = [state], [grad_last]
    for summary, same in zip(summaries, goes_on):
        after = RECURRENCE.pass_on(summary.transition, befores[-1]) + summary.after
        befores.append(after * same)
    for number in reversed(range(1, len(pieces))):
        grad_before = RECURRENCE.grad_before(
            *parts[number], grad_out[:, pieces[number]], ids[number]
        )
        grad_before = grad_before + RECURRENCE.pass_back(
            summaries[number].transition, grad_afters[0]
        )
        grad_afters.insert(0, grad_before * goes_on[number - 1])

    outs, grads = [], []
    for part, doc, before, piece, grad_after in zip(parts, ids, befores, pieces, grad_afters):
        leaves = [x.clone().requires_grad_() for x in (*part, before)]
        outs.append(RECURRENCE.run(*leaves, doc))
        grads.append(torch.autograd.grad(outs[-1], leaves, (grad_out[:, piece], grad_after)))
    joined = [torch.cat([piece[number] for piece in grads], 1) for number in range(5)]
    results = (torch.cat([piece[0] for piece in outs], 1), outs[-1][1], *joined, grads[0][5])
    for tensor, other in zip(results, (out, last, *expected)):
        torch.testing.assert_close(tensor, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=6)
@given(packed(), st.data())
def test_pieces_pass_their_maps_on(drawn, data):
    tensors, documents = drawn
    tokens = documents.shape[1]
    if tokens > 1:
        cuts = st.lists(st.integers(1, tokens - 1), min_size=1, max_size=3, unique=True)
        check_pieces(tensors, documents, sorted(data.draw(cuts)))


def ignore_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "begins", torch.zeros_like)


def forget_the_decay_over_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = property(lambda chunks: torch.ones_like(chunks.from_start[..., -1, :, None]))
    monkeypatch.setattr(chunked._KimiChunks, "over", ones)


def swap_the_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = chunked._Halves
    monkeypatch.setattr(chunked, "_Halves", lambda first, second: halves(second, first))


def skip_the_length_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_through_unit", lambda grad_unit, x, span: grad_unit)


@pytest.mark.parametrize(
    "mistake",
    [ignore_documents, forget_the_decay_over_a_chunk, swap_the_halves, skip_the_length_of_keys],
)
def test_a_planted_mistake_turns_red(mistake, monkeypatch):
    tensors = inputs(100, torch.float64)
    documents = (torch.arange(100) >= 40).long().expand(2, -1)
    check_against_naive(tensors, documents)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_against_naive(tensors, documents)


def transposed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RECURRENCE", RECURRENCE._replace(pass_back=RECURRENCE.pass_on))


def map_without_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    def summary(q: Any, k: Any, v: Any, g: Any, beta: Any, documents: Any) -> Any:
        return chunked.summary(q, k, v, torch.zeros_like(g), beta, documents)

    monkeypatch.setitem(globals(), "RECURRENCE", RECURRENCE._replace(summary=summary))


@pytest.mark.parametrize("mistake", [transposed_once_more, map_without_decay])
def test_a_planted_mistake_between_pieces_turns_red(mistake, monkeypatch):
    tensors, documents = inputs(100, torch.float64, 0.1), torch.zeros(2, 100, dtype=torch.int64)
    check_pieces(tensors, documents, [30, 70])
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_pieces(tensors, documents, [30, 70])


def test_the_backward_keeps_the_inputs_and_a_state_per_chunk():
    tensors = inputs(200)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked.kimi_delta_attention(*tensors)
    grad_inputs = sum(x.untyped_storage().nbytes() for x in tensors)
    assert sum(kept.values()) == grad_inputs + 3 * tensors[5].untyped_storage().nbytes()


def test_the_host_waits_for_nothing():
    # A fake tensor has no value that the host could read.
    with FakeTensorMode():
        *tensors, state = (torch.empty(x.shape, requires_grad=True) for x in inputs(130))
        documents = torch.zeros(2, 130, dtype=torch.int64)
        out, last = kimi_delta_attention(*tensors, state, documents)
        torch.autograd.backward((out, last), (out, last))
        assert chunked.summary(*tensors, documents).after.shape == state.shape
        assert chunked.grad_before(*tensors, out, documents).shape == state.shape
        with pytest.raises(DataDependentOutputException):
            out.sum().item()


def test_executed_flops_are_those_of_the_counter():
    tokens, chunks, heads = 80, 2, 3
    tensors = inputs(tokens, sizes=(1, heads, 5, 8))
    with FlopCounterMode(display=False) as forward:
        out, _ = chunked.kimi_delta_attention(*tensors)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    runs, gradients = KimiDeltaAttention(heads, 5, 8).flops(heads).per_token(tokens)
    # Solves, and the products of a token's query with its key, are none to the counter.
    solve, grad_same = 64 * 63 * (5 + 8), 2 * 64 * 5
    hidden = heads * chunks * (solve + grad_same)
    assert runs * tokens == forward.get_total_flops() + hidden
    hidden = heads * chunks * (2 * solve + 3 * grad_same)
    assert gradients * tokens == backward.get_total_flops() + hidden
