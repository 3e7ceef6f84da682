"""The ranks that have the other tokens of a rank's rows, each a stretch of them.

Convolutions need the few tokens before a rank's, which the rank before sends. Recurrent cores need
the state that all ranks before leave. A rank's tokens change a state by an affine map, whose size
does not depend on their number: all ranks gather all maps, and each applies those before its own.
The backward does the same from the other side. What ranks send does not depend on the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import Recurrence, Summary
from shardwise.parallel.reduce import all_gather

BEFORE_A_ROW = -2
"""The document of what lies before a row; no token has it."""


class ContextNeighbours:
    """The ranks of a micro-batch's rows; see `kernels.recurrence.Neighbours`."""

    def __init__(
        self, group: dist.ProcessGroup, document_ids: torch.Tensor, isolated: bool
    ) -> None:
        """Take the documents [B, T n] of the complete rows, which every one of the n ranks has."""
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.document_ids = document_ids
        self.isolated = isolated

    @property
    def documents(self) -> torch.Tensor | None:
        """The documents [B, T n] that are kept apart; None: none are."""
        return self.document_ids if self.isolated else None

    def earlier(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See Neighbours."""
        return _Earlier.apply(x, num_tokens, self)

    def documents_before(self, num_tokens: int) -> torch.Tensor:
        """See Neighbours. Nothing is sent."""
        padded = F.pad(self.document_ids, (num_tokens, 0), value=BEFORE_A_ROW)
        return padded[:, self._first_token(self.rank) :][:, :num_tokens]

    def state_before(self, core: Recurrence, summary: Summary) -> torch.Tensor:
        """See Neighbours."""
        state = torch.zeros_like(summary.after)
        maps = self._of_every_rank([summary.transition, summary.after])
        for rank, (transition, after) in enumerate(maps[: self.rank]):
            state = core.pass_on(transition, self._into(rank, state)) + after
        return self._into(self.rank, state)

    def of_state_after(
        self, core: Recurrence, transition: torch.Tensor, of_before: torch.Tensor
    ) -> torch.Tensor:
        """See Neighbours."""
        of_state = torch.zeros_like(of_before)
        maps = self._of_every_rank([transition, of_before])
        for rank in reversed(range(self.rank + 1, self.size)):
            later_transition, of_later = maps[rank]
            of_state = self._into(rank, of_later + core.pass_back(later_transition, of_state))
        return of_state

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See Neighbours: 2 (n-1)/n of the bytes of x leave each rank."""
        summed = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    def shift(self, x: torch.Tensor, by: int) -> torch.Tensor:
        """Send x to the rank `by` places further, and return what comes from as many places before.

        It is 0 where no such rank is. The bytes of x leave each rank but those at the end.
        """
        received = torch.zeros_like(x, memory_format=torch.contiguous_format)
        transfers = []
        for operation, tensor, other in (
            (dist.isend, x.contiguous(), self.rank + by),
            (dist.irecv, received, self.rank - by),
        ):
            if 0 <= other < self.size:
                peer = dist.get_global_rank(self.group, other)
                transfers.append(dist.P2POp(operation, tensor, peer, self.group))
        if transfers:
            for transfer in dist.batch_isend_irecv(transfers):
                transfer.wait()
        return received

    def _first_token(self, rank: int) -> int:
        return self.document_ids.shape[1] // self.size * rank

    def _into(self, rank: int, state: torch.Tensor) -> torch.Tensor:
        """Return a state [B, ...], or its gradient, 0 where a document begins with a rank."""
        if not self.isolated or rank == 0:
            return state
        first = self._first_token(rank)
        begins = self.document_ids[:, first] != self.document_ids[:, first - 1]
        return state.masked_fill(begins.view(-1, *(1 for _ in state.shape[1:])), 0)

    def _of_every_rank(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Gather tensors of one dtype: (n-1) times their bytes reach each rank, in one call."""
        (dtype,) = {tensor.dtype for tensor in tensors}
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        gathered = torch.empty(self.size * joined.numel(), dtype=dtype, device=joined.device)
        all_gather(gathered, joined, group=self.group)
        sizes = [tensor.numel() for tensor in tensors]
        return [
            [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors)]
            for flat in gathered.chunk(self.size)
        ]


class _Earlier(torch.autograd.Function):
    """The last tokens of the rank before; the backward sends their gradient back there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, num_tokens: int, neighbours: ContextNeighbours
    ) -> torch.Tensor:
        assert num_tokens <= x.shape[1], "a rule refuses ranks of fewer tokens"
        ctx.neighbours, ctx.num_others = neighbours, x.shape[1] - num_tokens
        return neighbours.shift(x[:, ctx.num_others :], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (of_earlier,) = gradients
        return F.pad(ctx.neighbours.shift(of_earlier, -1), (0, 0, ctx.num_others, 0)), None, None
