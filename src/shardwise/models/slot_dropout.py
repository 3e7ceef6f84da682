"""Dropout whose masks are a function of (seed, step, slot, module), whatever the layout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.base.batches import AnyBatch, TensorBatch
from shardwise.kernels.dropout import Dropout, hash32
from shardwise.models.seeds import stable_seed


@dataclass
class DropoutState:
    """State that the masks depend on; all dropouts of a model share one object."""

    seed: int
    used: bool = False
    """Whether a dropout of the model drops anything."""
    batch: AnyBatch | None = None
    """The micro-batch that is being computed."""
    rows: torch.Tensor | None = None
    """A seed for each of its rows, [B] int32."""
    tokens: torch.Tensor | None = None
    """A seed for each of its tokens, [B, T] int32."""
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes rows of one document of [B, T, ...], in a mixer that sees such rows (isolation.py)."""

    def start(self, batch: AnyBatch) -> None:
        """Begin a forward of `batch`."""
        self.batch, self.rows, self.tokens = batch, None, None
        if not self.used:
            return
        seeds = [_int32(stable_seed(self.seed, batch.step, slot)) for slot in batch.slots]
        rows = torch.tensor(seeds, dtype=torch.int32)
        self.rows = rows.to(batch.device, non_blocking=True)
        if isinstance(batch, TensorBatch):
            return  # its rows need not be tokens
        if batch.positions is None:
            self.tokens = self.seeds(batch.input_ids.shape[1])
        else:
            self.tokens = hash32(self.rows[:, None], batch.positions.to(torch.int32))

    def seeds(self, length: int) -> torch.Tensor:
        """Return a seed for each of `length` places in a row, for all rows: [B, length] int32."""
        assert self.rows is not None
        if self.tokens is not None and self.tokens.shape[1] == length:
            return self.tokens
        assert self.batch is None or self.batch.positions is None, (
            "not all tokens of a row are here"
        )
        places = torch.arange(length, dtype=torch.int32, device=self.rows.device)
        return hash32(self.rows[:, None], places)


class SlotDropout(nn.Module):
    """Dropout of probability `p` on [B, ..., D] or [B*T, D], with the masks of the rows' slots."""

    def __init__(
        self, p: float, name: str, state: DropoutState, features: torch.Tensor | None = None
    ) -> None:
        """`features`: which of the last dim's the input has, int32; None: all of them."""
        super().__init__()
        state.used |= p > 0.0
        self.p, self.name, self.state = p, name, state
        # A tensor: compiled layers share code, of which a number would be a part. It has one
        # element and is on the CPU, so any device takes it without a wait.
        self.salt = torch.tensor(_int32(stable_seed(name)), dtype=torch.int32)
        self.features = features

    def for_share(self, features: torch.Tensor) -> "SlotDropout":
        """Return the same dropout for an input that has only these features, int32."""
        return SlotDropout(self.p, self.name, self.state, features)

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.p > 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero a share `p` of x and scale the rest by 1 / (1 - p); in eval mode, x itself."""
        if not self.active:
            return x
        seeds = self.seeds(x)
        masks = Dropout(self.p, seeds[None], self.features)
        return masks.drop(x.flatten(0, -2)).view(x.shape)

    def seeds(self, x: torch.Tensor) -> torch.Tensor:
        """Return a seed for each token of x [B, ..., D] or [B*T, D]: [B*T] int32."""
        state = self.state
        if state.unpack is not None:
            assert state.tokens is not None
            return state.unpack(state.tokens).flatten() ^ self.salt
        assert state.rows is not None
        places, num_rows = x.flatten(0, -2).shape[0], len(state.rows)
        assert places % num_rows == 0, (
            f"{self.name}: {tuple(x.shape)} does not hold {num_rows} whole rows"
        )
        return state.seeds(places // num_rows).flatten() ^ self.salt


def replace_dropouts(model: nn.Module, state: DropoutState) -> None:
    """Put a SlotDropout in the place of every nn.Dropout of `model`."""
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, SlotDropout(child.p, f"{path}.{name}", state))


def _int32(seed: int) -> int:
    return (seed & 0xFFFFFFFF) - 2**31
