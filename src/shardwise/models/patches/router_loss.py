"""The load-balancing loss of mixture-of-experts layers, in a form that adds up over rows, layers and stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.interfaces import IGNORED, Batch
from shardwise.models.families import Family

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM


def routers_of(hf: PreTrainedModel, family: Family) -> list[nn.Module]:
    """Return the routers of a model that are trained with a load-balancing loss."""
    # Not what a copy in `modules_to_save` replaces: that is never called.
    named = (
        (name, module) for name, module in hf.named_modules() if ".original_module" not in name
    )
    return [module for _, module in named if type(module).__name__ == family.router]


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let a part compute its routers' share of the load-balancing loss, with `model.router_aux_loss_coef`."""
    coefficient = cfg.model.router_aux_loss_coef
    if coefficient:
        part.router_loss = RouterLoss(
            routers_of(part.hf, part.family), coefficient, part.num_routers
        )


class RouterLoss:
    """Load-balancing loss of mixture-of-experts layers (Fedus et al. 2021, eq. 4-6), in a form that adds up.

    For layer l and row b with n_b target tokens: E * sum_e f_e P_e, where f_e is the number of the row's target tokens
    times choices routed to expert e, over n_b, and P_e the mean router probability over those tokens. The loss is the
    sum over rows and layers of n_b times that, times coefficient / number of layers. Divided by the global number of
    target tokens it is the same for every split of rows over ranks and micro-batches. transformers pools the tokens of
    all rows and layers before it multiplies f_e by P_e, and that product depends on which rows share a forward.
    """

    def __init__(self, routers: list[nn.Module], coefficient: float, num_layers: int) -> None:
        self.weight = (
            coefficient / num_layers
        )  # of the whole model, of which these may be a stage's
        self.routers = routers
        self.gradient_share = 1.0  # of the loss, that this rank's backward is to give
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, router: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, chosen = output  # [B*T, E], _, [B*T, top_k]
        self.outputs.append((logits, chosen))

    def start(self) -> None:
        """Forget what was recorded: under activation checkpointing the backward before has run every layer again."""
        self.outputs = []

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The summed loss of the forward just done (scalar, float32)."""
        outputs, self.outputs = self.outputs, []
        assert len(outputs) == len(self.routers)
        targets = (batch.labels != IGNORED).float()  # [B, T]
        tokens = targets.sum(dim=1, keepdim=True)  # [B, 1]
        total = torch.zeros((), device=targets.device)
        for logits, chosen in outputs:
            num_experts = logits.shape[-1]
            probabilities = F.softmax(logits.float(), dim=-1).view(*targets.shape, num_experts)
            routed = F.one_hot(chosen, num_experts).sum(dim=1).view(*targets.shape, num_experts)
            # Both [B, E]; rows without a target weigh nothing, the clamp only keeps 0/0 away.
            share = torch.einsum("bte,bt->be", routed.float(), targets) / tokens.clamp(min=1)
            mean_probability = torch.einsum("bte,bt->be", probabilities, targets) / tokens.clamp(
                min=1
            )
            total = total + num_experts * (tokens * share * mean_probability).sum()
        total = total * self.weight
        return (
            total if self.gradient_share == 1.0 else total.detach().lerp(total, self.gradient_share)
        )
