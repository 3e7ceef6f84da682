"""Which rows of a head a rank has, where ranks have some each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens a rank has, where each of some ranks has other rows of the weight; reductions are elementwise."""

    first: int  # of this rank's tokens
    most: int  # tokens that a rank has: chunks are alike on all
    add_up: Callable[[torch.Tensor], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]
