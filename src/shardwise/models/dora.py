"""DoRA on PEFT's layers: the lengths of the rows of each adapted matrix.

Modules, names and files are PEFT's. patches/lora_kernel.py computes with them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.lora_linear.magnitude import Sum
from shardwise.models.stored import weight_of


class Magnitude(DoraLinearLayer):
    """The lengths [out] of a linear's rows, in the place of PEFT's own module."""

    add_up: Sum | None = None

    def share_rows(self, add_up: Sum) -> None:
        """Let others hold the other columns of the rows; `add_up` adds up their squares [out]."""
        self.add_up = add_up


def use_magnitudes(layer: Any) -> None:
    """Replace PEFT's modules of magnitudes in one of its layers, if that has any."""
    for name, peft_magnitude in layer.lora_magnitude_vector.items():
        magnitude = Magnitude(peft_magnitude.fan_in_fan_out)
        magnitude.weight = nn.Parameter(peft_magnitude.weight)
        layer.lora_magnitude_vector[name] = magnitude


def magnitude_of(layer: Any) -> Magnitude | None:
    """Return the module with the lengths of a layer of PEFT; None for plain LoRA."""
    return next(iter(layer.lora_magnitude_vector.values()), None)


def starts(model: nn.Module, wanted: Container[str]) -> dict[str, tuple[str, Any]]:
    """Return the wanted magnitudes' names and their layers, by the weights that they start from."""
    return {
        f"{path}.base_layer.weight": (name, module)
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
        for adapter in module.lora_magnitude_vector
        if (name := f"{path}.lora_magnitude_vector.{adapter}.weight") in wanted
    }


def first_magnitude(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the lengths [out] at which a layer's magnitude starts: those of the rows of W.

    `weight`: W on the CPU, whole, with the values that the run computes with. B is 0 at the start.
    """
    base = layer.get_base_layer()
    values = weight.to(weight_of(base).dtype)
    rows = values.t() if isinstance(base, Conv1D) else values
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide)
