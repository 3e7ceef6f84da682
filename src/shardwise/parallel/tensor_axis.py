"""Messages of tensor parallelism along its axis: each move, and the move of its backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.base.interfaces import Mesh
from shardwise.parallel.reduce import all_gather, reduce_scatter

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorAxis:
    """The `tp` axis as one rank sees it.

    Activations are [B, T, D], or a rank's share [B, T/n, D] of their tokens.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool

    @classmethod
    def of(cls, mesh: Mesh, sequence_parallel: bool) -> "TensorAxis":
        """Return the axis of a mesh."""
        tp = mesh.along("tp")
        return cls(tp, tp.get_group(), tp.get_local_rank(), tp.size(), sequence_parallel)

    @property
    def shares_tokens(self) -> bool:
        """Whether a rank holds 1/n of the tokens between blocks.

        It does in training, where this saves memory.
        """
        return self.sequence_parallel and torch.is_grad_enabled()

    # ------------------------------------------------------------------------------- with gradients

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Pass x, equal on every rank, into a sharded block; add up its partial gradients."""
        if self.shares_tokens:
            return _Moved.apply(x, self.join_tokens, self.sum_token_shares)
        return _Moved.apply(x, _as_is, self.sum)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the partial sums that leave a sharded block; each rank needs all the gradient."""
        if self.shares_tokens:
            return _Moved.apply(x, self.sum_token_shares, self.join_tokens)
        return self.sum_up(x)

    def sum_up(self, x: torch.Tensor) -> torch.Tensor:
        """Add up partial sums; each rank needs the complete gradient."""
        return _Moved.apply(x, self.sum, _as_is)

    def sum_within(self, x: torch.Tensor, shares: int = 1) -> torch.Tensor:
        """Add up partial sums within a sharded block, and the partial sums of the gradient.

        With more shares than one, only neighbours that hold the same share add up; those of all
        shares are sent.
        """
        if shares == 1:
            return _Moved.apply(x, self.sum, self.sum)
        place = self.rank * shares // self.size
        here = F.one_hot(torch.tensor(place, device=x.device), shares).to(x.dtype)
        return _Moved.apply(x.unsqueeze(-1) * here, self.sum, self.sum)[..., place]

    def share_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Take this rank's tokens of what is equal on every rank."""
        return _Moved.apply(x, self.token_share, self.join_tokens) if self.shares_tokens else x

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the tokens of all ranks, each of which then does the same with them."""
        return _Moved.apply(x, self.join_tokens, self.token_share) if self.shares_tokens else x

    # ---------------------------------------------------------------------------- without gradients

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x: 2 (n-1)/n of its bytes leave each rank."""
        summed = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of all ranks' x; as many bytes are sent as for a sum."""
        maximum = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        return maximum

    def join_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Join all ranks' [B, T/n, D] to [B, T, D]: (n-1) times its bytes reach each rank."""
        x = x.contiguous()
        if len(x) == 1:  # Gathered in place: fsdp2 warns of a layer that returns a view.
            joined = x.new_empty(1, self.size * x.shape[1], *x.shape[2:])
            all_gather(joined.view(-1), x.view(-1), group=self.group)
            return joined
        shares = x.new_empty(self.size, *x.shape)
        all_gather(shares.view(-1), x.view(-1), group=self.group)
        # With one token of each rank, the reshape alone is a view with gaps.
        return shares.transpose(0, 1).reshape(len(x), -1, *x.shape[2:]).contiguous()

    def sum_token_shares(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T/n, D] of the sum of all [B, T, D]: (n-1)/n of its bytes leave each rank."""
        shares = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        summed = torch.empty_like(shares[0])
        reduce_scatter(summed.view(-1), shares.view(-1), group=self.group)
        return summed

    def token_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's [B, T/n, D] of [B, T, D]; nothing is sent."""
        return x.chunk(self.size, 1)[self.rank].contiguous()


def _as_is(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class _Moved(torch.autograd.Function):
    """One move in the forward, and another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.move = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return ctx.move(gradient), None, None
