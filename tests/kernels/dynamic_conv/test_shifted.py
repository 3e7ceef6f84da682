"""The dynamic convolution against its loop, and against torch's where all kernels are equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shardwise.kernels.dynamic_conv import naive, shifted
from tests.models.tiny import relative_error


def inputs(tokens: int, before: int, width: int, dtype: torch.dtype = torch.float64, rows: int = 2):
    generator = torch.Generator().manual_seed(tokens + 7 * before)
    x = torch.randn(rows, before + tokens, 5, generator=generator, dtype=dtype)
    kernels = torch.randn(rows, tokens, 5, width, generator=generator, dtype=dtype)
    return x.requires_grad_(), kernels.requires_grad_()


def departs(x: torch.Tensor, kernels: torch.Tensor, *options) -> bool:
    """Whether the output or a gradient differs from the loop's."""
    outs = [rule.dynamic_conv(x, kernels, *options) for rule in (shifted, naive)]
    weight = torch.linspace(-1, 1, outs[0].numel(), dtype=outs[0].dtype).view(outs[0].shape)
    mine, expected = (
        [out, *torch.autograd.grad((out * weight).sum(), (x, kernels))] for out in outs
    )
    assert all(x.abs().max() > 0 for x in expected)
    return not all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(mine, expected, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9) | st.integers(10, 70),
    before=st.integers(0, 6),
    width=st.integers(1, 5),
    rows=st.integers(1, 3),
    activation=st.sampled_from([None, "silu"]),
    share=st.sampled_from([None, 0.05, 0.3, 1.0]),
)
def test_equals_the_loop(tokens, before, width, rows, activation, share):
    tensors = inputs(tokens, before, width, rows=rows)
    documents = None
    if share is not None:
        generator = torch.Generator().manual_seed(width)
        begins = torch.rand(rows, before + tokens, generator=generator) < share
        documents = begins.cumsum(1) - 1
    assert not departs(*tensors, activation, documents)


def test_autocast_does_not_reach_the_sums():
    tensors = inputs(50, 3, 4, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = shifted.dynamic_conv(*tensors, "silu")
    assert torch.equal(inside, shifted.dynamic_conv(*tensors, "silu"))


def test_one_kernel_for_all_tokens_is_a_causal_convolution():
    x, kernels = inputs(9, 0, 4)
    same = kernels[:1, :1].expand(2, 9, -1, -1)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), kernels[0, 0][:, None], groups=5).mT
    torch.testing.assert_close(shifted.dynamic_conv(x, same), expected)


def test_gradients_by_differences():
    def convolution(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return shifted.dynamic_conv(x, kernels, "silu")

    assert torch.autograd.gradcheck(convolution, inputs(3, 2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype):
    x, kernels = (tensor.detach().to(dtype) for tensor in inputs(50, 3, 4))
    out = shifted.dynamic_conv(x, kernels, "silu")
    assert out.dtype == dtype
    expected = naive.dynamic_conv(x.double(), kernels.double(), "silu")
    assert relative_error(out.double(), expected) < torch.finfo(dtype).eps


def test_the_backward_keeps_the_inputs():
    x, kernels = inputs(50, 3, 4)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        shifted.dynamic_conv(x, kernels, "silu")
    assert sum(kept.values()) == sum(t.untyped_storage().nbytes() for t in (x, kernels))


def _without_documents(x, width, documents, start, place):
    return BY_TAP(x, width, None, start, place)


def _a_token_late(x, kernels, documents):
    seen, documents = SEEN(x, kernels, documents)
    return seen.roll(1, 1), documents


BY_TAP, SEEN = shifted.by_tap, shifted._seen


@pytest.mark.parametrize(
    ("name", "mistake"), [("by_tap", _without_documents), ("_seen", _a_token_late)]
)
def test_a_planted_mistake_shows(name, mistake, monkeypatch):
    tensors, documents = inputs(20, 3, 4), (torch.arange(23) // 5).expand(2, -1)
    assert not departs(*tensors, None, documents)
    monkeypatch.setattr(shifted, name, mistake)
    assert departs(*tensors, None, documents)
