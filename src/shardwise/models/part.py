"""The parts of a model that strategies split: what they know of each, wherever it comes from."""

from collections.abc import Sequence

import torch

from shardwise.base.batches import AnyBatch, Batch
from shardwise.base.interfaces import Part
from shardwise.config import RunConfig
from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.recurrence import Tokens
from shardwise.models.dtypes import autocast_dtype
from shardwise.models.router_loss import RouterLoss
from shardwise.models.slot_dropout import DropoutState
from shardwise.models.spec import ModelSpec


class ModelPart(Part):
    """A part whose layers are known by their paths in `hf`."""

    router_loss: RouterLoss | None = None
    offloaded_bytes: int = 0
    """Activations that this rank has moved to the CPU so far."""

    def __init__(self, spec: ModelSpec, cfg: RunConfig) -> None:
        """Take the paths of the modules; of the run, its dtypes and its seed."""
        super().__init__()
        self.spec = spec
        self.autocast_dtype = autocast_dtype(cfg)
        self.dropout = DropoutState(cfg.training.seed)
        self.isolated = False
        # A pipeline that halves backwards sets it, and the LoRA linears read it.
        self.backward_half = BackwardHalf()

    def tokens(self) -> Tokens:
        """Return what cores need of the micro-batch that is being computed, or recomputed."""
        batch = self.dropout.batch
        if not isinstance(batch, Batch):
            return Tokens()
        return Tokens(batch.document_ids if self.isolated else None, batch.neighbours)

    def rows_or_documents(self) -> torch.Tensor | None:
        """Return [B, T] of the micro-batch that is being computed: the documents of its tokens
        where they are isolated, and equal numbers in a row where they are not; -1 for padding.

        None where the model is called with something else.
        """
        batch = self.dropout.batch
        if not isinstance(batch, Batch):
            return None
        return batch.document_ids if self.isolated else batch.document_ids.clamp(max=0)

    def autocast(self, batch: AnyBatch) -> torch.autocast:
        """Return the context in which matrix products have the dtype of `training.precision`."""
        is_enabled = self.autocast_dtype is not None
        return torch.autocast(batch.device.type, dtype=self.autocast_dtype, enabled=is_enabled)


class StagePart(ModelPart):
    """A stage of a pipeline: it takes (hidden states, number of a micro-batch)."""

    microbatches: Sequence[AnyBatch] = ()
    """Micro-batches of the step, set before it."""
    loss_scale: float = 1.0
    """The gradient of the loss in this step's backward, set before it."""
    router_total: torch.Tensor = torch.zeros(())
    """The router loss since it was reset, except what is in the loss of the last stage."""

    def passed_on(self, batch: AnyBatch) -> torch.Tensor:
        """Return a tensor on meta like what a stage passes on to the next for a micro-batch."""
        raise NotImplementedError
