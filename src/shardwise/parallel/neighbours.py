"""The ranks that have the other tokens of a rank's rows, each a stretch of them.

Convolutions need the few tokens before a rank's, which the rank before sends. Recurrent cores need
the state that all ranks before leave. A rank's tokens change a state by an affine map, whose size
does not depend on their number. Maps travel by a prefix scan: in the round of distance d a rank
sends the map of the last d ranks' tokens to the rank d places further, so log2 n rounds bring what
all ranks before have. The backward does the same from the other side. What ranks send does not
depend on the documents.
Source: Hillis and Steele, "Data parallel algorithms", Communications of the ACM 29 (1986).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import Recurrence, Summary

BEFORE_A_ROW = -2
"""The document of what lies before a row; no token has it."""


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Affine(NamedTuple):
    """A map of states, or of their gradients: x to `linear` x + `added`."""

    linear: torch.Tensor | None
    """The argument of `Recurrence.pass_on`; None where x is 0."""
    added: torch.Tensor


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
        own = Affine(self._into(summary.transition), summary.after)
        return self._into(self._of_ranks_before(own, core.pass_on, core.pass_on, 1))

    def grad_state_after(
        self, core: Recurrence, transition: torch.Tensor, grad_before: torch.Tensor
    ) -> torch.Tensor:
        """See Neighbours."""
        own = Affine(self._into(transition), self._into(grad_before))

        def join(nearer: torch.Tensor, farther: torch.Tensor) -> torch.Tensor:
            return core.pass_on(farther, nearer)  # later tokens are applied last

        return self._of_ranks_before(own, core.pass_back, join, -1)

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
        self._exchange(x.contiguous(), received, by)
        return received

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, by: int) -> None:
        """Send to the rank `by` places further, and receive from `by` before, where these are."""
        transfers = []
        for operation, tensor, other in (
            (dist.isend, sent, self.rank + by),
            (dist.irecv, received, self.rank - by),
        ):
            if 0 <= other < self.size:
                peer = dist.get_global_rank(self.group, other)
                transfers.append(dist.P2POp(operation, tensor, peer, self.group))
        if transfers:
            for transfer in dist.batch_isend_irecv(transfers):
                transfer.wait()

    def _of_ranks_before(
        self, own: Affine, carry: Product, join: Product, step: int
    ) -> torch.Tensor:
        """Return what the maps of all ranks before make of 0; `step` -1: of all ranks after.

        `carry` applies the linear part of a map, `join` makes one of a nearer rank's and a farther
        one's. What starts at the first rank is applied to 0 alone, so its linear part is not sent.
        """

        def composed(nearer: Affine, farther: Affine) -> Affine:
            assert nearer.linear is not None
            added = nearer.added + carry(nearer.linear, farther.added)
            if farther.linear is None:
                return Affine(None, added)
            return Affine(join(nearer.linear, farther.linear), added)

        place = self.rank if step == 1 else self.size - 1 - self.rank
        before, upto = None, own  # of all ranks reached so far, and with this rank's own
        distance = 1
        # Autocast is off: states have 32 bits, whatever dtype the products around them have.
        with torch.autocast(own.added.device.type, enabled=False):
            while distance < self.size:
                sent = upto if place >= distance else Affine(None, upto.added)
                farther = self._pass_on(sent, own, place >= 2 * distance, step * distance)
                if place >= distance:
                    before = farther if before is None else composed(before, farther)
                    if place + 2 * distance < self.size:
                        upto = composed(own, before)
                distance *= 2
        return torch.zeros_like(own.added) if before is None else before.added

    def _pass_on(self, sent: Affine, like: Affine, has_linear: bool, by: int) -> Affine:
        """Send a map `by` places further, and return the one that comes, of sizes as `like`."""
        assert like.linear is not None
        sizes = [like.linear.numel() if has_linear else 0, like.added.numel()]
        flat = torch.cat([x.flatten() for x in sent if x is not None])
        received = flat.new_empty(sum(sizes))
        self._exchange(flat, received, by)
        linear, added = received.split(sizes)
        return Affine(
            linear.view_as(like.linear) if has_linear else None, added.view_as(like.added)
        )

    def _first_token(self, rank: int) -> int:
        return self.document_ids.shape[1] // self.size * rank

    def _into(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, ...] that comes from before, 0 where a document begins with this rank."""
        if not self.isolated or self.rank == 0:
            return x
        first = self._first_token(self.rank)
        begins = self.document_ids[:, first] != self.document_ids[:, first - 1]
        return x.masked_fill(begins.view(-1, *(1 for _ in x.shape[1:])), 0)


class NoNeighbours:
    """Neighbours of a rank that has complete rows: it computes as others do and sends nothing."""

    documents = None

    def earlier(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See Neighbours."""
        return torch.zeros_like(x[:, :num_tokens])

    def documents_before(self, num_tokens: int) -> torch.Tensor:
        """See Neighbours."""
        raise NotImplementedError("documents are not kept apart")

    def state_before(self, core: Recurrence, summary: Summary) -> torch.Tensor:
        """See Neighbours."""
        return torch.zeros_like(summary.after)

    def grad_state_after(
        self, core: Recurrence, transition: torch.Tensor, grad_before: torch.Tensor
    ) -> torch.Tensor:
        """See Neighbours."""
        return torch.zeros_like(grad_before)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See Neighbours."""
        return x


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
        (grad_earlier,) = gradients
        return F.pad(ctx.neighbours.shift(grad_earlier, -1), (0, 0, ctx.num_others, 0)), None, None
