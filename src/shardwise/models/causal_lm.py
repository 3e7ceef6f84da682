"""The module that a strategy splits: a transformers model that takes a Batch and returns its summed loss."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.interfaces import IGNORED, Batch, Part
from shardwise.kernels.lora_linear import BackwardHalf
from shardwise.models.dtypes import autocast_dtype
from shardwise.models.families import Family
from shardwise.models.patches.dropout import DropoutState
from shardwise.models.patches.isolation import with_documents
from shardwise.models.patches.router_loss import RouterLoss, routers_of
from shardwise.models.spec import ModelSpec

Inputs = dict[str, torch.Tensor]
"""`input_ids` [B, T], or `inputs_embeds` [B, T, D] in their place: what transformers' models take."""


class CausalLM(Part):
    """A model that takes a Batch and returns its summed loss, or a pipeline stage of one.

    What `models/patches` changes in it is done after it is made. Embedding and head are never used outside (fsdp,
    pipelines).
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        spec: ModelSpec,
        family: Family,
        cfg: RunConfig,
        whole: PreTrainedModel | None = None,
    ) -> None:
        """`whole`: the model that `hf` is a stage of."""
        super().__init__()
        self.hf = hf
        self.spec = spec
        self.family = family
        self.autocast_dtype = autocast_dtype(cfg.training.precision)
        self.backward_half = (
            BackwardHalf()
        )  # read by the LoRA linears, set by a pipeline that halves backwards
        self.dropout = DropoutState(cfg.training.seed)
        self.num_routers = len(routers_of(whole or hf, family))
        """Of the whole model: a stage adds its routers' share of the router loss."""
        self.isolated = False
        self.router_loss: RouterLoss | None = None
        self.loss_in_head = False

    def forward(self, batch: Batch, return_logits: bool = False) -> torch.Tensor:
        """The loss summed over target tokens (scalar, float32), in training plus the router loss; or logits [B, T, V].

        Sums, not means: what is added up over micro-batches and ranks is divided once, by the global number of targets.
        """
        inputs = {"input_ids": batch.input_ids}
        return self.logits_of(batch, inputs) if return_logits else self.loss_of(batch, inputs)

    def hidden_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Hidden states [B, T, D] that the transformers model's base gives for the micro-batch `batch`."""
        with self._computing(batch):
            inputs = inputs | _positions(batch)
            return self.hf.base_model(**inputs, use_cache=False).last_hidden_state

    def logits_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Logits [B, T, V]."""
        with self._computing(batch):
            return self.hf(**(inputs | _positions(batch)), use_cache=False).logits

    def loss_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """The summed loss, in training plus the router loss (scalar, float32)."""
        if self.loss_in_head:
            hidden = self.hidden_of(batch, inputs)
            with self._autocast(batch):
                # Through the module, never by its weight: what PEFT and fsdp2 do to the head, they do in its call.
                loss = self.hf.get_submodule(self.spec.head)(hidden, labels=batch.labels)
        else:
            logits = self.logits_of(batch, inputs).flatten(0, 1).float()
            loss = F.cross_entropy(
                logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
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
        return torch.autocast(
            device, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None
        )


def _positions(batch: Batch) -> Inputs:
    """Return the positions of tokens where a rank has only some tokens of its rows.

    Complete rows have those that the model makes by itself: given ones would make transformers look
    for packed documents in them, and use slower masks.
    """
    return {} if batch.positions is None else {"position_ids": batch.positions}
