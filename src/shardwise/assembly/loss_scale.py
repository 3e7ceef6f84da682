"""Loss scaling: float16 gradients below 6e-8 would be 0, so the loss is multiplied before the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, give the method; these are torch.amp.GradScaler's.
INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps in a row without an overflow after which the scale is doubled."""


@dataclass
class LossScale:
    """The factor of the loss; powers of two, so that to divide it out again rounds nothing.

    Equal on every rank, since it follows the global gradient norm: no rank decides by what it alone sees.
    """

    dynamic: bool = False
    scale: float = 1.0
    good_steps: int = 0  # since the last overflow or growth

    @classmethod
    def of(cls, precision: str) -> LossScale:
        """For `training.precision`: dynamic in float16, and 1 throughout in others, whose range needs no help."""
        return cls(dynamic=True, scale=INITIAL_SCALE) if precision == "float16" else cls()

    def update(self, finite: bool) -> bool:
        """After a step whose gradients were all `finite` or not; whether training can go on.

        An overflow halves the scale and its step must be skipped. Below a scale of 1 nothing is left to lower.
        """
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            return self.dynamic and self.scale >= 1.0
        self.good_steps += 1
        if self.dynamic and self.good_steps == GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Resume from what `state_dict` returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
