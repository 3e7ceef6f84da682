"""Loss scaling: the loss is multiplied before the backward, or float16 gradients below 6e-8 are 0.

Method: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740. The numbers are those of
torch.amp.GradScaler.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps in a row without an overflow after which the scale is doubled."""


@dataclass
class LossScale:
    """The factor of the loss: a power of two, so that to divide it out again rounds nothing.

    It is equal on every rank, since it follows the global gradient norm.
    """

    dynamic: bool = False
    scale: float = 1.0
    good_steps: int = 0  # since the last overflow or growth

    @classmethod
    def of(cls, precision: str) -> "LossScale":
        """Return the scale for `training.precision`: dynamic in float16, otherwise always 1."""
        return cls(dynamic=True, scale=INITIAL_SCALE) if precision == "float16" else cls()

    def update(self, finite: bool) -> bool:
        """Update the scale after a step, and return whether training can continue.

        `finite`: whether all gradients were. An overflow halves the scale, and its step must be
        skipped. A scale below 1 is of no use.
        """
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            return self.dynamic and self.scale >= 1.0
        self.good_steps += 1
        if self.dynamic and self.good_steps == GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Resume from what `state_dict` has returned."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
