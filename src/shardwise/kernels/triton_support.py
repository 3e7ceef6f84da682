"""Find out whether Triton's kernels can run on a device."""

import os
from functools import cache
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels on the CPU, operation by operation; it reads the variable itself."""


@cache
def why_not(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device, as a clause; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"triton's kernels need a GPU, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return None
    return f"triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"
