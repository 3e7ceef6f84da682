"""What tensor parallelism sends along its axis, each move with the one that its backward makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.interfaces import Mesh
from shardwise.parallel.reduce import all_gather, reduce_scatter

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorAxis:
    """The `tp` axis as one rank sees it. Activations are [B, T, D], or shares [B, T/n, D] of their tokens."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool

    @classmethod
    def of(cls, mesh: Mesh, sequence_parallel: bool) -> TensorAxis:
        """The axis of a mesh."""
        own = mesh.dense["tp"]
        return cls(own, own.get_group(), own.get_local_rank(), own.size(), sequence_parallel)

    @property
    def shares_tokens(self) -> bool:
        """Whether a rank holds 1/n of the tokens between blocks: in training, where it saves memory."""
        return self.sequence_parallel and torch.is_grad_enabled()

    # ------------------------------------------------------------------------------- with gradients

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Into a block that is cut: the same on every rank; of the gradient each has a summand, and these are added."""
        if self.shares_tokens:
            return _Moved.apply(x, self.join_tokens, self.sum_token_shares)
        return _Moved.apply(x, _as_is, self.sum)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Out of a block that is cut: summands are added up; each rank needs the whole gradient."""
        if self.shares_tokens:
            return _Moved.apply(x, self.sum_token_shares, self.join_tokens)
        return self.sum_up(x)

    def sum_up(self, x: torch.Tensor) -> torch.Tensor:
        """Summands are added up; each rank needs the whole gradient."""
        return _Moved.apply(x, self.sum, _as_is)

    def sum_within(self, x: torch.Tensor, shares: int = 1) -> torch.Tensor:
        """Within a block that is cut: summands are added up, and so are the summands of the gradient.

        With more shares than one: over the neighbours that hold the same one, but those of all are sent.
        """
        if shares == 1:
            return _Moved.apply(x, self.sum, self.sum)
        place = self.rank * shares // self.size
        own = F.one_hot(torch.tensor(place, device=x.device), shares).to(x.dtype)
        return _Moved.apply(x.unsqueeze(-1) * own, self.sum, self.sum)[..., place]

    def share_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """From what is equal on every rank to each one's tokens."""
        return _Moved.apply(x, self.token_share, self.join_tokens) if self.shares_tokens else x

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse: everyone's tokens, to do the same with them on every rank."""
        return _Moved.apply(x, self.join_tokens, self.token_share) if self.shares_tokens else x

    # ------------------------------------------------------------------------------- without

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of all ranks, to all: 2 (n-1)/n of its bytes leave each rank."""
        summed = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Of all ranks, element by element, to all; as many bytes as a sum."""
        found = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def join_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T/n, D] of every rank to [B, T, D] on all: (n-1) times its bytes reach each rank."""
        x = x.contiguous()
        if (
            len(x) == 1
        ):  # and not as a view of what is gathered, which fsdp2 does not like a layer to return
            joined = x.new_empty(1, self.size * x.shape[1], *x.shape[2:])
            all_gather(joined.view(-1), x.view(-1), group=self.group)
            return joined
        shares = x.new_empty(self.size, *x.shape)
        all_gather(shares.view(-1), x.view(-1), group=self.group)
        # A copy in any case: with one token of each rank, the reshape alone is a view with gaps.
        return shares.transpose(0, 1).reshape(len(x), -1, *x.shape[2:]).contiguous()

    def sum_token_shares(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] of every rank to its sum's [B, T/n, D]: (n-1)/n of its bytes leave each rank."""
        shares = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        summed = torch.empty_like(shares[0])
        reduce_scatter(summed.view(-1), shares.view(-1), group=self.group)
        return summed

    def token_share(self, x: torch.Tensor) -> torch.Tensor:
        """The [B, T/n, D] of this rank, of [B, T, D]; nothing is sent."""
        return x.chunk(self.size, 1)[self.rank].contiguous()


def _as_is(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class _Moved(torch.autograd.Function):
    """One move forwards, another one backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.move = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return ctx.move(gradient), None, None
