"""Messages of expert parallelism along its axis: tokens to the ranks of their experts, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.grouped_linear import take_rows
from shardwise.models.routed_experts import Compute


@dataclass(frozen=True)
class ExpertAxis:
    """The `ep` axis as one rank sees it: of E experts, rank r of n has r E/n to (r + 1) E/n - 1."""

    group: dist.ProcessGroup

    def compute(self, local: Compute, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what all experts make of this rank's rows x [S, D], which are sorted by expert.

        `ends` [E]: where the rows of each expert end; `local` computes this rank's experts.

        Each row goes to its expert's rank and comes back, whatever the counts are. Three all-to-all
        run in the forward (of counts, of rows, of outputs) and two in the backward, on every rank,
        also where it sends or gets nothing. The host waits once, for the counts.
        """
        size = dist.get_world_size(self.group)
        counts = ends.diff(prepend=ends.new_zeros(1)).long().view(size, -1)
        arriving = torch.empty_like(counts)  # from each rank, for each expert of this one
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = _Exchanged.apply(x, sent, received, self.group)
        # They arrive by rank, and of each rank by expert.
        numbers = torch.arange(counts.shape[1], device=x.device).repeat(size)
        experts = numbers.repeat_interleave(arriving.flatten(), output_size=len(rows))
        order = experts.argsort(stable=True)
        back = order.argsort()
        local_ends = arriving.sum(0).cumsum(0).to(ends.dtype)
        y = _of_some_rows(local, take_rows(rows, order, back), local_ends)
        return _Exchanged.apply(take_rows(y, back, order), received, sent, self.group)


def _of_some_rows(local: Compute, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what this rank's experts make of rows, of which there may be none.

    Instead of none they get a row of zeros, as torch's grouped product has no backward for none.
    """
    if len(rows):
        return local(rows, ends)
    return local(F.pad(rows, (0, 0, 0, 1)), ends + 1)[:0]


class _Exchanged(torch.autograd.Function):
    """Rows [S, D] of which the first sent[0] go to the first rank of a group, and so on."""

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
