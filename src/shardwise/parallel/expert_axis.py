"""What expert parallelism sends along its axis: tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes (tokens [N, D], their experts [N, k], the experts' weights [N, k]) -> [N, D]."""


@dataclass(frozen=True)
class ExpertAxis:
    """The `ep` axis as one rank sees it: of E experts, rank r of n has r E/n to (r + 1) E/n - 1."""

    group: dist.ProcessGroup
    num_local: int
    """Experts of this rank, E/n."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    def compute(
        self, local: Experts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what all experts make of this rank's tokens [N, D].

        `chosen` [N, k] are experts of all ranks, `weights` [N, k] what their outputs are multiplied
        by; `local` computes this rank's experts.

        Each choice of each token goes to its expert's rank and comes back, whatever the counts are:
        nothing is dropped. Three all-to-all run in the forward (of counts, of tokens, of outputs)
        and two in the backward, on every rank, also where it sends or gets nothing. The host waits
        once, for the counts.
        """
        num_choices = chosen.shape[1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.size * self.num_local)  # of each expert
        arriving = torch.empty_like(counts).view(self.size, self.num_local)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack([counts.view_as(arriving).sum(1), arriving.sum(1)])
        sent, received = both.tolist()
        tokens = _Exchanged.apply(hidden[order // num_choices], sent, received, self.group)
        # [M, D]: from one rank after the other, and of each by expert.
        experts = torch.arange(self.num_local, device=flat.device).repeat(self.size)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=len(tokens))
        outputs = self._compute(local, tokens, experts)
        outputs = _Exchanged.apply(outputs, received, sent, self.group)  # [N k, D], in `order`
        by_choice = torch.empty_like(outputs).index_copy(0, order, outputs)
        weighted = by_choice.view(*chosen.shape, -1) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)

    def _compute(self, local: Experts, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        num_tokens = len(tokens)
        if num_tokens == 0:
            # A row of zeros: so the backward of a rank without tokens meets all weights, and both
            # of its all-to-all run.
            tokens, experts = F.pad(tokens, (0, 0, 0, 1)), F.pad(experts, (0, 1))
        ones = tokens.new_ones(len(tokens), 1)
        return local(tokens, experts.unsqueeze(1), ones)[:num_tokens]


class _Exchanged(torch.autograd.Function):
    """Rows [N, D] of which the first sizes[0] go to the first rank of a group, and so on."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sizes = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received, group = ctx.sizes
        return _exchange(gradients[0], received, sent, group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    # Each rank's rows go to it: (n-1)/n of the bytes leave a rank where routing is even.
    dist.all_to_all_single(result, rows.contiguous(), [*received], [*sent], group=group)
    return result
