"""Gradients that a backward of experts' linears is asked for, and gives."""

from typing import NamedTuple

import torch


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    weight: bool
    factors: bool


class Gradients(NamedTuple):
    """The gradients of what a forward takes, None where one is not needed."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
