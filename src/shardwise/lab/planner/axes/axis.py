"""The base of an axis in the planner: what its ranks send, and roughly how long that takes."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.lab.planner.cluster import Cluster, Link
from shardwise.lab.planner.divisions import Division
from shardwise.lab.planner.messages import Step
from shardwise.models.counts import Unit
from shardwise.models.spec import LayerSpec
from shardwise.parallel.sent import Messages
from shardwise.parallel.weights import Weight


class Traffic:
    """Bytes of a row that layers have for other ranks, and the links that these go over."""

    cluster: Cluster
    num_layers: int
    hidden_bytes: float
    """Bytes of the hidden states of a row."""
    output_bytes: float
    """Bytes of a block's output for a row."""
    routed_bytes: float
    """Bytes that go to the experts of a row's tokens and come back."""

    def ring(self, num_ranks: int, inside: int = 1) -> Link:
        """Return the slowest link of a ring of ranks, each with so many neighbours inside it.

        Between nodes it goes through the ports of all its ranks in a node.
        """
        per_node = self.cluster.per_node
        return self.cluster.link_of(num_ranks * inside, max(1, per_node // inside))


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

    def seconds(self, traffic: Traffic, division: Division, is_again: bool) -> float:
        """Return roughly how long its messages for a row take; `is_again`: some are sent twice."""
        return 0.0
