"""What a mixer gets of its convolution, and what that costs in the backward."""

from __future__ import annotations

import pytest
import torch

from shardwise.metrics.dispatch import Dispatches
from shardwise.models.kinds.short_convolution import Uncut
from tests.metrics.tiny_models import build


@pytest.mark.parametrize("family", ["kimi_linear", "olmo_hybrid"])
def test_a_mixer_that_cuts_nothing_off_copies_no_gradient(family):
    model, spec = build(family)
    names = [
        f"{layer.name}.{b.path}" for layer in spec.layers for b in layer.mixers if b.kind.backends
    ]
    mixer = model.get_submodule(names[0])
    hidden = torch.randn(2, 70, model.config.hidden_size, requires_grad=True)
    with Dispatches() as counts:
        mixer(hidden).sum().backward()
    assert hidden.grad is not None
    assert counts.operators["aten.slice_backward.default"] == 0


def test_what_a_cache_puts_before_the_tokens_is_cut_off():
    x = torch.arange(24.0).view(2, 3, 4)
    assert Uncut(x)[:, :, -4:] is x
    assert torch.equal(Uncut(x)[:, :, -1:], x[:, :, -1:])
