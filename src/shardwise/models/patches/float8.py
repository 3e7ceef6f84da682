"""Linears of layers that multiply in 8-bit floating point: see kernels/float8.py.

Modules, parameters and names stay. The head, the embedding, stacks of experts, routers and other
gates, and what a layer's code reads past its linear keep the products of `training.precision`, and
so does a linear whose sizes the products of 8 bits cannot take. Adapters do too: their frozen
linear alone multiplies in 8 bits.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import RunConfig, UserError
from shardwise.kernels import float8
from shardwise.kernels.float8 import UNIT, Float8, Recipe, float8_linear
from shardwise.models.causal_lm import CausalLM
from shardwise.models.names import hf_name
from shardwise.models.spec import ModelSpec
from shardwise.models.weights import weights_of

PREFIX = "fp8_"
"""Start of the values of `training.matmul` with products in 8 bits; the recipe follows."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the linears of a part multiply as `training.matmul` says."""
    recipe = recipe_of(cfg)
    if recipe is None:
        return
    for path, takes in linears(part.hf, part.spec):
        if takes:
            linear = part.hf.get_submodule(path)
            part.float8[linear] = Float8(recipe, part.backward_half)
            linear.forward = partial(_forward, linear, part.float8[linear])


def recipe_of(cfg: RunConfig) -> Recipe | None:
    """Return how operands are scaled; None: products are not in 8 bits."""
    match cfg.training.matmul:
        case "fp8_tensorwise":
            return "tensorwise"
        case "fp8_rowwise":
            return "rowwise"
        case _:
            return None


def kernel_for(cfg: RunConfig, device: torch.device) -> str:
    """Return what multiplies in 8 bits on a device, for a record. Raise UserError if none does."""
    if why := float8.missing(device):
        raise UserError(f"training.matmul is {cfg.training.matmul}, but {why}; set it to default")
    return cfg.training.matmul if device.type == "cuda" else f"{cfg.training.matmul} (emulated)"


def num_linears(hf: nn.Module, spec: ModelSpec) -> int:
    """Return how many linears can multiply in 8 bits."""
    return sum(takes for _, takes in linears(hf, spec))


def notes(hf: nn.Module, spec: ModelSpec, cfg: RunConfig, device: str) -> tuple[str, ...]:
    """Return notes for a reader of a run's figures; none where products are not in 8 bits."""
    if recipe_of(cfg) is None:
        return ()
    plain = {
        re.sub(r"\.\d+\.", ".*.", hf_name(f"{path}."), count=1).removesuffix(".")
        for path, takes in linears(hf, spec)
        if not takes
    }
    key = f"training.matmul {cfg.training.matmul}"
    texts = [f"{key}: {num_linears(hf, spec)} linears multiply in 8 bits"]
    if device == "cuda":
        texts.append(f"{key}: mfu and hfu are shares of the device's peak in 16 bits")
    else:
        texts.append(f"{key}: products are emulated here, which is slower than without")
    if plain:
        texts.append(
            f"{key}: the products of {', '.join(sorted(plain))} are not in 8 bits, since a size is "
            f"no multiple of {UNIT}"
        )
    return tuple(texts)


def linears(hf: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, bool]]:
    """Yield the path of each linear that may multiply in 8 bits, and whether its sizes let it.

    Of two copies of one, that which computes.
    """
    for row in weights_of(hf, spec):
        if row.takes_few_bits and row.is_linear and not row.is_original:
            yield row.name.removesuffix(".weight"), not any(size % UNIT for size in row.shape)


def _forward(linear: Any, products: Float8, x: torch.Tensor) -> torch.Tensor:
    weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return float8_linear(x, weight, linear.bias, products)
