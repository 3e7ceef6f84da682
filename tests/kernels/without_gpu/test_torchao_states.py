"""8-bit AdamW has the levels, codes and steps of torchao's."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from shardwise.kernels.eight_bit import BLOCK, MOMENTS, levels, names_of, update_

with contextlib.redirect_stderr(io.StringIO()):  # of its compiled parts, which are not used
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    from torchao.optim.quant_utils import create_dynamic_map


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_are_torchaos(is_signed):
    theirs = torch.tensor(create_dynamic_map(is_signed))
    torch.testing.assert_close(levels(is_signed, torch.device("cpu")), theirs, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_torchaos(dtype):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(16, 2 * BLOCK, generator=generator).to(dtype)
    ours, theirs = drawn.clone(), torch.nn.Parameter(drawn.clone())
    state = {"step": torch.zeros(())}
    for moment in MOMENTS:
        codes, scales = names_of(moment)
        state[codes] = torch.zeros(16, 2 * BLOCK, dtype=torch.uint8)
        state[scales] = torch.zeros(16, 2)
    adamw = torchao.AdamW8bit([theirs], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        theirs.grad = torch.randn(16, 2 * BLOCK, generator=generator).to(dtype)
        state["step"] += 1
        update_(ours, theirs.grad, state, 1e-2, (0.9, 0.999), 1e-8, 0.1)
        with torch.compiler.set_stance("force_eager"):  # it compiles its step
            adamw.step()
    # Their weight decay and division round otherwise, and so may a code near a middle.
    apart = (ours.float() - theirs.float()).abs()
    assert (
        apart > 1e-5 + 8e-3 * (dtype == torch.bfloat16) * drawn.float().abs()
    ).float().mean() < 0.002
    other = adamw.state[theirs]
    for moment in MOMENTS:
        codes, scales = names_of(moment)
        assert (state[codes] != other[moment].codes).float().mean() < 0.002
        torch.testing.assert_close(state[scales].flatten(), other[moment].scale, rtol=1e-4, atol=0)
