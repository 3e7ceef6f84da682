"""The module that a strategy splits: a transformers model that takes a Batch and returns its summed loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import IGNORED, Batch, Part
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.models.attention import use_kernel
from shardwise.models.dropout import DropoutState, replace_dropouts
from shardwise.models.families import FAMILIES, Family
from shardwise.models.isolation import isolate, with_documents
from shardwise.models.spec import ModelSpec

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


class CausalLM(Part):
    """Batch in, loss out: embedding and head are never used outside (fsdp, pipelines)."""

    def __init__(self, hf: PreTrainedModel, spec: ModelSpec, family: Family, cfg: RunConfig) -> None:
        super().__init__()
        # Drawn inside the fused attention from torch's global generator: no seed of ours reaches it. What a family that
        # is not listed calls dropout may be such a function too, rather than a module.
        keys = _ATTENTION_DROPOUTS if family.model_type in FAMILIES else [k for k in hf.config.to_dict() if "drop" in k]
        for key in keys:
            if getattr(hf.config, key, 0):
                raise UserError(
                    f"{key} is {getattr(hf.config, key)} in the model's config.json; set it to 0.0: "
                    "its masks would differ between layouts and between runs"
                )
        self.hf = hf
        self.spec = spec
        self.autocast_dtype = None if cfg.training.precision == "float32" else getattr(torch, cfg.training.precision)
        self.dropout = DropoutState(cfg.training.seed)
        replace_dropouts(hf, self.dropout)
        use_kernel(hf, spec, cfg.model.sdpa_backend)
        self.isolated = cfg.data.packing == "isolated"
        if self.isolated:
            isolate(hf, spec, family, self.dropout)
        self.router_loss = _router_loss(hf, family, cfg.model.router_aux_loss_coef)
        # What a family that is not known does to its logits is not known either.
        self.chunked_loss = cfg.training.loss == "chunked" and family.model_type in FAMILIES
        if self.chunked_loss:
            _give_loss(hf.get_submodule(spec.head), *_scale_and_softcap(hf.config, family))

    def forward(self, batch: Batch, return_logits: bool = False) -> torch.Tensor:
        """The loss summed over target tokens (scalar, float32), in training plus the router loss; or logits [B, T, V].

        Sums, not means: what is added up over micro-batches and ranks is divided once, by the global number of targets.
        """
        self.dropout.batch = with_documents(batch) if self.isolated else batch
        if self.router_loss is not None:
            self.router_loss.start()
        device = batch.input_ids.device.type
        inputs = {"input_ids": batch.input_ids, "use_cache": False}
        with torch.autocast(device, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            if self.chunked_loss and not return_logits:
                hidden = self.hf.base_model(**inputs).last_hidden_state  # [B, T, D]
                # Through the module, never by its weight: what PEFT and fsdp2 do to the head, they do in its call.
                loss = self.hf.get_submodule(self.spec.head)(hidden, labels=batch.labels)
            else:
                logits = self.hf(**inputs).logits  # [B, T, V]
                if return_logits:
                    return logits
                logits, labels = logits.flatten(0, 1).float(), batch.labels.flatten()
                loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.training and self.router_loss is not None:
            loss = loss + self.router_loss(batch)
        return loss


def _give_loss(head: nn.Module, scale: float, softcap: float | None) -> None:
    """Let the linear of a head, or both copies that PEFT's `modules_to_save` holds, take labels and return the loss."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.forward = _logits_or_loss(module, scale, softcap)


def _logits_or_loss(linear: nn.Linear, scale: float, softcap: float | None) -> Callable[..., torch.Tensor]:
    logits = linear.forward

    def forward(hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return logits(hidden)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            linear.weight,
            labels.flatten(),
            bias=linear.bias,
            scale=scale,
            softcap=softcap,
            ignore_index=IGNORED,
        )

    return forward


def _scale_and_softcap(config: PretrainedConfig, family: Family) -> tuple[float, float | None]:
    """What transformers' model does to its head's output before the loss."""
    scale = 1.0
    if family.logits_multiplied_by is not None:
        scale *= getattr(config, family.logits_multiplied_by)
    if family.logits_divided_by is not None:
        scale /= getattr(config, family.logits_divided_by)
    return scale, None if family.logits_capped_by is None else getattr(config, family.logits_capped_by)


class RouterLoss:
    """Load-balancing loss of mixture-of-experts layers (Fedus et al. 2021, eq. 4-6), in a form that adds up.

    For layer l and row b with n_b target tokens: E * sum_e f_e P_e, where f_e is the number of the row's target tokens
    times choices routed to expert e, over n_b, and P_e the mean router probability over those tokens. The loss is the
    sum over rows and layers of n_b times that, times coefficient / number of layers. Divided by the global number of
    target tokens it is the same for every split of rows over ranks and micro-batches. transformers pools the tokens of
    all rows and layers before it multiplies f_e by P_e, and that product depends on which rows share a forward.
    """

    def __init__(self, routers: list[nn.Module], coefficient: float) -> None:
        self.coefficient = coefficient
        self.num_layers = len(routers)
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
        assert len(outputs) == self.num_layers
        targets = (batch.labels != IGNORED).float()  # [B, T]
        tokens = targets.sum(dim=1, keepdim=True)  # [B, 1]
        total = torch.zeros((), device=targets.device)
        for logits, chosen in outputs:
            num_experts = logits.shape[-1]
            probabilities = F.softmax(logits.float(), dim=-1).view(*targets.shape, num_experts)
            routed = F.one_hot(chosen, num_experts).sum(dim=1).view(*targets.shape, num_experts)
            # Both [B, E]; rows without a target weigh nothing, the clamp only keeps 0/0 away.
            share = torch.einsum("bte,bt->be", routed.float(), targets) / tokens.clamp(min=1)
            mean_probability = torch.einsum("bte,bt->be", probabilities, targets) / tokens.clamp(min=1)
            total = total + num_experts * (tokens * share * mean_probability).sum()
        return total * self.coefficient / self.num_layers


def _router_loss(hf: PreTrainedModel, family: Family, coefficient: float) -> RouterLoss | None:
    if coefficient == 0.0:
        return None
    # Not what a copy in `modules_to_save` stands for: that is never called.
    named = ((name, m) for name, m in hf.named_modules() if ".original_module" not in name)
    routers = [m for _, m in named if type(m).__name__ == family.router]
    if not routers:
        raise UserError(
            f"model.router_aux_loss_coef is {coefficient}, but {hf.config.model_type} has no router that takes a "
            "load-balancing loss here; leave it at 0"
        )
    return RouterLoss(routers, coefficient)
