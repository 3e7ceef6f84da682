"""The scan of Mamba2 in chunks against token by token: outputs, states, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

from shardwise.kernels.state_space_duality import RECURRENCE, chunked, mamba2_scan, naive
from tests.kernels.recurrences import assert_equal_to_naive, in_pieces, run, saved_bytes
from tests.models.tiny import relative_error

LENGTHS = (1, 2, 7, 63, 64, 65, 127, 129)
"""Around the 64 tokens of a chunk, and of two."""
SHARED = (2, 5)
"""The places of a and d among the inputs: they have no tokens."""


def inputs(
    tokens: int,
    rows: int = 2,
    groups: int = 2,
    heads: int = 4,
    head_size: int = 3,
    state_size: int = 5,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """x, dt, a, b, c, d and a state; a token decays by up to about e^-`strength`."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        normal(rows, tokens, heads, head_size),
        normal(rows, tokens, heads).sigmoid(),
        -strength * normal(heads).sigmoid(),
        normal(rows, tokens, groups, state_size),
        normal(rows, tokens, groups, state_size),
        normal(heads),
        normal(rows, heads, head_size, state_size),
    ]
    return [x.to(dtype).requires_grad_() for x in tensors]


def documents_of(rows: int, tokens: int, share: float) -> torch.Tensor | None:
    """Documents that begin at this share of the tokens; None for 0."""
    generator = torch.Generator().manual_seed(tokens)
    begins = torch.rand(rows, tokens, generator=generator) < share
    return begins.cumsum(1) if share else None


@settings(max_examples=12)
@given(
    tokens=st.one_of(st.sampled_from(LENGTHS), st.integers(1, 140)),
    sizes=st.tuples(*(st.integers(1, 3) for _ in range(4))),
    strength=st.sampled_from([0.0, 0.01, 1.0, 100.0, 1e4]),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_equals_the_recurrence(tokens, sizes, strength, share):
    rows, groups, heads, size = sizes
    tensors = inputs(tokens, rows, groups, groups * heads, size, 4 - size, strength)
    documents = documents_of(rows, tokens, share)
    assert_equal_to_naive(chunked.mamba2_scan, naive.mamba2_scan, tensors, documents)


def test_equals_transformers():
    x, dt, a, b, c, d, _ = (y.float() for y in inputs(150))
    tensors = [y.detach().requires_grad_() for y in (x, dt, a, b, c, d)]

    def theirs(x, dt, a, b, c, d):
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=32, D=d, return_final_states=True)

    for mine, other in zip(run(mamba2_scan, tensors), run(theirs, tensors)):
        assert relative_error(mine, other) < 1e-5


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("cuts", [[1], [64], [70, 71, 149]])
def test_pieces_pass_the_state_on(cuts, share):
    *tensors, _ = inputs(150)
    documents = documents_of(2, 150, share)
    grad_out = torch.linspace(-1, 1, tensors[0].numel(), dtype=torch.float64).view_as(tensors[0])
    out, _ = mamba2_scan(*tensors, None, documents)
    expected = [out, *torch.autograd.grad(out, tensors, grad_out)]
    for mine, other in zip(
        in_pieces(RECURRENCE, tensors, SHARED, documents, grad_out, cuts), expected
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype):
    tensors = inputs(100, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run(mamba2_scan, tensors)
    assert [x.dtype for x in results] == [dtype, torch.float32, *(7 * [dtype])]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, state, *gradients = results
    expected, last, *expected_gradients = run(naive.mamba2_scan, wide)
    assert relative_error(state, last) < 1e-5
    for mine, other in zip((out, *gradients), (expected, *expected_gradients)):
        assert relative_error(mine.double(), other) < torch.finfo(dtype).eps


@pytest.mark.parametrize("strongest", [20.0, 400.0, 1e8])
def test_strong_decay_among_weak_ones(strongest):
    tensors = inputs(130, dtype=torch.float32)
    with torch.no_grad():
        strong = torch.rand(2, 130, 4, generator=torch.Generator().manual_seed(0)) < 0.2
        tensors[0].masked_fill_(strong[..., None], 0)  # which would write as much as it decays
        tensors[1].copy_(torch.where(strong, strongest, 0.01))
    results = run(chunked.mamba2_scan, tensors)
    assert all(x.isfinite().all() for x in results)
    expected = run(naive.mamba2_scan, [x.detach().double().requires_grad_() for x in tensors])
    for mine, other in zip(results, expected):
        assert relative_error(mine, other) < 1e-5


def test_the_backward_keeps_the_inputs_and_a_state_per_chunk():
    tensors = inputs(200)
    state = tensors[-1].untyped_storage().nbytes()
    expected = sum(x.untyped_storage().nbytes() for x in tensors) + 3 * state
    assert saved_bytes(chunked.mamba2_scan, tensors) == expected


def without_documents(chunk: Any, numbers: Any, tokens: Any) -> Any:
    return BETWEEN(chunk, None, tokens)


def without_decay(*args: Any) -> Any:
    chunk = CHUNK(*args)
    return chunk._replace(to_end=torch.ones_like(chunk.to_end))


BETWEEN, CHUNK = chunked._between, chunked._chunk


@pytest.mark.parametrize(
    ("name", "planted"), [("_between", without_documents), ("_chunk", without_decay)]
)
def test_planted_mistakes_are_seen(name, planted, monkeypatch):
    monkeypatch.setattr(chunked, name, planted)
    with pytest.raises(AssertionError):
        assert_equal_to_naive(
            chunked.mamba2_scan, naive.mamba2_scan, inputs(70), documents_of(2, 70, 0.1)
        )
