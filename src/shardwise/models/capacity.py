"""A limit on the tokens that an expert takes of each row, beyond which tokens are dropped.

Of a row's T tokens, of which each chooses k of E experts, an expert takes ceil(factor T k / E) at
most: the first that choose it. What is dropped is a function of the row alone, so it is the same
under every layout; and whether a token is dropped depends on no later one. In rows whose documents
are isolated the limit is for each document. What fills a row up has a limit of its own.

A dropped choice adds nothing, and the token's other choices keep their weights. Renormalised, these
would depend on how full another expert is, and a token without any expert left would have none.
Source: Lepikhin et al., "GShard", arXiv 2006.16668, section 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Documents = Callable[[], torch.Tensor | None]
"""Returns [B, T] of the micro-batch that is being computed: equal numbers side by side where tokens
share a limit, -1 where a row is padded; None: nothing is known of rows."""


@dataclass(frozen=True)
class Capacity:
    """The limit of each expert of a layer."""

    factor: float
    """`model.expert_capacity`: 1 is an equal share of the row's tokens for each expert."""

    def drop(
        self,
        experts: torch.Tensor,
        order: torch.Tensor,
        ids: torch.Tensor,
        top_k: int,
        num_experts: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return choices with those beyond the limit behind all others, where their expert is E.

        experts [S] are sorted, of an expert in the order of tokens; choice order[i] [S] is one of
        token order[i] // top_k. Tokens with equal `ids` [B, T] side by side share a limit.
        """
        numbers, lengths = self._documents_of_tokens(ids)
        tokens = order // top_k
        assert len(order) == len(numbers) * top_k, "a layer must see complete rows"
        limits = (self.factor * lengths.double() * top_k / num_experts).ceil()
        changes = _changes(experts) | _changes(numbers[tokens])
        places = torch.arange(len(order), device=order.device)
        first_places = places.where(changes, 0).cummax(0).values
        is_dropped = places - first_places >= limits[tokens]
        experts, moved = experts.masked_fill(is_dropped, num_experts).sort(stable=True)
        return experts, order[moved]

    @staticmethod
    def _documents_of_tokens(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token the number of its document in the micro-batch, and its length."""
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        numbers = begins.flatten().cumsum(0) - 1
        lengths = torch.zeros_like(numbers).scatter_add_(0, numbers, torch.ones_like(numbers))
        return numbers, lengths[numbers]


def _changes(x: torch.Tensor) -> torch.Tensor:
    """Return where a value differs from the one before it, [S]; the first one does."""
    changes = torch.ones_like(x, dtype=torch.bool)
    changes[1:] = x[1:] != x[:-1]
    return changes
