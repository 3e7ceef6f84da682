"""How evenly routers give tokens to experts, what experts drop, and biases that even it out.

A bias on a router's scores changes which experts are chosen, not how their outputs are weighed.
After each step it grows by `model.router_bias_rate` where an expert got fewer tokens than the mean
of its layer, and falls by as much where it got more. Tokens are those of documents, not of padding.
Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.expert_plan import biases_of, experts_by_layer
from shardwise.models.names import hf_name
from shardwise.models.spec import ModelSpec
from shardwise.parallel.reduce import sum_over

STATISTICS = ("router_max_over_mean", "router_entropy", "router_dropped", "router_dropped_most")
"""Keys of each line of `metrics.jsonl`: the busiest expert's tokens over the mean, in the layer
where that is most; the mean entropy of layers' loads over that of equal loads; and the share of
tokens that `model.expert_capacity` dropped, of all layers and of the one where that is most."""


@dataclass(frozen=True)
class Routing:
    """The layers with routed experts of the whole model, and what they were given."""

    paths: tuple[str, ...]
    """Paths of their experts in the transformers model."""
    num_experts: torch.Tensor
    """Experts of each, [L]."""
    given: torch.Tensor
    """The share of its tokens that each expert was given in the step just done, [L, E], on this
    rank's device; layers with fewer experts than E have zeros behind their own."""
    dropped: torch.Tensor
    """The share of its tokens that each layer then dropped, [L]."""
    total: torch.Tensor
    """The sums of `given` and, behind it, `dropped` over the steps since the start or a resume,
    [L, E + 1]."""
    bias_rate: float
    """`model.router_bias_rate`."""

    @classmethod
    def of(
        cls, hf: nn.Module, spec: ModelSpec, device: torch.device, bias_rate: float
    ) -> "Routing | None":
        """Return the routing of a whole model on meta; None where it has no experts."""
        sizes = experts_by_layer(hf, spec)
        if not sizes:
            return None
        given = torch.zeros(len(sizes), max(sizes.values()), device=device)
        numbers = torch.tensor([*sizes.values()], device=device)
        dropped, total = given.new_zeros(len(sizes)), F.pad(given, (0, 1))
        return cls((*sizes,), numbers, given, dropped, total, bias_rate)

    def take(self, pm: ParallelModel, mesh: Mesh) -> None:
        """Set the shares of the step just done, of all ranks: 4 L (E + 1) bytes are summed."""
        counts = torch.zeros_like(self.total)
        for part in pm.parts:
            assert isinstance(part, CausalLM)
            for path, routed in part.experts.items():
                # A layer that its backward computes again counts twice, which changes no share.
                if (layer_counts := routed.take_counts()) is not None:
                    row = counts[self.paths.index(path)]
                    row[: len(layer_counts) - 1], row[-1] = layer_counts[:-1], layer_counts[-1]
        sum_over(counts, mesh, ("pp", *mesh.gradient_axes))
        shares = counts / counts[:, :-1].sum(1, keepdim=True).clamp(min=1)
        self.given.copy_(shares[:, :-1])
        self.dropped.copy_(shares[:, -1])
        self.total.add_(shares)

    def largest_over_mean(self, share: torch.Tensor) -> torch.Tensor:
        """Return for each layer how many times the mean the busiest expert got, [L]."""
        return share.amax(1) * self.num_experts

    def entropy(self, share: torch.Tensor) -> torch.Tensor:
        """Return for each layer the entropy of the shares over that of equal ones, [L]."""
        return torch.special.entr(share).sum(1) / self.num_experts.log().clamp(min=1e-9)

    def statistics(self) -> torch.Tensor:
        """Return STATISTICS of the step just done, [4]."""
        largest, entropy = self.largest_over_mean(self.given), self.entropy(self.given)
        dropped = self.dropped.mean(), self.dropped.amax()
        return torch.stack([largest.amax(), entropy.mean(), *dropped])

    def balance(self, pm: ParallelModel) -> None:
        """Change the biases of this rank's routers by the shares of the step just done."""
        for part in pm.parts if self.bias_rate else ():
            assert isinstance(part, CausalLM)
            for path, bias in biases_of(part.hf, part.spec):
                share = self.given[self.paths.index(hf_name(path)), : len(bias)]
                bias.add_(self.bias_rate * (1 / len(bias) - share).sign())

    def shares(self) -> list[list[float]]:
        """Return the share that each expert was given in the step just done, by layer, rounded.

        The host waits for them.
        """
        return [[float(f"{share:.4g}") for share in layer] for layer in self._by_layer(self.given)]

    def _by_layer(self, share: torch.Tensor) -> list[list[float]]:
        sizes = self.num_experts.tolist()
        return [row[:size] for row, size in zip(share.tolist(), sizes, strict=True)]

    def summary(self) -> dict[str, list]:
        """Return plain data for the record: of the steps in `total`, by layer."""
        num_steps = self.total[:, :-1].sum(1, keepdim=True).clamp(min=1e-30)
        share, dropped = (self.total / num_steps).tensor_split([-1], dim=1)
        return {
            "layers": [*self.paths],
            "max_over_mean": self.largest_over_mean(share).tolist(),
            "entropy": self.entropy(share).tolist(),
            "dropped": dropped.flatten().tolist(),
            "share": self._by_layer(share),
        }
