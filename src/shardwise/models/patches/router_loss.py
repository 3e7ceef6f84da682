"""The load-balancing loss of a part's mixtures of experts: see models/router_loss.py."""

import torch

from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.router_loss import RouterLoss, routers_of


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let a part compute its routers' share of the loss, by `model.router_aux_loss_coef`."""
    coefficient = cfg.model.router_aux_loss_coef
    if coefficient:
        routers = routers_of(part.hf, part.family)
        mixtures = [b.kind for layer in part.spec.layers for b in layer.blocks if b.kind.experts]
        is_sharded = any(kind.split is not None for kind in mixtures)
        share = 1 / cfg.parallel.tp if is_sharded else 1.0
        part.router_loss = RouterLoss(routers, coefficient, part.num_routers, gradient_share=share)
