"""The arguments that causal_conv1d's kernel gets on a GPU mean what the torch path computes.

The stand-in is written from the package's source, in plain torch on a CPU, and refuses what the
kernel refuses.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels import short_conv as package
from shardwise.kernels.short_conv import backend, shifted, short_conv
from tests.models.tiny import relative_error

# causal_conv1d 1.7.0, causal_conv1d/causal_conv1d_interface.py.
SIGNATURE = (
    "(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None)"
)


def kernel(given: dict[str, Any]) -> torch.Tensor:
    """Return [B, D, T] of x [B, D, T], whose channels lie side by side; see csrc of the package."""
    x, weight, numbers, before = (
        given[name] for name in ("x", "weight", "seq_idx", "initial_states")
    )
    width = weight.shape[1]
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert 2 <= width <= 4
    assert x.shape[1] % 8 == 0
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0
    assert x.stride(2) % 8 == 0
    assert given["bias"] is None or given["bias"].dtype == weight.dtype
    assert not given["return_final_states"]
    if before is None:
        before = x.new_zeros(*x.shape[:2], width - 1)
    else:
        assert numbers is None, "early releases leave them out"
        assert before.dtype == x.dtype
        assert before.stride(1) == 1
        assert before.shape == (*x.shape[:2], width - 1)
    seen = torch.cat([before, x], 2).float()
    out = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(width):
        tokens = seen[:, :, tap : tap + x.shape[2]]
        if numbers is not None:
            assert numbers.dtype == torch.int32
            assert numbers.shape == (x.shape[0], x.shape[2])
            assert numbers.is_contiguous()
            assert numbers.min() >= 0, "the kernel gives 0 for them"
            there = F.pad(numbers, (width - 1, 0), value=-1)[:, tap : tap + x.shape[2]]
            tokens = tokens * (there == numbers)[:, None]
        out = out + tokens * weight[:, tap, None].float()
    if given["bias"] is not None:
        out = out + given["bias"][:, None].float()
    return (out if given["activation"] is None else F.silu(out)).to(x.dtype)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Pretend that the package is installed and tensors are on a GPU; give the kernel's calls."""
    namespace: dict[str, Any] = {}
    exec(f"def causal_conv1d_fn{SIGNATURE}: pass", namespace)
    signature = inspect.signature(namespace["causal_conv1d_fn"])
    kernel_calls: list[dict[str, Any]] = []

    def stand_in(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        kernel_calls.append(bound.arguments)
        return kernel(bound.arguments)

    module: Any = ModuleType("causal_conv1d")
    module.__spec__ = ModuleSpec("causal_conv1d", None)
    module.causal_conv1d_fn = stand_in
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    monkeypatch.setattr(
        package, "backend", lambda device, dtype: backend(torch.device("cuda"), dtype)
    )
    return kernel_calls


def inputs(dtype: torch.dtype, channels: int = 8) -> list[torch.Tensor]:
    """x, a slice of a wider projection; weight, bias, and earlier tokens."""
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(2, 40, channels + 3, generator=generator).to(dtype)
    shapes = ((channels, 4), (channels,), (2, 3, channels))
    others = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [projected[..., :channels], others[0], others[1], others[2].to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize("has_earlier", [True, False])
def test_the_kernel_gets_what_the_torch_path_computes(dtype, has_documents, has_earlier, calls):
    x, weight, bias, earlier = inputs(dtype)
    earlier = earlier if has_earlier else None
    documents = None
    if has_documents:
        begins = torch.rand(2, 43 if has_earlier else 40) < 0.2
        documents = begins.cumsum(1) - 1
        documents[:, -5:] = -1
    for activation in (None, "silu"):
        for tensor in (None, bias):
            arguments = (x, weight, tensor, activation, earlier, documents)
            out, expected = short_conv(*arguments), shifted.short_conv(*arguments)
            assert out.dtype == dtype
            assert relative_error(out, expected) < 2 * torch.finfo(dtype).eps
    assert len(calls) == 4


def test_what_the_kernel_does_not_take_is_torchs(calls):
    x, weight, bias, earlier = inputs(torch.float32)
    short_conv(x.double(), weight.double())
    five = torch.randn(8, 5)
    short_conv(x, five)
    x, weight, bias, earlier = inputs(torch.float32, channels=9)
    short_conv(x, weight, bias, "silu", earlier)
    assert calls == []


def test_it_is_for_gpus(calls):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert backend(cuda, torch.bfloat16) == backend(cuda, torch.float32) == "causal_conv1d"
    assert backend(cuda, torch.float64) == backend(cpu, torch.bfloat16) == "torch"
