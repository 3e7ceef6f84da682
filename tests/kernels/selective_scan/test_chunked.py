"""The selective scan in chunks against token by token: outputs, states, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.jamba.modeling_jamba import mamba_selective_scan

from shardwise.kernels.selective_scan import RECURRENCE, chunked, naive, selective_scan
from tests.kernels.recurrences import assert_equal_to_naive, in_pieces, run, saved_bytes
from tests.kernels.state_space_duality.test_chunked import LENGTHS, documents_of
from tests.models.tiny import relative_error

SHARED = (2, 5, 7)
"""The places of a, d and the bias among the inputs: they have no tokens."""


def inputs(
    tokens: int,
    rows: int = 2,
    channels: int = 4,
    state_size: int = 3,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """x, dt, a, b, c, d, z, bias and a state; a token decays by about e^-`strength`."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        normal(rows, tokens, channels),
        normal(rows, tokens, channels),
        -strength * normal(channels, state_size).exp(),
        normal(rows, tokens, state_size),
        normal(rows, tokens, state_size),
        normal(channels),
        normal(rows, tokens, channels),
        normal(channels),
        normal(rows, channels, state_size),
    ]
    return [x.to(dtype).requires_grad_() for x in tensors]


@settings(max_examples=12)
@given(
    tokens=st.one_of(st.sampled_from(LENGTHS), st.integers(1, 140)),
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(3))),
    strength=st.sampled_from([0.0, 0.01, 1.0, 100.0, 1e4]),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_equals_the_recurrence(tokens, sizes, strength, share):
    tensors, documents = inputs(tokens, *sizes, strength), documents_of(sizes[0], tokens, share)
    assert_equal_to_naive(chunked.selective_scan, naive.selective_scan, tensors, documents)


def test_equals_transformers():
    tensors = [x.detach().float().requires_grad_() for x in inputs(80)[:-1]]

    def theirs(x, dt, a, b, c, d, z, bias):
        x, dt, b, c, z = (y.mT for y in (x, dt, b, c, z))
        out, last = mamba_selective_scan(x, dt, a, b, c, d, z, bias, True, return_last_state=True)
        return out.mT, last

    for mine, other in zip(run(selective_scan, tensors), run(theirs, tensors)):
        assert relative_error(mine, other) < 1e-5


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("cuts", [[1], [64], [70, 71, 149]])
def test_pieces_pass_the_state_on(cuts, share):
    *tensors, _ = inputs(150)
    documents = documents_of(2, 150, share)
    grad_out = torch.linspace(-1, 1, tensors[0].numel(), dtype=torch.float64).view_as(tensors[0])
    out, _ = selective_scan(*tensors, None, documents)
    expected = [out, *torch.autograd.grad(out, tensors, grad_out)]
    for mine, other in zip(
        in_pieces(RECURRENCE, tensors, SHARED, documents, grad_out, cuts), expected
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype):
    tensors = inputs(100, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run(selective_scan, tensors)
    assert [x.dtype for x in results] == [dtype, torch.float32, *(9 * [dtype])]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, state, *gradients = results
    expected, last, *expected_gradients = run(naive.selective_scan, wide)
    assert relative_error(state, last) < 1e-5
    for mine, other in zip((out, *gradients), (expected, *expected_gradients)):
        assert relative_error(mine.double(), other) < torch.finfo(dtype).eps


def test_strong_decay_among_weak_ones():
    tensors = inputs(130, dtype=torch.float32)
    with torch.no_grad():
        tensors[2].copy_(torch.tensor([-1e-6, -20.0, -3e38])[None].expand_as(tensors[2]))
    results = run(chunked.selective_scan, tensors)
    assert all(x.isfinite().all() for x in results)
    expected = run(naive.selective_scan, [x.detach().double().requires_grad_() for x in tensors])
    for mine, other in zip(results, expected):
        assert relative_error(mine, other) < 1e-5


def test_the_backward_keeps_the_inputs_and_a_state_per_chunk():
    tensors = inputs(200)
    state = tensors[-1].untyped_storage().nbytes()
    expected = sum(x.untyped_storage().nbytes() for x in tensors) + 4 * state
    # The state's own memory is not among them: the first one is kept with channels last.
    assert saved_bytes(chunked.selective_scan, tensors) == expected - state


def without_documents(*args: Any) -> Any:
    *others, _, start = args
    return CHUNK(*others, None, start)


def without_later_tokens(chunk: Any, grad_read: Any, grad_after: Any) -> Any:
    return GRAD_STATES(chunk, grad_read, torch.zeros_like(grad_after))


CHUNK, GRAD_STATES = chunked._chunk, chunked._grad_states


@pytest.mark.parametrize(
    ("name", "planted"), [("_chunk", without_documents), ("_grad_states", without_later_tokens)]
)
def test_planted_mistakes_are_seen(name, planted, monkeypatch):
    monkeypatch.setattr(chunked, name, planted)
    with pytest.raises(AssertionError):
        assert_equal_to_naive(
            chunked.selective_scan, naive.selective_scan, inputs(70), documents_of(2, 70, 0.1)
        )


@pytest.mark.parametrize("operator", [chunked.pass_on, chunked.pass_back])
def test_torch_compile_traces_all_tokens_as_one_operator(operator):
    by_token, state = torch.randn(2, 5, 2, 3, 4), torch.randn(2, 3, 4)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (*by_token, state), test_utils=utilities)
