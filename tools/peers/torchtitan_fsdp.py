"""torchtitan: its own Qwen3.5, whose recurrent core is a Triton kernel of `fla`.

Nothing of it trains unless that core runs here, so the core is what is tried, at the sizes of the
model. Its packages lie in a folder of their own: Triton and `fla` change what transformers runs.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import torch
from tools.peers.sides import ROWS, TOKENS, definition
from tools.peers.work import Work

FOLDER = Path(sys.prefix) / "torchtitan"


def version() -> str:
    """Return the version in that folder."""
    return next(iter(distributions(name="torchtitan", path=[str(FOLDER)]))).version


def build(work: Work) -> NoReturn:
    """Run the core forward and backward; raise its error, or say that this file has to go on."""
    sys.path.insert(0, str(FOLDER))
    from torchtitan.models.qwen3_5.model import GatedDeltaKernel

    sizes: dict[str, Any] = definition()["work"]["model"]
    heads, size = sizes["linear_num_value_heads"], sizes["linear_value_head_dim"]
    inputs = [torch.randn(ROWS, TOKENS, heads, size, requires_grad=True) for _ in range(3)]
    gates = [torch.rand(ROWS, TOKENS, heads).neg(), torch.rand(ROWS, TOKENS, heads)]
    GatedDeltaKernel(GatedDeltaKernel.Config())(*inputs, *gates).sum().backward()
    raise NotImplementedError("torchtitan's core runs here: train with it in this file")
