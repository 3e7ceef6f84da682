"""The short convolution by shifted products against its loop: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

from shardwise.kernels.short_conv import naive, shifted, short_conv
from tests.models.tiny import relative_error

BLOCK = shifted.BLOCK
LENGTHS = (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5)
Arguments = dict[str, Any]


def inputs(
    tokens: int, width: int = 4, rows: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Arguments:
    """All arguments but documents, with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "x": normal(rows, tokens, 5),
        "weight": normal(5, width),
        "bias": normal(5),
        "earlier": normal(rows, width - 1, 5),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def run(convolution: Any, arguments: Arguments) -> list[torch.Tensor]:
    """The output, and the gradients of a sum that weighs every element of it differently."""
    out = convolution(**arguments)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return [out, *torch.autograd.grad((out.double() * weights).sum(), leaves)]


def departs(arguments: Arguments) -> bool:
    """Whether an output or a gradient differs from the loop's."""
    return not all(
        torch.allclose(mine, other, rtol=1e-10, atol=1e-10)
        for mine, other in zip(
            run(shifted.short_conv, arguments), run(naive.short_conv, arguments), strict=True
        )
    )


@st.composite
def drawn(draw: st.DrawFn) -> Arguments:
    """Arguments of any length, with or without each of them; documents begin anywhere."""
    arguments = inputs(
        draw(st.sampled_from(LENGTHS) | st.integers(1, 150)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**30)),
    )
    for name in ("bias", "earlier"):
        if draw(st.booleans()):
            arguments[name] = None
    shape = arguments["x"].shape[:2]
    if arguments["earlier"] is not None:
        shape = (shape[0], shape[1] + arguments["earlier"].shape[1])
    share = draw(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]))
    if share is not None:
        begins = torch.rand(shape, generator=torch.Generator().manual_seed(shape[1])) < share
        arguments["documents"] = begins.cumsum(1) - 1  # what fills a row up may be below 0
    return arguments | {"activation": draw(st.sampled_from([None, "silu"]))}


@settings(max_examples=20)
@given(drawn())
def test_equals_the_loop(arguments):
    assert not departs(arguments)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_equals_transformers_function(tokens):
    arguments = inputs(tokens) | {"earlier": None, "activation": "silu"}

    def theirs(x: torch.Tensor, **others: Any) -> torch.Tensor:
        del others["earlier"]
        return causal_conv1d_fn(x.mT, **others).mT

    for mine, other in zip(run(short_conv, arguments), run(theirs, arguments), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_16_bits_are_rounded_once(dtype, weight_dtype):
    arguments = inputs(100, dtype=dtype) | {"activation": "silu"}
    if weight_dtype is not None:
        for name in ("weight", "bias"):
            arguments[name] = arguments[name].detach().to(weight_dtype).requires_grad_()
    leaves = [arguments[name] for name in ("x", "weight", "bias", "earlier")]
    double = {name: x.detach().double().requires_grad_() for name, x in zip(arguments, leaves)}
    expected = run(naive.short_conv, double | {"activation": "silu"})
    for mine, other, like in zip(run(short_conv, arguments), expected, [leaves[0], *leaves]):
        assert mine.dtype == like.dtype
        # The gradient that comes in is rounded too.
        assert relative_error(mine.double(), other) < 2 * torch.finfo(dtype).eps


def test_autocast_does_not_reach_the_sums():
    arguments = inputs(70, dtype=torch.float32) | {"activation": "silu"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(short_conv, arguments)
    for mine, other in zip(inside, run(short_conv, arguments)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("cuts", [[1], [3, 64], [2, 4, 70]])
def test_pieces_that_pass_on_their_last_tokens_equal_the_whole(cuts):
    arguments = inputs(130) | {"activation": "silu"}
    documents = (torch.rand(2, 133, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1)
    whole = run(shifted.short_conv, arguments | {"documents": documents})

    def in_pieces(x: torch.Tensor, earlier: torch.Tensor, **others: Any) -> torch.Tensor:
        row, outs = torch.cat([earlier, x], 1), []
        for start, stop in zip([0, *cuts], [*cuts, 130]):
            piece = others | {"documents": documents[:, start : stop + 3]}
            x, earlier = row[:, start + 3 : stop + 3], row[:, start : start + 3]
            outs.append(shifted.short_conv(x, earlier=earlier, **piece))
        return torch.cat(outs, 1)

    for mine, other in zip(run(in_pieces, arguments), whole):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_what_stands_in_another_document_is_not_even_multiplied():
    arguments = inputs(9) | {"earlier": None, "documents": torch.tensor([[0] * 4 + [1] * 5] * 2)}
    with torch.no_grad():
        arguments["x"][:, :4] = torch.inf
    out, grad_x, *_ = run(shifted.short_conv, arguments)
    assert out[:, 4:].isfinite().all()
    assert grad_x[:, 4:].isfinite().all()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_backward_keeps_the_inputs(is_frozen):
    arguments = inputs(200) | {"activation": "silu"}
    if is_frozen:
        for name in ("weight", "bias"):
            arguments[name].requires_grad_(False)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        short_conv(**arguments)
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    assert sum(kept.values()) == sum(x.untyped_storage().nbytes() for x in tensors)


def _documents_of_no_tap(x, width, documents, start, place):
    return BY_TAP(x, width, None, start, place)


def _a_block_too_early(x, width, documents, start, place):
    return BY_TAP(x, width, documents, max(start - BLOCK, 0), place)


def _without_what_comes_before(x, earlier, before, start, stop, dtype):
    return SEEN(x, None, before, start, stop, dtype)


BY_TAP, SEEN = shifted.by_tap, shifted._seen


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("by_tap", _documents_of_no_tap),
        ("by_tap", _a_block_too_early),
        ("_seen", _without_what_comes_before),
    ],
)
def test_a_planted_mistake_shows(name, mistake, monkeypatch):
    arguments = inputs(2 * BLOCK + 5) | {"activation": "silu"}
    begins = torch.rand(2, 2 * BLOCK + 8, generator=torch.Generator().manual_seed(0)) < 0.2
    arguments["documents"] = begins.cumsum(1)
    assert not departs(arguments)
    monkeypatch.setattr(shifted, name, mistake)
    assert departs(arguments)
