"""The module that a strategy splits: a transformers model that takes a Batch and returns its summed loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.config import RunConfig, UserError, require
from shardwise.interfaces import IGNORED, Batch, Part
from shardwise.kernels.linear_cross_entropy import Kernel, kernel_of, linear_cross_entropy
from shardwise.kernels.lora_linear import BackwardHalf
from shardwise.kernels.triton_support import why_not
from shardwise.models import isolation
from shardwise.models.attention import use_kernel
from shardwise.models.dropout import DropoutState, replace_dropouts
from shardwise.models.experts import choose_product
from shardwise.models.families import FAMILIES, Family
from shardwise.models.forget_gate import use_finite_gates
from shardwise.models.isolation import isolate, with_documents
from shardwise.models.router_loss import RouterLoss
from shardwise.models.spec import ModelSpec

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")

KERNELS: dict[str, Kernel] = {"auto": "auto", "chunked": "torch", "triton": "triton"}
"""By `training.loss`."""

Inputs = dict[str, torch.Tensor]
"""`input_ids` [B, T], or `inputs_embeds` [B, T, D] in their place: what transformers' models take."""


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of matrix products by `training.precision`; None: that of what is multiplied."""
    return None if precision == "float32" else getattr(torch, precision)


def loss_of_run(cfg: RunConfig, family: Family, device: torch.device) -> str:
    """What `training.loss` comes to: chunked, triton or plain. UserError if what it asks for cannot be had."""
    asked, known = cfg.training.loss, family.model_type in FAMILIES
    if asked == "plain" or (asked == "auto" and not known):
        return "plain"
    who = f"{family.model_type}, which is not listed,"
    require(known, f"training.loss is {asked}, but what {who} does to its logits is not known; use auto or plain")
    reason = why_not(device)
    if asked == "triton" and reason is not None:
        raise UserError(f"training.loss is triton, but {reason}; use auto or chunked")
    return "triton" if kernel_of(KERNELS[asked], device) == "triton" else "chunked"


def check(hf: PreTrainedModel, spec: ModelSpec, family: Family, cfg: RunConfig) -> None:
    """Refuse a whole model whose masks, documents or router loss would not be what the run asks for."""
    # Drawn inside the fused attention from torch's global generator: no seed of ours reaches it. What a family that
    # is not listed calls dropout may be such a function too, rather than a module.
    keys = _ATTENTION_DROPOUTS if family.model_type in FAMILIES else [k for k in hf.config.to_dict() if "drop" in k]
    for key in keys:
        if getattr(hf.config, key, 0):
            raise UserError(
                f"{key} is {getattr(hf.config, key)} in the model's config.json; set it to 0.0: "
                "its masks would differ between layouts and between runs"
            )
    if cfg.data.packing == "isolated":
        isolation.check(spec, family)
    coefficient = cfg.model.router_aux_loss_coef
    if coefficient and not _routers(hf, family):
        raise UserError(
            f"model.router_aux_loss_coef is {coefficient}, but {family.model_type} has no router that takes a "
            "load-balancing loss here; leave it at 0"
        )


class CausalLM(Part):
    """Batch in, loss out, of a model that has passed `check`.

    Embedding and head are never used outside (fsdp, pipelines).
    """

    def __init__(
        self, hf: PreTrainedModel, spec: ModelSpec, family: Family, cfg: RunConfig, whole: PreTrainedModel | None = None
    ) -> None:
        """`whole`: the model that `hf` is a stage of."""
        super().__init__()
        self.hf = hf
        self.spec = spec
        self.autocast_dtype = autocast_dtype(cfg.training.precision)
        self.backward_half = BackwardHalf()  # read by the LoRA linears, set by a pipeline that halves backwards
        self.dropout = DropoutState(cfg.training.seed)
        replace_dropouts(hf, self.dropout)
        use_kernel(hf, spec, cfg.model.sdpa_backend)
        choose_product(hf, spec, family, cfg)
        use_finite_gates(hf)
        self.isolated = cfg.data.packing == "isolated"
        if self.isolated:
            isolate(hf, spec, family, self.dropout)
        self.router_loss = _router_loss(hf, whole or hf, family, cfg.model.router_aux_loss_coef)
        # What a family that is not known does to its logits is not known either.
        self.chunked_loss = cfg.training.loss != "plain" and family.model_type in FAMILIES
        if self.chunked_loss and spec.last:
            _give_loss(hf.get_submodule(spec.head), *_scale_and_softcap(hf.config, family), KERNELS[cfg.training.loss])

    def forward(self, batch: Batch, return_logits: bool = False) -> torch.Tensor:
        """The loss summed over target tokens (scalar, float32), in training plus the router loss; or logits [B, T, V].

        Sums, not means: what is added up over micro-batches and ranks is divided once, by the global number of targets.
        """
        inputs = {"input_ids": batch.input_ids}
        return self.logits_of(batch, inputs) if return_logits else self.loss_of(batch, inputs)

    def hidden_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Hidden states [B, T, D] that the transformers model's base gives for the micro-batch `batch`."""
        with self._computing(batch):
            return self.hf.base_model(**inputs, use_cache=False).last_hidden_state

    def logits_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Logits [B, T, V]."""
        with self._computing(batch):
            return self.hf(**inputs, use_cache=False).logits

    def loss_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """The summed loss, in training plus the router loss (scalar, float32)."""
        if self.chunked_loss:
            hidden = self.hidden_of(batch, inputs)
            with self._autocast(batch):
                # Through the module, never by its weight: what PEFT and fsdp2 do to the head, they do in its call.
                loss = self.hf.get_submodule(self.spec.head)(hidden, labels=batch.labels)
        else:
            logits = self.logits_of(batch, inputs).flatten(0, 1).float()
            loss = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.training and self.router_loss is not None:
            loss = loss + self.router_loss(batch)
        return loss

    def _computing(self, batch: Batch) -> torch.autocast:
        """Where one forward of `batch` is computed."""
        self.dropout.start(with_documents(batch) if self.isolated else batch)
        if self.router_loss is not None:
            self.router_loss.start()
        return self._autocast(batch)

    def _autocast(self, batch: Batch) -> torch.autocast:
        device = batch.input_ids.device.type
        return torch.autocast(device, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)


def _give_loss(head: nn.Module, scale: float, softcap: float | None, kernel: Kernel) -> None:
    """Let the linear of a head, or both copies that PEFT's `modules_to_save` holds, take labels and return the loss."""
    linears: list[Any] = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        module.vocabulary = None  # which rows of the weight this rank has, if others have the others
        module.forward = _logits_or_loss(module, scale, softcap, kernel)


def _logits_or_loss(linear: Any, scale: float, softcap: float | None, kernel: Kernel) -> Callable[..., torch.Tensor]:
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
            vocabulary=linear.vocabulary,
            kernel=kernel,
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


def _router_loss(hf: PreTrainedModel, whole: PreTrainedModel, family: Family, coefficient: float) -> RouterLoss | None:
    if coefficient == 0.0:
        return None
    return RouterLoss(_routers(hf, family), coefficient, num_layers=len(_routers(whole, family)))


def _routers(hf: PreTrainedModel, family: Family) -> list[nn.Module]:
    # Not what a copy in `modules_to_save` stands for: that is never called.
    named = ((name, m) for name, m in hf.named_modules() if ".original_module" not in name)
    return [m for _, m in named if type(m).__name__ == family.router]
