"""Backends that launch kernels of their own, called through operators of torch.

torch.compile traces through an operator and does not look inside. It needs the shapes and dtypes of
the results, which fake implementations give. The first argument of each operator is the backend's
name; without dropout, `seeds` is None. An operator cannot return None, so a result that nobody
needs is empty.

They are registered without autograd, as only the node in fused.py calls them: a call of one by
`torch.library.custom_op`, which has it, takes the host 15 us instead of 3, and the step of a small
model waits for the host. Where nothing looks at operators, the backend is called without them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from shardwise.kernels.dropout import Dropout, as_arguments, from_arguments
from shardwise.kernels.lora_linear import torch_backend
from shardwise.kernels.lora_linear.backend import LoraBackend


def load_backend(name: str) -> LoraBackend:
    """Return the backend `torch` or `triton`. Raise ImportError if Triton is missing."""
    return torch_backend if name == "torch" else Operators(name)


def _are_seen() -> bool:
    """Return whether torch.compile traces operators, or a mode counts them or takes their place."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


class Operators:
    """A backend whose products are the operators below; LoraBackend defines each function."""

    def __init__(self, name: str) -> None:
        self.name, self._module = name, _module(name)

    def missing(self, device: torch.device) -> str | None:
        """Return why the backend cannot run on a device; None if it can."""
        return self._module.missing(device)

    def project(
        self, x: torch.Tensor, a: Sequence[torch.Tensor], drop: Dropout | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return h = drop(x) a^T [rows, linears * R]."""
        if not _are_seen():
            return self._module.project(x, a, drop, dtype)
        return project(self.name, x, list(a), *as_arguments(drop), dtype)

    def products(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        h: torch.Tensor,
        b: Sequence[torch.Tensor],
        scales: Sequence[float],
    ) -> list[torch.Tensor]:
        """Return y_i = x weight_i^T + bias_i + scale_i h_i b_i^T [rows, out] of each linear."""
        if not _are_seen():
            return self._module.products(x, weights, biases, h, b, scales)
        return products(self.name, x, list(weights), list(biases), h, list(b), list(scales))

    def output_gradients(
        self,
        dys: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        h: torch.Tensor | None,
        scales: Sequence[float],
        dtype: torch.dtype,
        needs_g: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return g [rows, linears * R] and db [sum of outs, R], None if not needed."""
        if not _are_seen():
            return self._module.output_gradients(dys, b, h, scales, dtype, needs_g)
        g, db = output_gradients(self.name, list(dys), list(b), h, list(scales), dtype, needs_g)
        return g if needs_g else None, None if h is None else db

    def input_gradient(
        self,
        dys: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        g: torch.Tensor,
        a: Sequence[torch.Tensor],
        drop: Dropout | None,
    ) -> torch.Tensor:
        """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
        if not _are_seen():
            return self._module.input_gradient(dys, weights, g, a, drop)
        arguments = list(dys), list(weights), g, list(a), *as_arguments(drop)
        return input_gradient(self.name, *arguments)

    def factor_gradient(
        self, g: torch.Tensor, x: torch.Tensor, drop: Dropout | None
    ) -> torch.Tensor:
        """Return da = g^T drop(x) [linears * R, in]."""
        if not _are_seen():
            return self._module.factor_gradient(g, x, drop)
        return factor_gradient(self.name, g, x, *as_arguments(drop))


def _module(name: str) -> Any:
    from shardwise.kernels.lora_linear import triton  # which may be missing

    return {"triton": triton}[name]


_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")


def _operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes shardwise::NAME of a function, and returns the operator."""

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.shardwise, name).default

    return register


@_operator("lora_project")
def project(
    backend: str,
    x: torch.Tensor,
    a: list[torch.Tensor],
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return h as a new tensor."""
    return _module(backend).project(x, a, from_arguments(seeds, features, p), dtype)


@torch.library.register_fake("shardwise::lora_project")
def _(backend: str, x: torch.Tensor, a: list[torch.Tensor], *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], len(a) * a[0].shape[0], dtype=others[-1])


@_operator("lora_products")
def products(
    backend: str,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    h: torch.Tensor,
    b: list[torch.Tensor],
    scales: list[float],
) -> list[torch.Tensor]:
    """Return the y's as new tensors."""
    return _module(backend).products(x, weights, biases, h, b, scales)


@torch.library.register_fake("shardwise::lora_products")
def _(backend: str, x: torch.Tensor, weights: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@_operator("lora_output_gradients")
def output_gradients(
    backend: str,
    dys: list[torch.Tensor],
    b: list[torch.Tensor],
    h: torch.Tensor | None,
    scales: list[float],
    dtype: torch.dtype,
    needs_g: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g and db as new tensors."""
    g, db = _module(backend).output_gradients(dys, b, h, scales, dtype, needs_g)
    empty = dys[0].new_empty(0, 0)
    return empty if g is None else g, empty.clone() if db is None else db


@torch.library.register_fake("shardwise::lora_output_gradients")
def _(
    backend: str,
    dys: list[torch.Tensor],
    b: list[torch.Tensor],
    h: torch.Tensor | None,
    scales: list[float],
    dtype: torch.dtype,
    needs_g: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, rank = dys[0], b[0].shape[1]
    g = dy.new_empty(dy.shape[0], len(b) * rank, dtype=dtype) if needs_g else dy.new_empty(0, 0)
    if h is None:
        return g, dy.new_empty(0, 0)
    wide = torch.promote_types(dtype, torch.float32)
    return g, dy.new_empty(sum(dy.shape[1] for dy in dys), rank, dtype=wide)


@_operator("lora_input_gradient")
def input_gradient(
    backend: str,
    dys: list[torch.Tensor],
    weights: list[torch.Tensor],
    g: torch.Tensor,
    a: list[torch.Tensor],
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """Return dx as a new tensor."""
    return _module(backend).input_gradient(dys, weights, g, a, from_arguments(seeds, features, p))


@torch.library.register_fake("shardwise::lora_input_gradient")
def _(
    backend: str,
    dys: list[torch.Tensor],
    weights: list[torch.Tensor],
    g: torch.Tensor,
    a: list[torch.Tensor],
    *_: Any,
) -> torch.Tensor:
    return dys[0].new_empty(g.shape[0], a[0].shape[1])


@_operator("lora_factor_gradient")
def factor_gradient(
    backend: str,
    g: torch.Tensor,
    x: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """Return da as a new tensor."""
    return _module(backend).factor_gradient(g, x, from_arguments(seeds, features, p))


@torch.library.register_fake("shardwise::lora_factor_gradient")
def _(backend: str, g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    wide = torch.promote_types(g.dtype, torch.float32)
    return g.new_empty(g.shape[1], x.shape[1], dtype=wide)
