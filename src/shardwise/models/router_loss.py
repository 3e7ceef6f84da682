"""The load-balancing loss of mixtures of experts, as a sum over rows, layers and stages."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shardwise.base.batches import IGNORED, Batch
from shardwise.models.families import Family


def routers_of(hf: PreTrainedModel, family: Family) -> list[nn.Module]:
    """Return the routers of a model that are trained with a load-balancing loss."""
    return [
        module
        for name, module in hf.named_modules()
        # What a copy in `modules_to_save` replaces is never called.
        if type(module).__name__ == family.router and ".original_module" not in name
    ]


class RouterLoss:
    """The load-balancing loss (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6), as a sum over rows.

    For layer l and row b with n_b target tokens: E * sum_e f_e P_e, where f_e is the number of the
    row's target tokens times choices routed to expert e, over n_b, and P_e the mean router
    probability over those tokens. The loss is the sum over rows and layers of n_b times that, times
    coefficient / number of layers. Divided by the global number of target tokens it is the same for
    every split of rows over ranks and micro-batches. Where a row's tokens lie on several ranks, f_e
    and n_b are of all of them, and each rank has a partial sum of P_e. transformers pools the
    tokens of all rows and layers before it multiplies f_e by P_e, and that product depends on which
    rows share a forward.
    """

    def __init__(
        self,
        routers: list[nn.Module],
        coefficient: float,
        num_layers: int,
        gradient_share: float = 1.0,
    ) -> None:
        """Hook the routers of a model or stage; `num_layers`: all mixtures of the whole model.

        `gradient_share`: what this rank's backward gives of the loss's gradient. Every rank of `tp`
        computes the loss. Where mixtures are sharded, it adds up what reaches routers and hidden
        states; a mixture that is whole on every rank gives all of it on each.
        """
        self.weight = coefficient / num_layers
        self.routers = routers
        self.gradient_share = gradient_share
        self.factor = 1.0
        """Number that the sum is multiplied by: 1 where it is divided by that of target tokens."""
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_in_forward = False
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, router: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, chosen = output  # [B*T, E], _, [B*T, top_k]
        if self.is_in_forward:
            self.outputs.append((logits, chosen))

    def start(self) -> None:
        """Begin a forward. What a backward computes again is not recorded.

        It would keep all that was recomputed in memory until the next forward.
        """
        self.outputs = []
        self.is_in_forward = True

    def weigh(self, factor: float) -> None:
        """Multiply the next sums by `factor`, where they are not divided by target tokens."""
        self.factor = factor

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the summed loss of the forward just done (scalar, float32)."""
        outputs, self.outputs = self.outputs, []
        self.is_in_forward = False
        assert len(outputs) == len(self.routers)
        targets = (batch.labels != IGNORED).float()  # [B, T]
        tokens = _of_rows(batch, targets.sum(dim=1, keepdim=True))  # [B, 1]
        divisor = tokens.clamp(min=1)  # rows without a target weigh nothing
        total = torch.zeros((), device=targets.device)
        for logits, chosen in outputs:
            num_experts = logits.shape[-1]
            probabilities = F.softmax(logits.float(), dim=-1).view(*targets.shape, num_experts)
            # Not one_hot: it makes 64 bits for each choice, and on a CPU reads the choices first.
            routed = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, 1.0)
            routed = routed.view(*targets.shape, num_experts)
            # Both are [B, E].
            share = _of_rows(batch, torch.einsum("bte,bt->be", routed, targets)) / divisor
            mean_probability = torch.einsum("bte,bt->be", probabilities, targets) / divisor
            total = total + num_experts * (tokens * share * mean_probability).sum()
        total = total * (self.weight * self.factor)
        if self.gradient_share == 1.0:
            return total
        return total.detach().lerp(total, self.gradient_share)


def _of_rows(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Return sums [B, ...] over complete rows, of sums over this rank's tokens."""
    return x if batch.neighbours is None else batch.neighbours.total(x)
