"""Modules of magnitudes under DoRA, whose class derives from one of PEFT's."""

from typing import Any

from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn

from shardwise.kernels.lora_linear.magnitude import Sum


class Magnitude(DoraLinearLayer):
    """The lengths [out] of a linear's rows under DoRA, in the place of PEFT's own module.

    Names and files are PEFT's. patches/lora_kernel.py computes with it.
    """

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
