"""Dropout whose masks are a function of (seed, step, slot, module), so that they do not depend on the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.interfaces import Batch


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text, equal on every machine (`hash` is not)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass
class DropoutState:
    """What the masks depend on; one object is shared by all dropouts of a model."""

    seed: int
    batch: Batch | None = None  # whose rows are being computed; set by the model's forward
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None
    """In a mixer that sees one document per row: from [B, T, ...] to those rows (see models/isolation.py)."""


class SlotDropout(nn.Module):
    """Dropout of probability `p` on [B, ...] or [B*T, ...]: the mask of row b depends on its slot, not on its place."""

    def __init__(self, p: float, name: str, state: DropoutState) -> None:
        super().__init__()
        self.p, self.name, self.state = p, name, state
        self.num_features: int | None = None  # the size of the last dim of which x, and so the mask, is a share
        self.share: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero a share `p` of x and scale the rest by 1 / (1 - p); in eval mode, x itself."""
        if not self.training or self.p == 0.0:
            return x
        batch = self.state.batch
        assert batch is not None
        rows = len(batch.slots)
        unpack = self.state.unpack
        shape = x.shape if self.num_features is None else (*x.shape[:-1], self.num_features)
        packed = shape if unpack is None else (*batch.input_ids.shape, *shape[2:])
        assert packed[0] % rows == 0, f"{self.name}: {tuple(packed)} does not hold {rows} whole rows"
        keep = torch.empty((rows, math.prod(packed) // rows), device=x.device, dtype=torch.float32)
        generator = torch.Generator(device=x.device)
        for row, slot in enumerate(batch.slots):
            generator.manual_seed(stable_seed(self.state.seed, batch.step, slot, self.name))
            keep[row].uniform_(generator=generator)
        mask = ((keep >= self.p).to(x.dtype) / (1.0 - self.p)).view(packed)
        return x * self.share(mask if unpack is None else unpack(mask))


def replace_dropouts(model: nn.Module, state: DropoutState) -> None:
    """Put a SlotDropout in the place of every nn.Dropout of `model`."""
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, SlotDropout(child.p, f"{path}.{name}", state))
