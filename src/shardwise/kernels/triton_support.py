"""What Triton's kernels share: whether they can run here."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run operation by operation on the CPU, in numpy; Triton reads the same variable on its import."""


@cache
def why_not(device: torch.device) -> str | None:
    """None where Triton's kernels run on tensors of `device`; else the reason, for people."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"triton's kernels need a GPU, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"
