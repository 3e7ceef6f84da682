"""Rotated queries and keys equal transformers', and no copy of them is kept."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as rotate_cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as rotate_interleaved,
)
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as rotate_ernie
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_glm4
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as rotate_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_all
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_wide
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_phi3
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as rotate_part

from shardwise.kernels.rotary import (
    fused,
    naive,
    rotate,
    rotate_halves,
    rotate_neighbours,
    rotate_pairs,
    rotate_repeated,
)
from tests.kernels.gates import error, kept_elements
from tests.kernels.recurrences import weighed
from tests.models.tiny import relative_error

SIZE = 8


def angles(rotated: int, rows: int = 1, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Cosines and sines [rows, 5, rotated] whose halves are equal."""
    half = torch.randn(rows, 5, rotated // 2, generator=torch.Generator().manual_seed(1)) * 3
    both = torch.cat([half, half], -1).double()
    return [both.cos().to(dtype), both.sin().to(dtype)]


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries of 4 heads and keys of 2, for 2 rows of 5 tokens, as views of projections."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 5, heads, SIZE, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, 2)
    ]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("theirs", "rotated"),
    [(rotate_all, SIZE), (rotate_part, 4), (rotate_phi3, 4), (rotate_wide, SIZE)],
)
def test_equals_transformers(theirs, rotated, rows):
    q, k = inputs()
    results = []
    for function in (rotate, theirs):
        out = function(q, k, *angles(rotated, rows))
        total = sum(weighed(x) for x in out)
        results.append([*out, *torch.autograd.grad(total, [q, k])])
    assert max(relative_error(mine, other) for mine, other in zip(*results, strict=True)) < 1e-14


@pytest.mark.parametrize(
    ("ours", "theirs", "rotated", "dtype"),
    [
        (rotate_pairs, rotate_interleaved, SIZE, torch.float64),
        (rotate_halves, rotate_gpt_oss, SIZE, torch.float64),
        (rotate_halves, rotate_gpt_oss, SIZE, torch.float32),
        (rotate_neighbours, rotate_glm4, SIZE, torch.float64),
        (rotate_neighbours, rotate_glm4, 4, torch.float64),
        (rotate_neighbours, rotate_ernie, SIZE, torch.float32),  # which it rounds to
        (rotate_repeated, rotate_cohere, SIZE, torch.float32),
        (rotate_repeated, rotate_cohere, SIZE, torch.bfloat16),  # and computes in 32 bits
    ],
)
def test_other_angles_equal_transformers(ours, theirs, rotated, dtype):
    q, k = inputs(dtype)
    both = angles(rotated, 2, dtype)
    if ours is rotate_halves:
        both = [x[..., : rotated // 2] for x in both]
    if ours is rotate_repeated:
        both = [x[..., : rotated // 2].repeat_interleave(2, -1) for x in both]
    results = []
    for function in (ours, theirs):
        out = function(q, k, *both)
        total = sum(weighed(x) for x in out)
        results.append([*out, *torch.autograd.grad(total, [q, k])])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3}[dtype]
    pairs = zip(*results, strict=True)
    assert max(relative_error(mine, other) for mine, other in pairs) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("of_angles", [torch.float32, None])
@pytest.mark.parametrize("rotated", [SIZE, 4])
def test_equals_the_naive_one_and_has_the_dtype_of_x(dtype, of_angles, rotated):
    cos, sin = (y.unsqueeze(1) for y in angles(rotated, dtype=of_angles or dtype))

    def ours(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, x, cos[:, 0], sin[:, 0])[0]

    def other(x: torch.Tensor) -> torch.Tensor:
        return naive.rotate(x, cos.double(), sin.double())

    tolerance = {torch.float64: 1e-6 if of_angles else 1e-14, torch.bfloat16: 2**-6}
    assert error(ours, other, inputs(dtype)[:1]) < tolerance[dtype]


@pytest.mark.parametrize("function", [rotate, rotate_neighbours, rotate_repeated])
def test_nothing_but_angles_is_kept(function):
    cos, sin = angles(SIZE, dtype=torch.float32)
    kept = kept_elements(lambda q, k: function(q, k, cos, sin), inputs(torch.float32))
    assert kept == cos.numel() + sin.numel()


@pytest.mark.parametrize("function", [rotate, rotate_pairs, rotate_neighbours, rotate_repeated])
def test_compiled_code_has_no_breaks(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for one in (function, compiled):
        q, k = inputs(torch.float32)
        out = one(q, k, *angles(SIZE, dtype=torch.float32))
        total = sum(weighed(x) for x in out)
        results.append([*out, *torch.autograd.grad(total, [q, k])])
    pairs = zip(*results, strict=True)
    assert max(relative_error(mine, other) for mine, other in pairs) < 1e-6


def test_gradients_turned_forwards_show(monkeypatch):
    turned = fused._turned
    monkeypatch.setattr(
        fused, "_turned", lambda x, cos, sin, sign, *flags: turned(x, cos, sin, 1, *flags)
    )
    q, k = inputs()
    total = sum(weighed(x) for x in rotate(q, k, *angles(SIZE)))
    expected = sum(weighed(x) for x in rotate_all(q, k, *angles(SIZE)))
    mine, other = (torch.autograd.grad(y, q, retain_graph=True)[0] for y in (total, expected))
    assert relative_error(mine, other) > 1e-2
