"""The base of an axis in the planner: what its ranks send, and roughly how long that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.models.counts import Unit
from shardwise.models.spec import LayerSpec
from shardwise.parallel.sent import Messages
from shardwise.parallel.weights import Weight

if TYPE_CHECKING:
    from shardwise.lab.planner.divisions import Division
    from shardwise.lab.planner.estimate import Estimates
    from shardwise.lab.planner.messages import Step


class AxisMessages:
    """An axis of the ranks that hold a model together."""

    name: str = ""
    """Key of the axis in the section `parallel`."""
    has_names: bool = False
    """Whether `parts` have names of the layer, so that layers that are alike have other ones."""

    @staticmethod
    def parts(
        cfg: RunConfig, run: Description, layer: LayerSpec, unit: Unit, weights: Sequence[Weight]
    ) -> Iterator[Any]:
        """Yield what of a layer makes a rank send; `weights` are those of the layer on it."""
        yield from ()

    def messages(self, step: Step) -> Iterator[Messages]:
        """Yield what a rank sends in a step."""
        raise NotImplementedError

    def seconds(self, estimates: Estimates, division: Division, is_again: bool) -> float:
        """Return roughly how long its messages for a row take; `is_again`: some are sent twice."""
        return 0.0
