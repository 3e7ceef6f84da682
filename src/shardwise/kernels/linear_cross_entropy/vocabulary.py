"""A head that is sharded over ranks along its vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Vocabulary:
    """The share of the vocabulary whose rows of the weight this rank holds."""

    first: int
    """The id of this rank's first token."""
    max_tokens: int
    """Tokens of the rank that has most of them; all ranks choose their chunks by it."""
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    """Return the elementwise sum of a tensor over the ranks; a collective."""
    max_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    """Return the elementwise maximum of a tensor over the ranks; a collective."""
